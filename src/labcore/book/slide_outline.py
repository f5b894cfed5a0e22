"""Turns a chapter into slides: each heading begins one, and figures and output are added.

A slide shows the beginning of the prose. Paragraphs that it does not show in full go whole into the
speaker's notes. Nothing is written by hand for slides, so a deck says what its chapter says.
"""

from __future__ import annotations

import ast
import html
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["PLOTLY_MIME", "TWIN_MIME", "Slide", "outline"]

TWIN_MIME = "application/vnd.labcore.explorer+json"
PLOTLY_MIME = "application/vnd.plotly.v1+json"

# What a 1280 by 720 slide holds, in pixels; the deck's script corrects wrong estimates.
ROOM = 620
SLACK = 100  # more for a short last piece; the script then makes the slide's text smaller
LETTERS = 480  # of a paragraph
LINES = 20  # of printed text or code
FEWEST = 4  # lines worth a slide of their own
COLUMNS = 96
PROSE, ASKED = (41, 78), (50, 62)  # line height, letters per line
CELL = (38, 100)
PRINTED, CODE = 27, 23  # line height
QUIZ = 520
FORMULA = 60

HEADING = re.compile(r"^(#{1,6})\s+(.*?)\s*#*$")
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z$`*])")
ABBREVIATED = ("et al.", "e.g.", "i.e.", "cf.", "Fig.", "Eq.")
TABLE_ROW = re.compile(r"<tr\b.*?</tr>", re.DOTALL)
CARD = re.compile(r'(?=<div class="labcore-claim )')
CODE_BLOCK = re.compile(r"(<figure.*?<pre>)(.*?)(</pre>.*?</figure>)", re.DOTALL)
TAG = re.compile(r"<[^>]+>")


@dataclass(slots=True)
class Slide:
    """One slide. part: whether it begins a reveal.js column, as the chapter's sections do.

    text: Markdown. markup: HTML below it. notes: Markdown for the speaker. height: estimated
    pixels below the title. full: whether nothing more may be added.
    """

    title: str
    part: bool
    text: str = ""
    markup: str = ""
    notes: list[str] = field(default_factory=list)
    height: int = 0
    full: bool = False


def outline(
    notebook: Mapping[str, Any],
    *,
    figure: Callable[[dict[str, Any]], tuple[str, int]],
    plain: Callable[[str], str],
) -> list[Slide]:
    """The slides of an executed chapter.

    figure: an output's data -> HTML of an interactive figure and its height in pixels. plain:
    removes MyST's roles from Markdown. Raises ValueError for a notebook that does not begin with a
    title or that contains an error.
    """
    made = _Outline(figure)
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            made.prose(plain(source))
        elif cell["cell_type"] == "code":
            made.computed(cell.get("metadata", {}).get("tags", []), cell.get("outputs", []))
    return _with_contents(made.slides)


class _Outline:
    def __init__(self, figure: Callable[[dict[str, Any]], tuple[str, int]]) -> None:
        self.slides: list[Slide] = []
        self._figure = figure

    def _now(self) -> Slide:
        if not self.slides:
            raise ValueError("the first cell must be Markdown and begin with a title, '# ...'")
        return self.slides[-1]

    def _put(self, height: int, *, text: str = "", markup: str = "", full: bool = False) -> Slide:
        """Adds to the current slide if there is room, else begins another with the same title."""
        now = self._now()
        taken = now.full or (text and now.markup)
        room = ROOM + (SLACK if height <= SLACK else 0)
        if taken or (now.height and now.height + height > room):
            now = Slide(now.title, False)
            self.slides.append(now)
        now.text = f"{now.text}\n\n{text}".strip()
        now.markup += markup
        now.height += height
        now.full = full
        return now

    def prose(self, text: str) -> None:
        """Adds prose: headings begin slides and show as much of their first paragraph as fits.

        Formulas, tables and code are shown, a formula with the paragraph that introduces it.
        """
        lead = ""  # the paragraph above
        shown = True  # whether a slide shows it
        for block in _blocks(text):
            if heading := HEADING.match(block):
                self.slides.append(Slide(heading[2], len(heading[1]) <= 2))
                lead = ""
            elif block.startswith("$$"):
                above = "" if shown else _shortened(lead)
                height = FORMULA + PROSE[0] * block.count("\\\\") + _tall(above, *PROSE)
                self._put(height, text=f"{above}\n\n{block}")
                shown = True
            elif block.startswith("|"):
                for rows, height in _table_parts(block):
                    self._put(height, text=rows)
            elif block.startswith("```"):
                if self._now().markup:  # no Markdown may follow it
                    self._printed(block.partition("\n")[2].removesuffix("```"))
                else:
                    self._put(PRINTED * block.count("\n"), text=block)
            else:
                now = self._now()
                shown = not lead and not now.height
                part = _shortened(block) if shown else ""
                if shown:
                    self._put(_tall(part, *PROSE), text=part)
                if part != block:
                    now.notes.append(block)
                lead = block

    def computed(self, tags: list[str], outputs: list[Any]) -> None:
        """Adds what a cell printed and drew. Set-up cells, which the chapter folds, are skipped."""
        if wrong := next((o for o in outputs if o["output_type"] == "error"), None):
            raise ValueError(f"a cell ended with {wrong['ename']}: {wrong['evalue']}")
        printed = "".join("".join(o["text"]) for o in outputs if o["output_type"] == "stream")
        shown = [o["data"] for o in outputs if "data" in o]
        if "hide-input" in tags and not shown:
            return
        self._printed(printed)
        for data in shown:
            self._output(data)

    def _printed(self, text: str) -> None:
        if not text.strip():
            return
        for part in _text_parts(text.rstrip("\n").split("\n")):
            markup = f'<pre class="printed">{html.escape(chr(10).join(part))}</pre>'
            self._put(PRINTED * _height(part) + 40, markup=markup)

    def _output(self, data: dict[str, Any]) -> None:
        markup = "".join(data.get("text/html", ""))
        if TWIN_MIME in data or PLOTLY_MIME in data:
            markup, height = self._figure(data)
            self._put(height, markup=markup)
        elif not markup:
            self._printed("".join(data.get("text/plain", "")))
        elif "labcore-source" in markup:
            for part, lines in _code_parts(markup):
                self._put(CODE * lines + 70, markup=part)
        elif "labcore-claims" in markup:
            for card in CARD.split(markup.removesuffix("</div>"))[1:]:
                self._put(ROOM, markup=card, full=True)
        elif "<tbody>" in markup:
            for part, height in _html_table_parts(markup):
                self._put(height, markup=part)
        elif "labcore-quiz" in markup:
            self._put(QUIZ, markup=markup, full=True)
        else:
            # A measured result must not be next to the question that asks for a prediction.
            asks = "labcore-predict" in markup
            self._put(_tall(TAG.sub("", markup), *ASKED) + 60, markup=markup, full=asks)


