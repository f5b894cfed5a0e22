"""What a program uses of labcore, with hashes of its text or of its behavior.

A page runs again when the text of a module changes, because it may show that text. A record becomes
stale only when a definition that its case uses does something different; see
`labcore.records.trees`. Triton kernels count only for records of a GPU.
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

__all__ = ["closure", "describe", "digest", "digest_modules", "digest_names", "modules"]

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
def _statements(path: Path, state: tuple[int, int]) -> tuple[trees.Statement, ...]:  # noqa: ARG001
    return trees.statements(_code(path), lambda name: _module_file(name) is not None)


def _lines(statements: Iterable[trees.Statement]) -> list[bytes]:
    return sorted(one.line.encode() for one in statements if one.line)


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
    lines = _lines(one for file in there for one in _statements(file, _state(file)))
    compiled = [part for file in there for part in _compiled(file)]
    gone = str(len(files) - len(there)) if len(files) > len(there) else ""
    return _hash([*lines, *compiled, gone.encode()])


def _used(path: Path, name: str, *, otherwise_all: bool) -> tuple[set[trees.Statement], set[str]]:
    """Return the statements of a file that one of its names needs, and the names of labcore there.

    Statements that bind nothing, such as a registration, always belong to them.
    otherwise_all: whether a name that the file doesn't bind stands for all of it.
    """
    table = _statements(path, _state(path))
    binders: dict[str, list[trees.Statement]] = {}
    for one in table:
        for bound in one.binds:
            binders.setdefault(bound, []).append(one)
    waiting = [one for one in table if not one.binds]
    waiting += binders.get(name, table if otherwise_all else ())
    found: set[trees.Statement] = set()
    while waiting:
        if (one := waiting.pop()) not in found:
            found.add(one)
            waiting += [other for used in one.uses for other in binders.get(used, ())]
    return found, {used for one in found for used in one.uses if used not in binders}


def _path_to(dotted: str) -> list[tuple[Path, str]]:
    """Return the files that importing a dotted name runs, each with the next part of the name."""
    parts = [*dotted.split("."), ""]
    files = [(_module_file(".".join(parts[:k])), parts[k]) for k in range(1, len(parts))]
    return [(file, name) for file, name in files if file]


@functools.lru_cache(maxsize=4096)
def _defines_kernels(path: Path, state: tuple[int, int]) -> bool:  # noqa: ARG001
    return "\n@triton.jit" in path.read_text(encoding="utf-8")


def digest_names(names: Iterable[str], *, gpu: bool) -> str:
    """Hash what these dotted names of labcore do, and all that they use, in 16 hex digits.

    How records are kept doesn't count: it changes nothing that is measured.
    gpu: whether files that define Triton kernels count. No record of a CPU runs one.
    """
    waiting, done = set(names), set[str]()
    lines, compiled = set[trees.Statement](), set[bytes]()
    while waiting:
        done.add(dotted := waiting.pop())
        path_to = _path_to(dotted)
        for path, name in path_to:
            if not gpu and _defines_kernels(path, _state(path)):
                continue
            found, used = _used(path, name, otherwise_all=path == path_to[-1][0])
            lines |= found
            waiting |= {name for name in used - done if not name.startswith("labcore.records")}
            compiled.update(_compiled(path))
    return _hash([*_lines(lines), *sorted(compiled)])


def describe(path: Path | str, function: str, *, gpu: bool) -> dict[str, Any]:
    """Return what a record keeps of its code.

    path: a benchmark. function: the function at its top that measures, or that declares the case;
    any other name, such as "", stands for the whole file.
    gpu: whether the record is one of a GPU.
    Returns its name, hashes of what it uses of the file and of labcore, and the names of labcore
    that the file uses for it.
    """
    found, names = _used(Path(path).resolve(), function, otherwise_all=True)
    return {
        "function": function,
        "benchmark": _hash(_lines(found)),
        "labcore": digest_names(names, gpu=gpu),
        "names": sorted(names),
    }
