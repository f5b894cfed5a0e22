"""A reader's own copies of chapters and labs: made once in `my/` and never overwritten.

`book/lion.ipynb` is copied to `my/lion.ipynb`, and its lab to `my/lion-lab.ipynb`. A copy's
metadata has a digest of the chapter that it was made from. If the chapter's cells change later,
the page offers the copy, the differences, and an additional fresh copy.
"""

import difflib
import hashlib
import html
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labcore.labs.source import TIERS

__all__ = ["Copy", "chapter_path", "chapters", "create", "differences", "drop_controls", "newest"]

METADATA = "labcore_copy"
LABS = "labs/release/*/*.ipynb"
WIDGET = "application/vnd.jupyter.widget-view+json"
GONE = "<p><small>These controls need a running kernel: press ▶▶ in the toolbar.</small></p>"
# Roles that the book resolves but JupyterLab would show as plain text.
CITED = re.compile(r"\{cite(:t)?\}`([^`]+)`")
TITLE = re.compile(r"\A# .+")
LINKED = re.compile(r"\{(?:doc|ref|term)\}`([^`<]+?)(?: *<[^`>]*>)?`")


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """One copy of a chapter. changed: whether the chapter has changed since the copy was made."""

    path: Path
    changed: bool


def chapters(root: Path) -> dict[str, Path]:
    """The notebooks that can be copied, by their path in the checkout ("book/lion.ipynb")."""
    paths = sorted(root.glob("book/*.ipynb"))
    paths += [path for path in sorted(root.glob(LABS)) if path.stem == path.parent.name]
    return {path.relative_to(root).as_posix(): path for path in paths}


def _copy_stem(root: Path, chapter: Path) -> str:
    """The name of the first copy; a lab's differs from its chapter's."""
    return chapter.stem if chapter.parent == root / "book" else f"{chapter.stem}-lab"


def chapter_path(root: Path, name: str) -> Path:
    """The chapter with this name. Raises ValueError for anything that is not a chapter."""
    known = chapters(root)
    if name not in known:
        raise ValueError(f"{name!r} is not a chapter; choose one of {', '.join(known)}")
    return known[name]


def _cells(notebook: dict[str, Any]) -> list[tuple[str, str]]:
    """(kind, text) of each cell; changed outputs and ids do not count as changes."""
    return [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]


def _read(path: Path) -> dict[str, Any] | None:
    """The notebook, or None if the file is not one: a reader may have saved anything there."""
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        _cells(notebook)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return dict(notebook)


def _name(key: str) -> str:
    """The author and year of a key such as chen2023lion; any other key unchanged."""
    match = re.match(r"([a-z]+)(\d{4})", key.strip())
    return f"{match[1].capitalize()} {match[2]}" if match else key.strip()


def _plain(match: re.Match[str]) -> str:
    names = "; ".join(_name(key) for key in match[2].split(","))
    return names if match[1] else f"[{names}]"


def _chapter(path: Path) -> dict[str, Any] | None:
    """The chapter as a copy shows it, with the book's citations and links as plain text."""
    notebook = _read(path)
    for number, cell in enumerate(notebook["cells"] if notebook else ()):
        if cell["cell_type"] == "markdown":
            text = LINKED.sub(r"\1", CITED.sub(_plain, "".join(cell["source"])))
            if notebook and not number:
                text = TITLE.sub(lambda match: match[0] + _head(notebook), text, count=1)
            cell["source"] = text.splitlines(keepends=True)
    return notebook


def _head(notebook: dict[str, Any]) -> str:
    """What the page shows below a chapter's title; "" for a lab, which has its own."""
    about = notebook.get("metadata", {}).get("labcore", {})
    if "objectives" not in about:
        return ""
    aims = "".join(f"\n- {line}" for line in about["objectives"])
    facts = f"*{about['minutes']} minutes; {TIERS[about['tier']]}.*"
    return f"\n\n{facts} After this chapter you can\n{aims}"


def _digest(notebook: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(_cells(notebook)).encode()).hexdigest()[:16]


