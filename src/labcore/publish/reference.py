"""The directive `labcore-api`: each public name of the named modules, from its docstring."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

__all__ = ["ApiReference", "modules", "own_names"]


def modules(name: str) -> list[ModuleType]:
    """labcore.<name> and the modules below it that state their public names."""
    top = importlib.import_module(f"labcore.{name}")
    below = pkgutil.walk_packages(getattr(top, "__path__", []), f"{top.__name__}.")
    found = [top, *(_import(item.name) for item in below)]
    return [module for module in found if module and getattr(module, "__all__", None)]


def _import(name: str) -> ModuleType | None:
    """The module; None where it needs Triton and this machine has none."""
    package, _, last = name.rpartition(".")
    face = importlib.import_module(package)
    function = vars(face).get(last)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "triton":
            return None
        raise
    finally:
        if callable(function):  # a command's module would take the place of its package's function
            setattr(face, last, function)


def own_names(module: ModuleType) -> list[str]:
    """The module's public names, without those that a package above it shows as its own."""
    faces, name = [], module.__name__.rpartition(".")[0]
    while name and name != "labcore":
        faces.append(importlib.import_module(name))
        name = name.rpartition(".")[0]
    return [
        name
        for name in module.__all__
        if not any(
            name in getattr(face, "__all__", ()) and vars(face)[name] is vars(module)[name]
            for face in faces
        )
    ]


def _is_code(thing: object) -> bool:
    return callable(thing) and hasattr(thing, "__qualname__")


class ApiReference(SphinxDirective):
    """```{labcore-api} checks memory -memory.part``` makes one section a module.

    A package comes with all modules below it but those behind a minus, which have another page,
    they and what is below them.
    """

    required_arguments = 1
    optional_arguments = 20

    def run(self) -> list[nodes.Node]:
        """The sections, in the order of the arguments."""
        left = tuple(f"labcore.{name[1:]}." for name in self.arguments if name.startswith("-"))
        wanted = [name for name in self.arguments if not name.startswith("-")]
        found = [
            m for name in wanted for m in modules(name) if not f"{m.__name__}.".startswith(left)
        ]
        return [self._section(module, names) for module in found if (names := own_names(module))]

    def _section(self, module: ModuleType, names: list[str]) -> nodes.section:
        title = nodes.title("", "", nodes.literal(text=module.__name__))
        section = nodes.section("", title, ids=[nodes.make_id(module.__name__)])
        code = [name for name in names if _is_code(vars(module)[name])]
        lines = ["```{eval-rst}", f".. automodule:: {module.__name__}"]
        lines += [f"   :members: {', '.join(code)}"] if code else []
        lines += ["```"]
        if others := [f"`{name}`" for name in names if name not in code]:
            lines += ["", f"Constants and types: {', '.join(others)}."]
        self.state.nested_parse(StringList(lines, source=module.__name__), 0, section)
        return section
