"""Which slides a chapter makes: headings begin them, what was computed gets one of its own.

Of the prose a slide shows the beginning; what it does not show goes whole into the speaker's notes.
Nothing here is written for slides by hand, so a deck says what its chapter says.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["PLOTLY_MIME", "TWIN_MIME", "Slide", "outline"]

TWIN_MIME = "application/vnd.labcore.explorer+json"
PLOTLY_MIME = "application/vnd.plotly.v1+json"

# What a slide of 1280 by 720 holds, in pixels; a deck's script mends what is estimated wrongly.
ROOM = 620
LETTERS = 480  # of a paragraph
LINES = 20  # of printed text or code
COLUMNS = 96
PROSE, ASKED = (41, 78), (50, 62)  # height of a line, letters in it
CELL = (38, 100)
PRINTED, CODE = 27, 23  # height of a line
QUIZ = 520
FORMULA = 60

HEADING = re.compile(r"^(#{1,6})\s+(.*?)\s*#*$")
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z$`*])")
ABBREVIATED = ("et al.", "e.g.", "i.e.", "cf.", "Fig.", "Eq.")
TABLE_ROW = re.compile(r"<tr\b.*?</tr>", re.DOTALL)
CODE_BLOCK = re.compile(r"(<figure.*?<pre>)(.*?)(</pre>.*?</figure>)", re.DOTALL)
TAG = re.compile(r"<[^>]+>")


@dataclass(slots=True)
class Slide:
    """One slide. part: whether it begins a column of reveal.js, as the chapter's sections do.

    text: Markdown. markup: HTML below it. notes: Markdown for the speaker. height: estimated
    pixels below the title. full: whether nothing more may stand on it.
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

    figure: an output's data -> HTML of a living figure and its height in pixels. plain: Markdown
    without MyST's roles. Raises ValueError for a notebook that does not begin with a title, or
    that holds an error.
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
            raise ValueError("its first cell must be Markdown and begin with a title, '# ...'")
        return self.slides[-1]

    def _put(self, height: int, *, text: str = "", markup: str = "", full: bool = False) -> Slide:
        """Adds to the slide where there is room, else begins another one of the same title."""
        now = self._now()
        taken = now.full or (text and now.markup)
        if taken or (now.height and now.height + height > ROOM):
            now = Slide(now.title, False)
            self.slides.append(now)
        now.text = f"{now.text}\n\n{text}".strip()
        now.markup += markup
        now.height += height
        now.full = full
        return now

    def prose(self, text: str) -> None:
        """Headings begin slides; the first paragraph below one is shown, as far as it fits.

        Formulas, tables and code are shown, a formula with the paragraph that leads to it.
        """
        lead = ""  # the paragraph above
        shown = True  # whether a slide has it
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
        """What a cell printed and drew. Set-up, which the chapter folds away, is not shown."""
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
        elif "<tbody>" in markup:
            for part, height in _html_table_parts(markup):
                self._put(height, markup=part)
        elif "labcore-quiz" in markup:
            self._put(QUIZ, markup=markup, full=True)
        else:
            # What was measured may not stand beside the question that asks for a guess.
            asks = "labcore-predict" in markup
            self._put(_tall(TAG.sub("", markup), *ASKED) + 60, markup=markup, full=asks)


def _with_contents(slides: list[Slide]) -> list[Slide]:
    """Where a part begins with another heading at once, its slide lists what comes."""
    for number, slide in enumerate(slides):
        if slide.part and not slide.height:
            after = slides[number + 1 :]
            end = next((n for n, other in enumerate(after) if other.part), len(after))
            titles = dict.fromkeys(other.title for other in after[:end])
            slide.text = "\n".join(f"- {title}" for title in titles)
    return slides


def _blocks(text: str) -> list[str]:
    """Markdown cut at blank lines, and at headings; formulas and fences stay whole."""
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
    """Whole sentences of a paragraph, at most LETTERS; its first one in any case."""
    kept = ""
    for sentence in SENTENCE.split(paragraph):
        longer = f"{kept} {sentence}".strip()
        whole = not kept or kept.endswith(ABBREVIATED) or _odd(kept)
        if len(longer) > LETTERS and not whole:
            break
        kept = longer
    return kept


def _odd(text: str) -> bool:
    """Whether a cut here would lie inside a formula or code."""
    return text.count("$") % 2 == 1 or text.count("`") % 2 == 1 or text.count("**") % 2 == 1


def _tall(text: str, line: int, letters: int) -> int:
    """Pixels that text takes in lines of so many letters."""
    return -(-len(text) // letters) * line


def _in_parts(rows: list[str]) -> list[tuple[list[str], int]]:
    """A table's rows in parts that fit, with their heights."""
    parts: list[tuple[list[str], int]] = [([], CELL[0])]
    for row in rows:
        height = max(_tall(TAG.sub("", row), *CELL), CELL[0])
        kept, so_far = parts[-1]
        if kept and so_far + height > ROOM:
            parts.append(([row], CELL[0] + height))
        else:
            parts[-1] = ([*kept, row], so_far + height)
    return parts


def _table_parts(block: str) -> list[tuple[str, int]]:
    """A Markdown table as tables that fit, each with its head."""
    lines = block.split("\n")
    return [("\n".join(lines[:2] + rows), height) for rows, height in _in_parts(lines[2:])]


def _html_table_parts(markup: str) -> list[tuple[str, int]]:
    """The same for a table in HTML; what follows it stands below each part."""
    before, rest = markup.split("<tbody>", 1)
    body, after = rest.split("</tbody>", 1)
    return [
        (f"{before}<tbody>{''.join(rows)}</tbody>{after}", height)
        for rows, height in _in_parts(TABLE_ROW.findall(body))
    ]


def _code_parts(markup: str) -> list[tuple[str, int]]:
    """Functions, a long one in parts; Pygments closes its marks at the end of each line."""
    return [
        (f"{head}{chr(10).join(part)}{tail}", len(part))
        for head, code, tail in CODE_BLOCK.findall(markup)
        for part in _text_parts(code.strip("\n").split("\n"), html_lines=True)
    ]


def _height(lines: list[str]) -> int:
    """Lines on a slide, long ones wrapped."""
    return sum(max(_tall(TAG.sub("", line), 1, COLUMNS), 1) for line in lines)


def _text_parts(lines: list[str], *, html_lines: bool = False) -> list[list[str]]:
    """Lines in parts that fit; a cut before an indented line is avoided where that can be."""
    parts: list[list[str]] = []
    while lines:
        fit = next((n for n in range(len(lines), 0, -1) if _height(lines[:n]) <= LINES), 1)
        if fit < len(lines):
            bare = [TAG.sub("", line) if html_lines else line for line in lines]
            tidy = [n for n in range(LINES // 2, fit + 1) if not bare[n].startswith(" ")]
            fit = tidy[-1] if tidy else fit
        parts.append(lines[:fit])
        lines = lines[fit:]
    return parts
