"""The labcore modules that a program imports, with hashes of their text or of their behavior.

A page runs again when the text changes, because it may show that text. A record becomes stale only
when the code does something different; see `labcore.records.trees`.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from labcore.records import trees

__all__ = ["closure", "describe", "digest", "digest_modules", "modules"]

PACKAGE = Path(__file__).resolve().parent.parent


def _module_file(dotted: str) -> Path | None:
    """Return the file of `labcore.a.b`, or None if that name is defined inside a module."""
    base = PACKAGE.joinpath(*dotted.split(".")[1:])
    for candidate in (base / "__init__.py", base.with_suffix(".py")):
        if candidate.is_file():
            return candidate
    return None


def _module_name(path: Path) -> str:
    parts = ["labcore", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(source: str, module: str, is_package: bool) -> set[str]:
    """Return the dotted labcore names that `source` imports. `module` resolves relative imports."""
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
    """Add the parents of each name, because importing a.b.c also runs a and a.b."""
    return {".".join(name.split(".")[:k]) for name in names for k in range(1, name.count(".") + 2)}


def _code(path: Path) -> str:
    """Return a file's Python code. For a notebook: its code cells without magics or shell lines."""
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


def _state(path: Path) -> tuple[int, int]:
    """Return a file's modification time and size, which change with its content."""
    found = path.stat()
    return found.st_mtime_ns, found.st_size


@functools.lru_cache(maxsize=4096)
def _imported(path: Path, state: tuple[int, int]) -> frozenset[str]:  # noqa: ARG001
    """Return what a labcore module imports from labcore. `state` changes with the file."""
    source = path.read_text(encoding="utf-8")
    names = _imports(source, _module_name(path), path.name == "__init__.py")
    return frozenset(_with_parents(names))


@functools.lru_cache(maxsize=4096)
def _statements(path: Path, state: tuple[int, int]) -> tuple[str, ...]:  # noqa: ARG001
    return trees.statements(_code(path), lambda name: _module_file(name) is not None)


def closure(path: Path | str) -> tuple[Path, ...]:
    """Return the labcore files that `path` (module, script or notebook) imports, even indirectly.

    The imports are read from the syntax tree, so nothing runs. Imports inside functions count too.
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
        waiting |= _imported(file, _state(file)) - found.keys()
    return tuple(sorted(set(found.values())))


def modules(path: Path | str) -> list[str]:
    """Return the dotted names of `closure(path)`."""
    return [_module_name(file) for file in closure(path)]


def _hash(parts: Iterable[bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(part)
        total.update(b"\0")
    return total.hexdigest()[:16]


def _compiled(file: Path) -> list[bytes]:
    """Return names and contents of a package's `source/` folder, which it compiles at run time."""
    if file.name != "__init__.py":
        return []
    files = sorted(path for path in (file.parent / "source").rglob("*") if path.is_file())
    return [
        part
        for path in files
        for part in (path.relative_to(file.parent).as_posix().encode(), path.read_bytes())
    ]


def digest(path: Path | str) -> str:
    """Hash the text of `path` and of the labcore modules it imports, in 16 hex digits."""
    path = Path(path).resolve()
    parts = [_code(path).encode()]
    for file in closure(path):
        if file != path:
            parts += [_module_name(file).encode(), file.read_bytes(), *_compiled(file)]
    return _hash(parts)


def digest_modules(names: Iterable[str]) -> str:
    """Hash what these labcore modules do, in 16 hex digits. Moving a definition doesn't change it.

    A package's `source/` folder is included. A missing module changes the hash too.
    """
    files = [_module_file(name) for name in sorted(names)]
    there = [file for file in files if file]
    statements = sorted(line for file in there for line in _statements(file, _state(file)))
    compiled = [part for file in there for part in _compiled(file)]
    gone = str(len(files) - len(there)) if len(files) > len(there) else ""
    return _hash([*(line.encode() for line in statements), *compiled, gone.encode()])


def describe(path: Path | str) -> dict[str, Any]:
    """Return what a record keeps of its code: hashes of the benchmark and labcore, and modules."""
    path = Path(path).resolve()
    names = modules(path)
    return {
        "benchmark": _hash(line.encode() for line in _statements(path, _state(path))),
        "labcore": digest_modules(names),
        "modules": names,
    }
