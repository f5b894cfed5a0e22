"""show_source(): labcore's own source, so that a page shows the code that the tests ran."""

from __future__ import annotations

import ast
import html
import inspect
import textwrap
from pathlib import Path
from typing import Any

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from labcore import device
from labcore.checks import one_of

__all__ = ["Source", "show_file", "show_source"]

_PACKAGE = "labcore"

# JupyterLab's editor colors, which follow its theme; the fallbacks are for other front ends.
_COLORS = {
    "k, .kn, .kc, .ow": "--jp-mirror-editor-keyword-color, #008000",
    "nf, .nc": "--jp-mirror-editor-def-color, #00f",
    "s1, .s2, .sd, .sa, .si": "--jp-mirror-editor-string-color, #b02020",
    "c1": "--jp-mirror-editor-comment-color, #408080",
    "mi, .mf": "--jp-mirror-editor-number-color, #087030",
    "o": "--jp-mirror-editor-operator-color, #a020f0",
    "nb, .bp": "--jp-mirror-editor-builtin-color, #008000",
    "nd": "--jp-mirror-editor-meta-color, #a020f0",
}


def show_source(*objects: Any, docstring: bool = True) -> Source:
    """Show the highlighted source of labcore's functions or classes, with file and line.

    docstring=False leaves out the docstrings. Raises TypeError for objects without Python source,
    and ValueError for objects from outside labcore or if none is given.
    """
    if not objects:
        raise ValueError("show_source needs a function or class of labcore, got nothing")
    return Source(*objects, docstring=docstring)


def show_file(path: Path, *names: str) -> Source:
    """Show a file of labcore that another program reads, or only some of its Python functions.

    path: such as the configuration that the Triton Inference Server loads. names: functions or
    methods in it, such as "Model.execute", shown without docstrings; none means the whole file.
    Raises ValueError for a file outside labcore, or without such a function.
    """
    package = Path(__import__(_PACKAGE).__file__ or "").parent
    if not path.is_relative_to(package):
        raise ValueError(f"show_file shows only labcore's files, got {path}; pass one of them")
    shown, text = f"src/{_PACKAGE}/{path.relative_to(package).as_posix()}", path.read_text("utf-8")
    source = Source()
    if not names:
        source.parts = ((path.name, shown, 1, text.rstrip()),)
        return source
    found = {}
    for node in ast.walk(ast.parse(text)):
        inside = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for one in (
            getattr(node, "body", ()) if isinstance(node, (ast.Module, ast.ClassDef)) else ()
        ):
            if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found[inside + one.name] = one
    source.parts = tuple(
        (
            name, shown, (node := found[one_of("name", name, found)]).lineno,
            _without_docstrings(textwrap.dedent("".join(
                text.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno]
            )).rstrip()),
        )
        for name in names
    )  # fmt: skip
    return source


class Source:
    """The result of `show_source`; parts holds (name, file, first line, text) for each object."""

    def __init__(self, *objects: Any, docstring: bool = True) -> None:
        self.parts = tuple(_read(item, docstring) for item in objects)

    def _repr_mimebundle_(self, **_wanted: Any) -> dict[str, Any]:
        style = "" if device.building_book() else _live_style()
        blocks = "".join(
            f'<figure class="labcore-html labcore-source"><figcaption>'
            f"<code>{html.escape(name)}</code> <small>{html.escape(path)}, line {line}"
            "</small></figcaption>"
            '<div class="highlight-python notranslate">'
            f"{highlight(text, PythonLexer(), HtmlFormatter())}</div></figure>"
            for name, path, line, text in self.parts
        )
        plain = "\n\n".join(
            f"# {name} ({path}:{line})\n{text}" for name, path, line, text in self.parts
        )
        return {"text/html": style + blocks, "text/plain": plain}


def _live_style() -> str:
    rules = "".join(
        f".labcore-source .{names.replace(' .', ' .labcore-source .')}{{color:var({color})}}"
        for names, color in _COLORS.items()
    )
    return f"<style>{rules}.labcore-source{{margin:0}}.labcore-source pre{{overflow:auto}}</style>"


def _read(item: Any, docstring: bool) -> tuple[str, str, int, str]:
    # A @triton.jit kernel keeps the function in `fn`; other decorators keep it in __wrapped__.
    function = inspect.unwrap(getattr(item, "fn", item))
    module = getattr(function, "__module__", None) or ""
    name = getattr(function, "__qualname__", repr(item))
    if module.split(".")[0] != _PACKAGE:
        raise ValueError(
            f"show_source shows only labcore's code, got {name} of {module or 'no module'}; "
            "pass a function or class of labcore"
        )
    try:
        lines, first = inspect.getsourcelines(function)
        file = Path(inspect.getsourcefile(function) or "")
    except (OSError, TypeError) as problem:
        raise TypeError(f"show_source: {name} has no Python source ({problem})") from None
    text = textwrap.dedent("".join(lines)).rstrip()
    package = Path(inspect.getsourcefile(__import__(_PACKAGE)) or "").parent
    path = f"src/{_PACKAGE}/{file.relative_to(package).as_posix()}"
    return f"{module}.{name}", path, first, text if docstring else _without_docstrings(text)


def _without_docstrings(text: str) -> str:
    """Return `text` without the lines of its docstrings."""
    drop: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        head = node.body[0]
        if ast.get_docstring(node, clean=False) is not None and len(node.body) > 1:
            last = head.end_lineno or head.lineno
            drop.update(range(head.lineno, last + 1))
    return "\n".join(
        line for number, line in enumerate(text.splitlines(), start=1) if number not in drop
    )