def _with_contents(slides: list[Slide]) -> list[Slide]:
    """Gives each empty part slide a list of the headings that follow."""
    for number, slide in enumerate(slides):
        if slide.part and not slide.height:
            after = slides[number + 1 :]
            end = next((n for n, other in enumerate(after) if other.part), len(after))
            titles = dict.fromkeys(other.title for other in after[:end])
            slide.text = "\n".join(f"- {title}" for title in titles)
    return slides


def _blocks(text: str) -> list[str]:
    """Markdown split at blank lines and headings; formulas and fences stay whole."""
    blocks: list[list[str]] = [[]]
    closing = ""
    for line in text.split("\n"):
        mark = line.strip()
        if closing:
            blocks[-1].append(line)
            if mark.endswith(closing):
                closing = ""
                blocks.append([])
        elif not mark:
            blocks.append([])
        elif HEADING.match(line):
            blocks += [[line], []]
        elif mark.startswith(("$$", "```")):
            blocks.append([line])
            fence = mark[:3] if mark.startswith("```") else "$$"
            closing = "" if mark.endswith("$$") and len(mark) > 2 else fence
        else:
            blocks[-1].append(line)
    return [joined for block in blocks if (joined := "\n".join(block).strip())]


def _shortened(paragraph: str) -> str:
    """The first whole sentences of a paragraph, up to LETTERS but at least one sentence."""
    kept = ""
    for sentence in SENTENCE.split(paragraph):
        longer = f"{kept} {sentence}".strip()
        whole = not kept or kept.endswith(ABBREVIATED) or _odd(kept)
        if len(longer) > LETTERS and not whole:
            break
        kept = longer
    return kept


