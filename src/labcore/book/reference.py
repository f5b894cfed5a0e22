"""The directive `labcore-api`: documents each public name of the given modules."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from types import ModuleType

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

__all__ = ["ApiReference", "listed", "modules", "own_names"]


def modules(name: str) -> list[ModuleType]:
    """labcore.<name> and the modules below it that define `__all__`."""
    top = importlib.import_module(f"labcore.{name}")
    below = pkgutil.walk_packages(getattr(top, "__path__", []), f"{top.__name__}.")
    found = [top, *(_import(item.name) for item in below)]
    return [module for module in found if module and getattr(module, "__all__", None)]


def _import(name: str) -> ModuleType | None:
    """The module; None if it needs Triton and this machine has none."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "triton":
            return None
        raise


def own_names(
    module: ModuleType, *, page: str = "", elsewhere: Sequence[tuple[str, object]] = ()
) -> list[str]:
    """The module's public names that its own section documents.

    A name that a package above re-exports is documented there instead. page: the directive's
    argument that includes the module, without "labcore."; packages above it do not count, because
    they are on another page. elsewhere: names documented by modules with a minus, with their
    objects; they are left out.
    """
    faces, name = [], module.__name__.rpartition(".")[0]
    while name and name != "labcore" and name.startswith(f"labcore.{page}"):
        faces.append(importlib.import_module(name))
        name = name.rpartition(".")[0]
    lent = "." in page and not hasattr(module, "__path__")
    return [
        name
        for name in module.__all__
        if not any(
            name in getattr(face, "__all__", ()) and vars(face)[name] is vars(module)[name]
            for face in faces
        )
        and not any(name == one and vars(module)[name] is thing for one, thing in elsewhere)
        and not (lent and _home(vars(module)[name], module) != module.__name__)
    ]


def _home(thing: object, module: ModuleType) -> str:
    """The labcore module that defines a class or function; for a constant, this module."""
    home = str(thing.__module__) if _is_code(thing) else ""
    return home if home.startswith("labcore.") else module.__name__


def _is_code(thing: object) -> bool:
    return callable(thing) and hasattr(thing, "__qualname__")


def listed(arguments: Sequence[str]) -> list[tuple[ModuleType, list[str]]]:
    """The sections of a page for the directive's arguments: modules, and the names in each."""
    behind = [(name[1:], m) for name in arguments if name[0] == "-" for m in modules(name[1:])]
    elsewhere = [
        (name, vars(module)[name])
        for page, module in behind
        for name in own_names(module, page=page)
    ]
    hidden = {module.__name__ for _, module in behind}
    found = [(page, m) for page in arguments if page[0] != "-" for m in modules(page)]
    sections = [
        (module, own_names(module, page=page, elsewhere=elsewhere))
        for page, module in found
        if module.__name__ not in hidden
    ]
    return [(module, names) for module, names in sections if names]


class ApiReference(SphinxDirective):
    """```{labcore-api} checks memory -memory.accounting``` makes one section per module.

    A package includes all modules below it. A minus excludes a module, with everything below it,
    because it has another page. That page documents everything the module defines, including what
    its package exports.
    """

    required_arguments = 1
    optional_arguments = 60

    def run(self) -> list[nodes.Node]:
        """The sections, in the order of the arguments."""
        return [self._section(module, names) for module, names in listed(self.arguments)]

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
