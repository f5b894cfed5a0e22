"""A program's behavior as text, which doesn't change if only wording or file layout changes.

Each statement of a file becomes a line made from its syntax tree, with the names that it uses. The
lines leave out comments, docstrings, imports, `__all__`, the names of labcore's modules and the
messages of raised errors, so moving or rewording a definition changes no line. The lines are the
same on every Python version that the project supports.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Statement", "statements"]

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
# Fields that only some Python versions have, or that follow from the rest of the tree.
SKIPPED = {"ctx", "kind", "type_comment", "type_ignores", "type_params"}


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement at the top of a file.

    line: its text; an import and `__all__` have none. binds: the names that it binds in the file.
    uses: the names of the file's own top, and the dotted names of labcore, that it reads.
    """

    line: str
    binds: frozenset[str]
    uses: frozenset[str]


def _bound(tree: ast.AST) -> dict[str, str]:
    """Map each name that a file's imports of labcore bind to its full dotted name."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            # Without an alias, `import a.b` binds only `a`.
            roots = [a.asname or a.name.split(".")[0] for a in node.names]
            names |= {r: a.name if a.asname else r for r, a in zip(roots, node.names, strict=True)}
    return {name: dotted for name, dotted in names.items() if dotted.split(".")[0] == "labcore"}


class _Bare(ast.NodeTransformer):
    """Remove what doesn't affect behavior, and the module in front of each name it defines."""

    def __init__(self, names: dict[str, str], is_module: Callable[[str], bool]) -> None:
        self._names, self._is_module = names, is_module

    def _defined(self, dotted: list[str]) -> ast.expr:
        """Return the name without its module, or the last part of a module's name on its own."""
        last = len(dotted) - 1
        parents = (k for k in range(last, 0, -1) if self._is_module(".".join(dotted[:k])))
        name, *attributes = dotted[next(parents, 0) :]
        found: ast.expr = ast.Name(name)
        for attribute in attributes:
            found = ast.Attribute(found, attribute)
        return found

    def visit_Import(self, node: ast.Import) -> None:
        """Remove imports: a definition counts in its own file."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Remove imports: a definition counts in its own file."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        """Remove docstrings."""
        text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if text else self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        """Keep the type of the error, not its message: a run that raises records nothing."""
        exc = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        return self.generic_visit(ast.Raise(exc, node.cause))

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Replace an imported name by the name in its definition."""
        return self._defined(self._names[node.id].split(".")) if node.id in self._names else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Replace `module.name` by `name`."""
        attributes, root = [], node
        while isinstance(root, ast.Attribute):
            attributes.append(root.attr)
            root = root.value  # type: ignore[assignment]
        if isinstance(root, ast.Name) and root.id in self._names:
            return self._defined([*self._names[root.id].split("."), *reversed(attributes)])
        return self.generic_visit(node)


def _text(part: Any) -> str:
    """Turn a tree into text. `ast.dump` and `ast.unparse` differ between Python versions."""
    if isinstance(part, list):
        return f"[{', '.join(map(_text, part))}]"
    if not isinstance(part, ast.AST):
        return repr(part)
    if isinstance(part, ast.JoinedStr):
        part = ast.JoinedStr(_joined(part.values))
    fields = [
        f"{name}={_text(value)}"
        for name, value in ast.iter_fields(part)
        if name not in SKIPPED and value is not None and value != []
    ]
    return f"{type(part).__name__}({', '.join(fields)})"


def _joined(values: list[ast.expr]) -> list[ast.expr]:
    """Join adjacent text parts of an f-string, which only some Python versions do."""
    parts: list[ast.expr] = []
    for value in values:
        if isinstance(value, ast.Constant) and parts and isinstance(parts[-1], ast.Constant):
            parts[-1] = ast.Constant(str(parts[-1].value) + str(value.value))
        elif not (isinstance(value, ast.Constant) and value.value == ""):
            parts.append(value)
    return parts


def _is_face(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"


def _binds(node: ast.AST) -> frozenset[str]:
    """Return the names that a statement binds outside of its functions and comprehensions."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return frozenset({node.name})
    if isinstance(node, ast.comprehension | ast.Lambda):
        return frozenset()
    if isinstance(node, ast.Name):
        return frozenset({node.id} if isinstance(node.ctx, ast.Store) else ())
    return frozenset[str]().union(*map(_binds, ast.iter_child_nodes(node)))


def _parts(node: ast.AST) -> tuple[list[ast.AST], list[ast.AST]]:
    """Return the children that are read outside of a node, and those that see its own names.

    Outside are a function's defaults and annotations, and what a comprehension goes through.
    """
    if isinstance(node, COMPREHENSIONS):
        told = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        tests = [test for one in node.generators for test in one.ifs]
        return [one.iter for one in node.generators], [*told, *tests]
    children = [*ast.iter_child_nodes(node)]
    if not isinstance(node, FUNCTIONS):
        return children, []
    inside: list[ast.AST] = [*node.body] if isinstance(node.body, list) else [node.body]
    return [child for child in children if child not in inside], inside


def _own(node: ast.AST) -> frozenset[str]:
    """Return the names that a function or comprehension has for itself."""
    if isinstance(node, COMPREHENSIONS):
        return frozenset[str]().union(*(_binds(one.target) for one in node.generators))
    if not isinstance(node, FUNCTIONS):
        return frozenset()
    inside = [*ast.walk(node)]
    given = {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
    shared = {name for one in inside if isinstance(one, ast.Global) for name in one.names}
    return frozenset(given).union(*map(_binds, _parts(node)[1])) - shared


def _uses(
    node: ast.AST, imported: dict[str, str], hidden: frozenset[str] = frozenset()
) -> Iterator[str]:
    """Yield the names that a tree reads, those of labcore as dotted as they stand there.

    hidden: names that a function around the tree has for itself.
    """
    parts: list[str] = []
    root = node
    while isinstance(root, ast.Attribute):
        parts.append(root.attr)
        root = root.value
    if isinstance(root, ast.Name):
        if root.id not in hidden:
            yield ".".join([imported.get(root.id, root.id), *reversed(parts)])
        return
    outside, inside = _parts(node)
    for child in outside:
        yield from _uses(child, imported, hidden)
    for child in inside:
        yield from _uses(child, imported, hidden | _own(node))


def statements(code: str, is_module: Callable[[str], bool]) -> tuple[Statement, ...]:
    """Return the statements at the top of a file.

    is_module: returns whether a dotted name is a labcore module. Raises SyntaxError for bad code.
    """
    tree = ast.parse(code)
    imported, found = _bound(tree), []
    imports = ast.Import | ast.ImportFrom
    own = frozenset[str]().union(
        *(_binds(node) for node in tree.body if not isinstance(node, imports))
    )
    for node in tree.body:
        if isinstance(node, imports):
            targets = _bound(node)
            found += [Statement("", frozenset({n}), frozenset({targets[n]})) for n in targets]
            continue
        roots = {name: name.split(".")[0] for name in _uses(node, imported)}
        uses = {name for name, root in roots.items() if root == "labcore"}
        uses |= own.intersection(roots.values())
        binds = _binds(node)
        bare = _Bare(imported, is_module).visit(node)
        line = "" if bare is None or _is_face(node) else _text(bare)
        found.append(Statement(line, binds, frozenset(uses)))
    return tuple(found)