def _odd(text: str) -> bool:
    """Whether a cut here would be inside a formula, code or bold text."""
    return text.count("$") % 2 == 1 or text.count("`") % 2 == 1 or text.count("**") % 2 == 1


def _tall(text: str, line: int, letters: int) -> int:
    """The height of text with `letters` per line and lines of height `line`."""
    return -(-len(text) // letters) * line


def _in_parts(rows: list[str]) -> list[tuple[list[str], int]]:
    """A table's rows split into parts of about the same height that fit, with their heights."""
    heights = [max(_tall(TAG.sub("", row), *CELL), CELL[0]) for row in rows]
    count = -(-sum(heights) // (ROOM - CELL[0]))
    goal = CELL[0] + sum(heights) / max(count, 1)
    parts: list[tuple[list[str], int]] = [([], CELL[0])]
    for row, height in zip(rows, heights, strict=True):
        kept, so_far = parts[-1]
        if kept and (so_far >= goal or so_far + height > ROOM):
            parts.append(([row], CELL[0] + height))
        else:
            parts[-1] = ([*kept, row], so_far + height)
    return parts


def _table_parts(block: str) -> list[tuple[str, int]]:
    """A Markdown table split into tables that fit, each with the header."""
    lines = block.split("\n")
    return [("\n".join(lines[:2] + rows), height) for rows, height in _in_parts(lines[2:])]


def _html_table_parts(markup: str) -> list[tuple[str, int]]:
    """The same for an HTML table; what follows it is repeated below each part."""
    before, rest = markup.split("<tbody>", 1)
    body, after = rest.split("</tbody>", 1)
    return [
        (f"{before}<tbody>{''.join(rows)}</tbody>{after}", height)
        for rows, height in _in_parts(TABLE_ROW.findall(body))
    ]


def _code_parts(markup: str) -> list[tuple[str, int]]:
    """Functions, split if long. Pygments closes its tags on each line, so any line may be a cut."""
    return [
        (f"{head}{chr(10).join(part)}{tail}", len(part))
        for head, code, tail in CODE_BLOCK.findall(markup)
        for part in _text_parts(code.strip("\n").split("\n"), python=True)
    ]


def _height(lines: list[str]) -> int:
    """The number of lines on a slide after wrapping."""
    return sum(max(_tall(TAG.sub("", line), 1, COLUMNS), 1) for line in lines)


def _text_parts(lines: list[str], *, python: bool = False) -> list[list[str]]:
    """Lines split into parts that fit, if possible before an unindented line.

    python: the lines are highlighted Python, which is split between statements.
    """
    starts = _statements(lines) if python else set()
    starts = starts or {n for n, line in enumerate(lines) if line[:1].strip()}
    parts, begin = [], 0
    while begin < len(lines):
        end = begin + 1
        while end < len(lines) and _height(lines[begin : end + 1]) <= LINES:
            end += 1
        if end < len(lines):
            end = min(end, max(len(lines) - FEWEST, begin + 1))
            cuts = [n for n in range(begin + LINES // 2, end + 1) if n in starts]
            end = min(cuts, key=lambda n: (_indent(lines[n]), -n), default=end)
        parts.append(lines[begin:end])
        begin = end
    return parts


def _statements(lines: list[str]) -> set[int]:
    """The places of the lines that begin a statement, with its decorators; none if it's no Python.

    lines: highlighted by HTML tags.
    """
    text = html.unescape("\n".join(TAG.sub("", line) for line in lines))
    try:
        tree = ast.parse(textwrap.dedent(text))
    except SyntaxError:
        return set()
    return {
        min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))]) - 1
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt)
    }


def _indent(line: str) -> int:
    bare = TAG.sub("", line)
    return len(bare) - len(bare.lstrip())
