"""Which labcore modules a program imports, and one hash over all of them."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["closure", "describe", "digest", "digest_modules", "modules"]

PACKAGE = Path(__file__).resolve().parent.parent


def _module_file(dotted: str) -> Path | None:
    """The file of `labcore.a.b`, or None where that names something inside a module."""
    base = PACKAGE.joinpath(*dotted.split(".")[1:])
    for candidate in (base / "__init__.py", base.with_suffix(".py")):
        if candidate.is_file():
            return candidate
    return None


def _module_name(path: Path) -> str:
    parts = ["labcore", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(source: str, module: str, is_package: bool) -> set[str]:
    """Dotted labcore names that `source` imports; `module` resolves relative imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parent = parts if is_package else parts[:-1]
                above = parent[: len(parent) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            names.add(base)
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return {name for name in names if name == "labcore" or name.startswith("labcore.")}


def _with_parents(names: set[str]) -> set[str]:
    """Importing a.b.c also runs a and a.b."""
    return {".".join(name.split(".")[:k]) for name in names for k in range(1, name.count(".") + 2)}


def _code(path: Path) -> str:
    """The Python of a file; of a notebook its code cells, magics and shell lines left out."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    lines = [
        line
        for cell in cells
        if cell["cell_type"] == "code"
        for line in "".join(cell["source"]).splitlines()
    ]
    return "\n".join(line for line in lines if not line.lstrip().startswith(("%", "!")))


def _module_imports(path: Path) -> set[str]:
    source = path.read_text(encoding="utf-8")
    return _imports(source, _module_name(path), path.name == "__init__.py")


def closure(path: Path | str) -> tuple[Path, ...]:
    """The files of labcore that `path` (module, script or notebook) imports, directly or not.

    Read from the syntax tree, so nothing is run; an import inside a function counts too.
    """
    path = Path(path).resolve()
    waiting = _with_parents(_imports(_code(path), "", False))
    found: dict[str, Path] = {}
    while waiting:
        name = waiting.pop()
        file = _module_file(name)
        if file is None or name in found:
            continue
        found[name] = file
        waiting |= _with_parents(_module_imports(file)) - found.keys()
    return tuple(sorted(set(found.values())))


def modules(path: Path | str) -> list[str]:
    """The dotted names of `closure(path)`."""
    return [_module_name(file) for file in closure(path)]


def _hash(parts: Iterable[bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(part)
        total.update(b"\0")
    return total.hexdigest()[:16]


def digest(path: Path | str) -> str:
    """A hash (16 hex digits) over the code of `path` and of the labcore modules it imports."""
    path = Path(path).resolve()
    names = [_module_name(file) for file in closure(path) if file != path]
    return _hash([_code(path).encode(), digest_modules(names).encode()])


def digest_modules(names: Iterable[str]) -> str:
    """A hash over the files of these labcore modules; one that is gone changes it too.

    A package's `source/` folder counts with it: what it compiles at run time.
    """
    parts: list[bytes] = []
    for name in sorted(names):
        file = _module_file(name)
        parts += [name.encode(), file.read_bytes() if file else b""]
        if file and file.name == "__init__.py":
            folder = file.parent / "source"
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                parts += [path.relative_to(file.parent).as_posix().encode(), path.read_bytes()]
    return _hash(parts)


def describe(path: Path | str) -> dict[str, Any]:
    """What a record keeps of its code: hashes of the benchmark file and of labcore, and which."""
    names = modules(path)
    return {
        "benchmark": _hash([_code(Path(path)).encode()]),
        "labcore": digest_modules(names),
        "modules": names,
    }
