"""What a program does, as text that stays when only its wording or its place changes.

Each statement of a file becomes a line made from its syntax tree. Comments, docstrings, imports,
`__all__`, the names of labcore's modules and the messages of raised errors are left out, so moving
a definition or wording it better changes no line. The lines are the same on every Python that the
project runs on.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

__all__ = ["statements"]

# Left out: what only some versions of Python give, and what follows from the rest of the tree.
SKIPPED = {"ctx", "kind", "type_comment", "type_ignores", "type_params"}


def _bound(tree: ast.Module) -> dict[str, str]:
    """The names that a file's imports of labcore bind, each with the dotted name it stands for."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            # Without an alias, `import a.b` binds a alone.
            roots = [a.asname or a.name.split(".")[0] for a in node.names]
            names |= {r: a.name if a.asname else r for r, a in zip(roots, node.names, strict=True)}
    return {name: dotted for name, dotted in names.items() if dotted.split(".")[0] == "labcore"}


class _Bare(ast.NodeTransformer):
    """Takes out what the code does not depend on, and the modules before the names they define."""

    def __init__(self, names: dict[str, str], is_module: Callable[[str], bool]) -> None:
        self._names, self._is_module = names, is_module

    def _defined(self, dotted: list[str]) -> ast.expr:
        """The name without the module, or a module's own last name where it stands alone."""
        last = len(dotted) - 1
        parents = (k for k in range(last, 0, -1) if self._is_module(".".join(dotted[:k])))
        name, *attributes = dotted[next(parents, 0) :]
        found: ast.expr = ast.Name(name)
        for attribute in attributes:
            found = ast.Attribute(found, attribute)
        return found

    def visit_Import(self, node: ast.Import) -> None:
        """Nothing stays: a definition counts where it stands."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Nothing stays: a definition counts where it stands."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        """A docstring does nothing."""
        text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if text else self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        """Which error is raised, without its message: a run that ends in one records nothing."""
        exc = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        return self.generic_visit(ast.Raise(exc, node.cause))

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """An imported name as it is called where it is defined."""
        return self._defined(self._names[node.id].split(".")) if node.id in self._names else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """`module.name` as `name`."""
        attributes, root = [], node
        while isinstance(root, ast.Attribute):
            attributes.append(root.attr)
            root = root.value  # type: ignore[assignment]
        if isinstance(root, ast.Name) and root.id in self._names:
            return self._defined([*self._names[root.id].split("."), *reversed(attributes)])
        return self.generic_visit(node)


def _text(part: Any) -> str:
    """A tree as text. `ast.dump` and `ast.unparse` differ from one Python to the next."""
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
    """The parts of an f-string with neighboring texts as one, as only some Pythons have them."""
    parts: list[ast.expr] = []
    for value in values:
        if isinstance(value, ast.Constant) and parts and isinstance(parts[-1], ast.Constant):
            parts[-1] = ast.Constant(str(parts[-1].value) + str(value.value))
        elif not (isinstance(value, ast.Constant) and value.value == ""):
            parts.append(value)
    return parts


def _is_face(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"


def statements(code: str, is_module: Callable[[str], bool]) -> tuple[str, ...]:
    """A line for each statement of a file.

    is_module: whether a dotted name is that of a module of labcore. SyntaxError for bad code.
    """
    tree = ast.parse(code)
    bare = _Bare(_bound(tree), is_module).visit(tree)
    return tuple(_text(node) for node in bare.body if not _is_face(node))
