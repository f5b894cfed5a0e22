"""Real data that every machine has: handwritten digits, and Python's standard library.

Nothing is downloaded. The digits ship with scikit-learn. Text and source code come from the
standard library of the running Python, and from a few installed packages, so results on them state
the versions; or from a folder of one's own.
"""

from labcore.checks import one_of
from labcore.data.files import hold_out, read_files
from labcore.data.handwritten import Digits, digits
from labcore.data.installed import InstalledSource, installed_prompts, installed_sources
from labcore.data.python import Text, python_sources, python_text

__all__ = [
    "Digits",
    "InstalledSource",
    "Text",
    "digits",
    "hold_out",
    "installed_prompts",
    "installed_sources",
    "load",
    "python_sources",
    "python_text",
    "read_files",
]

_BY_NAME = {"digits": digits, "python_sources": python_sources, "python_text": python_text}


def load(name: str, **options: object) -> Digits | Text:
    """Load a data set by name: "digits", "python_sources" or "python_text".

    options: passed to the data set's function. For another name, raises ValueError with the names.
    """
    return _BY_NAME[one_of("data set", name, _BY_NAME)](**options)  # type: ignore[operator]
