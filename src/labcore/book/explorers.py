"""Explorers and figures on the static page: HTML controls that drive plotly over stored frames.

An explorer's page loads its first frames from `_static/explorers/<hash>.js`. The others are slices
beside it, `<hash>-<number>.js`, which a control loads. They are scripts because a page opened from
a folder may not fetch data. Without JavaScript, a reader gets the text alternative.
"""

from __future__ import annotations

import hashlib
import html
import importlib
import importlib.util
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from myst_nb.core.render import MimeRenderPlugin
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

from labcore.ui import hosts, twin
from labcore.ui.compact import dumps

__all__ = [
    "FigureMime",
    "alternative_text",
    "drawn_markup",
    "figure_node",
    "plotly_script",
    "setup",
]

PLOTLY_MIME = "application/vnd.plotly.v1+json"
WIDGET_MIME = "application/vnd.jupyter.widget-view+json"
PLOTLY_FILE = "vendor/plotly.min.js"
FOLDER = "explorers"
SCRIPT, STYLE = "twin.js", "twin.css"
SLICE = re.compile(r"-\d+$")  # the end of a slice's name
ASSETS = Path(__file__).parent / "assets"


class TwinNode(nodes.General, nodes.Element):
    """One explorer or figure in the document, with attributes html and alt."""


class FigureMime(MimeRenderPlugin):
    """myst-nb's hook into this module, named by the entry point `myst_nb.mime_renderers`."""

    # Smaller numbers are preferred. Live widgets do not work on a page, so their text is shown.
    mime_priority_overrides: ClassVar[Any] = [
        *(("html", mime, 1) for mime in (twin.MIME, PLOTLY_MIME)),
        *(("dirhtml", mime, 1) for mime in (twin.MIME, PLOTLY_MIME)),
        ("*", WIDGET_MIME, None),
    ]

    @staticmethod
    def handle_mime(renderer: Any, data: Any, inline: bool) -> list[nodes.Element] | None:
        """The document nodes for an explorer's or a plotly figure's JSON, else None."""
        env = renderer.renderer.sphinx_env
        if env is None or inline or data.mime_type not in (twin.MIME, PLOTLY_MIME):
            return None
        if data.mime_type == twin.MIME:
            return [figure_node(env, dict(data.content))]
        alt = alternative_text(data.content)
        if not alt:
            renderer.logger.warning(
                "a figure without a text alternative: give it a title, or end the cell with "
                "labcore.ui.describe(figure, alt)",
                subtype="figure",
                line=data.line,
            )
        try:
            packed = twin.still(data.content, alt=alt or "A figure")
        except (TypeError, ValueError) as problem:
            renderer.logger.warning(str(problem), subtype="figure", line=data.line)
            return []
        return [figure_node(env, packed)]


def alternative_text(spec: dict[str, Any]) -> str:
    """The text alternative or else the title of a plotly figure as JSON; "" without either."""
    layout = spec.get("layout", {})
    meta, title = layout.get("meta"), layout.get("title")
    if isinstance(meta, dict) and meta.get("alt"):
        return str(meta["alt"])
    return str(title.get("text", "") if isinstance(title, dict) else title or "")


def _store(env: BuildEnvironment) -> dict[str, list[tuple[str, str]]]:
    """docname -> (name, script) of each explorer and slice on that page; kept between builds."""
    if not hasattr(env, "labcore_twins"):
        env.labcore_twins = {}  # type: ignore[attr-defined]
    return env.labcore_twins  # type: ignore[attr-defined]


def figure_node(env: BuildEnvironment, packed: dict[str, Any]) -> TwinNode:
    """The document node for what `twin.payload` or `twin.still` packed, on the page being read.

    The page loads the first slice; each other one is a script of its own.
    """
    key = hashlib.sha256(dumps(packed).encode()).hexdigest()[:16]
    start = twin.start(packed)
    slices = [one if place == start else None for place, one in enumerate(packed["slices"])]
    on_page = _store(env).setdefault(env.docname, [])
    on_page.append((key, _script("labcoreTwins", key, {**packed, "slices": slices})))
    on_page += [
        (name := f"{key}-{place}", _script("labcoreSlices", name, one))
        for place, one in enumerate(packed["slices"])
        if place != start
    ]
    number = sum(SLICE.search(name) is None for name, _ in on_page)
    node = TwinNode()
    node["html"] = drawn_markup(f"twin-{number}", key, packed)
    node["alt"] = packed["alt"]
    return node


def _script(table: str, key: str, value: Any) -> str:
    return f'(window.{table}=window.{table}||{{}})["{key}"]={dumps(value)};\n'


def drawn_markup(uid: str, key: str, packed: dict[str, Any]) -> str:
    """The HTML of a packed explorer. uid: an id unique on its page. key: names its script."""
    alt = html.escape(packed["alt"])
    controls = "".join(
        _control(f"{uid}-{number}", control) for number, control in enumerate(packed["controls"])
    )
    fixed = "".join(
        f"<li>{html.escape(item['label'])}: <strong>{html.escape(item['value'])}</strong> "
        "(moves in the book)</li>"
        for item in packed["fixed"]
    )
    form = f'<div class="twin-controls">{controls}</div>' if controls else ""
    rest = f'<ul class="twin-fixed">{fixed}</ul>' if fixed else ""
    height = int(packed["height"])
    group = f' role="group" aria-label="Interactive figure: {alt}"' if controls else ""
    return (
        f'<div class="labcore-twin" data-twin="{key}"{group}>{form}{rest}'
        f'<div class="twin-plot" role="img" aria-label="{alt}" style="min-height:{height}px"></div>'
        "<noscript><style>.twin-plot,.twin-controls{display:none}</style>"
        f"<p>Drawn by JavaScript: {alt}</p></noscript></div>\n"
    )


