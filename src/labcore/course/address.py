"""The repository's address: `_config.yml` defines it, and this command copies it elsewhere.

The line `repository: url: "…"` in `_config.yml` is empty until someone runs
`python -m labcore address https://github.com/<owner>/<name>`. That also writes the address to

- the first code cell of every notebook in `book/` and of every lab's source and release (the cell
  installs labcore if it is missing),
- blocks of the README and of the book's first page between `<!-- address: clone -->` or
  `<!-- address: links -->` and `<!-- address: end -->`,
- the line `repository-code` in `CITATION.cff`,
- the line `# Binder:` in `environment.yml`.

Without an argument, `python -m labcore address` prints the address and whether all places agree.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from labcore.labs.first_cell import SETUP_LINE, first_cell

__all__ = [
    "check",
    "pages_address",
    "parse_address",
    "read",
    "report",
    "write",
]

BLOCK = re.compile(r"(<!-- address: (clone|links) -->\n).*?(<!-- address: end -->)", re.DOTALL)
CONFIG_URL = re.compile(
    r"^(?P<head>repository:[ \t]*(?:#.*)?\n(?:[ \t]+.*\n|[ \t]*#.*\n|[ \t]*\n)*?[ \t]+url:[ \t]*)"
    r"(?P<quote>[\"']?)(?P<url>[^\"'#\s]*)(?P=quote)(?P<tail>[ \t]*(?:#.*)?)$",
    re.MULTILINE,
)
CITATION_LINE = re.compile(r"^repository-code:.*\n", re.MULTILINE)
BINDER_LINE = re.compile(r"^# Binder:.*\n", re.MULTILINE)


def parse_address(text: str) -> str:
    """The address in canonical form: https, host, owner, name; no `.git`, no trailing slash.

    Raises ValueError for anything else, except that "" (no address) stays "".
    """
    address = text.strip().rstrip("/").removesuffix(".git")
    if not address:
        return ""
    parts = urlsplit(address)
    names = parts.path.strip("/").split("/")
    plain = re.fullmatch(r"https://[A-Za-z0-9.-]+(:[0-9]+)?(/[A-Za-z0-9._-]+)+", address)
    if not plain or len(names) < 2 or parts.hostname is None:
        raise ValueError(
            f"the address must be https://<host>/<owner>/<name>, got {text!r}; "
            "copy it from the repository's page in a browser"
        )
    return address


def _github(address: str) -> str | None:
    """owner/name for an address on GitHub, else None. Colab, Binder and Pages need it."""
    parts = urlsplit(address)
    names = parts.path.strip("/")
    return names if parts.hostname == "github.com" and names.count("/") == 1 else None


def pages_address(address: str) -> str | None:
    """The address of the book on GitHub Pages; None unless the repository is on GitHub."""
    if not (slug := _github(address)):
        return None
    owner, name = slug.split("/")
    return f"https://{owner.lower()}.github.io/{name}/"


def _binder(address: str) -> str | None:
    slug = _github(address)
    return f"https://mybinder.org/v2/gh/{slug}/main?urlpath=lab" if slug else None


def _block(kind: str, address: str) -> str:
    if kind == "clone":
        where = address or "<address of this repository>"
        return f"```bash\ngit clone {where} course && cd course\nmake course\n```\n"
    if not (slug := _github(address)):
        return f"Source: <{address}>\n" if address else ""
    return (
        f"[Read the book]({pages_address(address)}) · "
        f"[open a chapter in Colab](https://colab.research.google.com/github/{slug}) · "
        f"[start it on Binder]({_binder(address)}) · "
        f"[open it in a codespace](https://codespaces.new/{slug})\n"
    )


def _config(text: str, address: str) -> str:
    match = CONFIG_URL.search(text)
    if match is None:
        raise ValueError(
            "_config.yml must have a line `url:` under `repository:`; add `repository:` and, "
            'below it, `  url: ""`'
        )
    line = f'{match["head"]}"{address}"{match["tail"]}'
    return text[: match.start()] + line + text[match.end() :]


def _blocks(text: str, address: str) -> str:
    return BLOCK.sub(lambda m: m[1] + _block(m[2], address) + m[3], text)


def _citation(text: str, address: str) -> str:
    text = CITATION_LINE.sub("", text)
    return text.rstrip("\n") + f'\nrepository-code: "{address}"\n' if address else text


def _environment(text: str, address: str) -> str:
    text = BINDER_LINE.sub("", text)
    return f"# Binder: {_binder(address)}\n{text}" if _binder(address) else text


def _notebook(text: str, address: str) -> str:
    notebook = json.loads(text)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    if not code or not "".join(code[0]["source"]).startswith(SETUP_LINE):
        raise ValueError(
            "the first code cell must be the set-up cell of labcore.labs.first_cell; "
            f"begin that cell with the line {SETUP_LINE!r}"
        )
    code[0]["source"] = first_cell(address).splitlines(keepends=True)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _places(root: Path) -> dict[Path, Callable[[str, str], str]]:
    places: dict[Path, Callable[[str, str], str]] = {
        root / "_config.yml": _config,
        root / "README.md": _blocks,
        root / "book" / "index.md": _blocks,
        root / "CITATION.cff": _citation,
        root / "environment.yml": _environment,
    }
    notebooks = sorted((root / "book").glob("*.ipynb"))
    # Only <slug>/<slug>.ipynb: there may be edited copies next to a release.
    for folder in sorted((root / "labs").glob("*/*/")):
        lab = folder / f"{folder.name}.ipynb"
        if folder.parent.name in ("source", "release") and lab.is_file():
            notebooks.append(lab)
    return places | dict.fromkeys(notebooks, _notebook)


def read(root: Path) -> str:
    """The address in `_config.yml` of the checkout at root; "" if there is none yet."""
    path = root / "_config.yml"
    if not path.is_file():
        raise ValueError(f"{root} has no _config.yml; run this in the course's folder")
    match = CONFIG_URL.search(path.read_text(encoding="utf-8"))
    return parse_address(match["url"]) if match else ""


def _rewritten(root: Path, address: str) -> dict[Path, tuple[str, str]]:
    """The current text and the text for this address, for each place."""
    texts = {}
    for path, rewrite in _places(root).items():
        now = path.read_text(encoding="utf-8")
        try:
            texts[path] = (now, rewrite(now, address))
        except ValueError as error:
            raise ValueError(f"{path.relative_to(root)}: {error}") from error
    return texts


def write(root: Path, address: str) -> list[Path]:
    """Writes the address to every place in the checkout at root; returns the files that changed.

    Raises ValueError and writes nothing if one of the places cannot be updated.
    """
    address = parse_address(address)
    changed = []
    for path, (now, wanted) in _rewritten(root, address).items():
        if now != wanted:
            path.write_text(wanted, encoding="utf-8")
            changed.append(path)
    return changed


def check(root: Path) -> list[Path]:
    """The files in the checkout at root that disagree with the address in `_config.yml`."""
    texts = _rewritten(root, read(root)).items()
    return [path for path, (now, new) in texts if path.name != "_config.yml" and now != new]


def report(root: Path) -> tuple[list[str], bool]:
    """What `python -m labcore address` prints for the checkout at root, and whether all agree."""
    address, apart = read(root), check(root)
    lines = [f"address: {address or 'none yet; set it with `python -m labcore address <URL>`'}"]
    for path in apart:
        lines.append(f"differs from _config.yml: {path.relative_to(root)}; write the address again")
    if not apart:
        lines.append("every place agrees with _config.yml")
    return lines, not apart