def _number(path: Path, stem: str) -> int | None:
    match = re.fullmatch(rf"{re.escape(stem)}(?:-([0-9]+))?\.ipynb", path.name)
    return int(match[1] or 1) if match else None


def newest(root: Path, name: str) -> Copy | None:
    """The copy of this chapter with the highest number, or None if there is none."""
    chapter = chapter_path(root, name)
    numbered = {
        number: path
        for path in (root / "my").glob("*.ipynb")
        if (number := _number(path, _copy_stem(root, chapter))) is not None
    }
    if not numbered:
        return None
    path = numbered[max(numbered)]
    now, copied = _chapter(chapter), _read(path)
    if now is None or copied is None:
        return Copy(path=path, changed=True)
    made_from = copied.get("metadata", {}).get(METADATA, {}).get("digest", _digest(copied))
    return Copy(path=path, changed=made_from != _digest(now))


def create(root: Path, name: str, *, fresh: bool = False) -> Path:
    """The copy to open: the newest one, or a new one if there is none or `fresh` is true.

    Existing files are never overwritten. Raises ValueError if the chapter cannot be read.
    """
    chapter = chapter_path(root, name)
    found = newest(root, name)
    if found is not None and not fresh:
        return found.path
    notebook = _chapter(chapter)
    if notebook is None:
        raise ValueError(f"{name} is not a readable notebook; restore it with git")
    notebook.setdefault("metadata", {})[METADATA] = {"chapter": name, "digest": _digest(notebook)}
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    folder = root / "my"
    folder.mkdir(exist_ok=True)
    stem, number = _copy_stem(root, chapter), 1
    while True:
        path = folder / (f"{stem}.ipynb" if number == 1 else f"{stem}-{number}.ipynb")
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            number += 1
        else:
            return path


def _lines(mine: str, now: str) -> str:
    """The lines of two cells as HTML: "-" is only in the copy, "+" only in the chapter."""
    shown = []
    for line in difflib.ndiff(mine.splitlines(), now.splitlines()):
        kind, text = line[:2], html.escape(line)
        if kind != "? ":
            tag = {"- ": "del", "+ ": "ins"}.get(kind, "span")
            shown.append(f"<{tag}>{text}</{tag}>")
    return "<pre>" + "\n".join(shown) + "</pre>" if shown else ""


def differences(root: Path, name: str) -> str:
    """The differences between the newest copy and the chapter, cell by cell, as an HTML fragment.

    Raises ValueError if there is no copy or one of the two cannot be read.
    """
    found = newest(root, name)
    if found is None:
        raise ValueError(f"there is no copy of {name} in my/ yet; open the page and run it")
    mine, now = _read(found.path), _chapter(chapter_path(root, name))
    if mine is None or now is None:
        raise ValueError(f"{found.path.name} or {name} is not a readable notebook; restore it")
    old, new = _cells(mine), _cells(now)
    parts: list[str] = []
    for kind, i, j, k, m in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            count = j - i
            parts.append(f"<p class='same'>{count} identical cell{'s' * (count != 1)}</p>")
            continue
        for step in range(max(j - i, m - k)):
            before = old[i + step] if i + step < j else None
            after = new[k + step] if k + step < m else None
            where = (
                f"cell {i + step + 1} of yours" if before else "",
                f"cell {k + step + 1} of the chapter" if after else "",
            )
            cell = (after or before or ("", ""))[0]
            heading = " and ".join(filter(None, where))
            parts.append(f"<h2>{heading} ({html.escape(cell)})</h2>")
            parts.append(_lines(before[1] if before else "", after[1] if after else ""))
    return "\n".join(parts)


def drop_controls(*, model: dict[str, Any], **_: Any) -> None:
    """Say in a saved notebook how controls come back: JupyterLab shows only an error for them."""
    content = model.get("content") if model.get("type") == "notebook" else None
    for cell in (content or {}).get("cells", ()):
        for output in cell.get("outputs", ()):
            if output.get("data", {}).pop(WIDGET, None):
                output["data"]["text/html"] = GONE