def _control(uid: str, control: dict[str, Any]) -> str:
    if control["kind"] == "nodes":
        return _nodes(uid, control)
    label, start = html.escape(control["label"]), control["start"]
    head = f'<div class="twin-control"><label for="{uid}">{label}</label>'
    if control["kind"] == "select":
        options = "".join(
            f'<option value="{i}"{" selected" if i == start else ""}>{html.escape(text)}</option>'
            for i, text in enumerate(control["values"])
        )
        return f'{head}<select id="{uid}" autocomplete="off">{options}</select></div>'
    if control["kind"] == "toggle":
        checked = " checked" if start else ""
        return f'{head}<input type="checkbox" id="{uid}" autocomplete="off"{checked}></div>'
    shown = html.escape(control["values"][start])
    return (
        f'{head}<input type="range" id="{uid}" min="0" max="{len(control["values"]) - 1}" step="1" '
        f'value="{start}" aria-valuetext="{shown}" autocomplete="off">'
        f'<output for="{uid}" aria-live="off">{shown}</output></div>'
    )


def _nodes(uid: str, control: dict[str, Any]) -> str:
    """Checkboxes for a tree's nodes, folded: a reader clicks the figure, or opens and uses them."""
    boxes = "".join(
        f'<label for="{uid}-{node}"><input type="checkbox" id="{uid}-{node}" value="{node}" '
        f'autocomplete="off"{" checked" if node in control["start"] else ""}>'
        f"{html.escape(name)}</label>"
        for node, name in enumerate(control["values"])
    )
    return (
        f'<details class="twin-control twin-nodes"><summary>{html.escape(control["label"])}: '
        f"<output>{len(control['start'])} of {len(control['values'])}</output></summary>"
        f'<fieldset aria-label="{html.escape(control["label"])}">{boxes}</fieldset></details>'
    )


def _visit_html(self: Any, node: TwinNode) -> None:
    self.body.append(node["html"])
    raise nodes.SkipNode


def _visit_text(self: Any, node: TwinNode) -> None:
    paragraph = nodes.paragraph("", node["alt"])
    paragraph.walkabout(self)
    raise nodes.SkipNode


def _forget(_app: Sphinx, env: BuildEnvironment, docname: str) -> None:
    _store(env).pop(docname, None)


def _merge(
    _app: Sphinx, env: BuildEnvironment, docnames: Iterable[str], other: BuildEnvironment
) -> None:
    theirs = _store(other)
    _store(env).update({name: theirs[name] for name in docnames if name in theirs})


def plotly_script() -> Path:
    """The installed package's plotly.js. Raises ExtensionError if plotly is not installed."""
    spec = importlib.util.find_spec("plotly")
    if spec is None or spec.origin is None:
        raise ExtensionError("plotly is not installed; run pip install 'labcore[book]'")
    return Path(spec.origin).parent / "package_data" / "plotly.min.js"


def _write(path: Path, content: bytes) -> None:
    if not path.exists() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _write_files(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """Updates `_static` before the pages that refer to it are written."""
    if app.builder.format != "html":
        return []
    static = Path(app.outdir) / "_static"
    wanted: dict[str, str] = {}
    for twins in _store(env).values():
        wanted |= {f"{key}.js": script for key, script in twins}
    for old in (static / FOLDER).glob("*"):
        if old.name not in wanted:
            old.unlink()
    for name, text in wanted.items():
        _write(static / FOLDER / name, text.encode())
    for file in (ASSETS / STYLE, hosts.STYLE):
        _write(static / file.name, file.read_bytes())
    if wanted:
        for file in (twin.FORMULAS, ASSETS / SCRIPT):
            _write(static / file.name, file.read_bytes())
        library = static / PLOTLY_FILE
        if not library.exists() or library.stat().st_size != plotly_script().stat().st_size:
            library.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(plotly_script(), library)
    return []


def _load_on_page(
    app: Sphinx, pagename: str, _template: str, _context: dict[str, Any], _doctree: Any
) -> None:
    """Adds the scripts of this page's explorers and figures; twin.js loads plotly itself."""
    twins = _store(app.env).get(pagename)
    if not twins:
        return
    for key in dict.fromkeys(key for key, _ in twins if not SLICE.search(key)):
        app.add_js_file(f"{FOLDER}/{key}.js", loading_method="defer")
    for name in (twin.FORMULAS.name, SCRIPT):
        app.add_js_file(name, loading_method="defer")


class Opening(SphinxDirective):
    """The explorer that `labcore.ui.figures.<slug>.opening` returns; the argument is the slug."""

    required_arguments = 1
    has_content = False

    def run(self) -> list[nodes.Node]:
        """The explorer; Sphinx reads the page again when the chapter's figures change."""
        figures = importlib.import_module(f"labcore.ui.figures.{self.arguments[0]}")
        self.env.note_dependency(str(figures.__file__))
        packed = figures.opening()._repr_mimebundle_()[twin.MIME]
        return [figure_node(self.env, packed)]


def setup(app: Sphinx) -> dict[str, Any]:
    """Connects to Sphinx; labcore.book calls it, and it also works as a separate extension."""
    app.add_node(
        TwinNode,
        html=(_visit_html, None),
        latex=(_visit_text, None),
        text=(_visit_text, None),
    )
    app.add_directive("opening", Opening)
    app.add_css_file(STYLE)
    app.add_css_file(hosts.STYLE.name)
    app.connect("env-purge-doc", _forget)
    app.connect("env-merge-info", _merge)
    app.connect("env-updated", _write_files)
    app.connect("html-page-context", _load_on_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
