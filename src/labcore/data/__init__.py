"""Real data that every machine has: handwritten digits, and the running Python's own library.

Nothing is downloaded. The digits ship with scikit-learn; text and sources are read from the
standard library of the Python that runs, so results on them state its version.
"""

from labcore.checks import one_of
from labcore.data.handwritten import Digits, digits
from labcore.data.python import Text, python_sources, python_text

__all__ = ["Digits", "Text", "digits", "load", "python_sources", "python_text"]

_BY_NAME = {"digits": digits, "python_sources": python_sources, "python_text": python_text}


def load(name: str, **options: object) -> Digits | Text:
    """The data set of this name: "digits", "python_sources" or "python_text", with its options.

    Raises ValueError that lists the names for any other.
    """
    return _BY_NAME[one_of("data set", name, _BY_NAME)](**options)  # type: ignore[operator]
