"""Code of other people's packages, read from the installation: text that no shipped model has seen.

The shipped models were trained on the standard library alone. Nothing of these files is stored
here, so another version of a package gives other text, and a measurement states version and hash.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from labcore.checks import positive_int

__all__ = ["InstalledSource", "installed_prompts", "installed_sources"]

# torch brings jinja2 and networkx, labcore brings tqdm, and Jupyter Book brings click.
FILES = {
    "click": "click/core.py",
    "jinja2": "jinja2/environment.py",
    "networkx": "networkx/classes/graph.py",
    "tqdm": "tqdm/std.py",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class InstalledSource:
    """One file of an installed package. sha256: of its bytes, in hexadecimal."""

    package: str
    version: str
    file: str
    text: str
    sha256: str


def installed_sources() -> tuple[InstalledSource, ...]:
    """Return one file each of click, Jinja2, NetworkX and tqdm, as this environment has them.

    Raises ModuleNotFoundError for a package that isn't installed, and FileNotFoundError if its
    installation lacks the file.
    """
    return tuple(_read(package, file) for package, file in FILES.items())


def _read(package: str, file: str) -> InstalledSource:
    try:
        found = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        raise ModuleNotFoundError(
            f"{package} must be installed to read its {file}, got no such package; "
            f"`pip install {package}` adds it"
        ) from None
    path = Path(str(found.locate_file(file)))
    if not path.is_file():
        raise FileNotFoundError(
            f"{package} {found.version} must have its source at {file}, got no such file; install "
            "it from a wheel"
        )
    raw = path.read_bytes()
    return InstalledSource(
        package=package,
        version=found.version,
        file=file,
        text=raw.decode("utf-8"),
        sha256=hashlib.sha256(raw).hexdigest(),
    )


def installed_prompts(count: int = 12, *, characters: int = 4096, seed: int = 0) -> list[str]:
    """Return `count` prompts to continue, cut from `installed_sources` by a rule without choices.

    The files take turns. In each, the seed draws different lines among those that aren't blank and
    have `characters` characters before them; a prompt is these characters, up to the line.
    Errors as in `installed_sources`, and ValueError if a file has too few such lines.
    """
    positive_int("count", count)
    positive_int("characters", characters)
    sources = installed_sources()
    every = [_cut(one, -(-count // len(sources)), characters, seed) for one in sources]
    return [prompt for turn in zip(*every, strict=True) for prompt in turn][:count]


def _cut(source: InstalledSource, count: int, characters: int, seed: int) -> list[str]:
    starts, place = [], 0
    for line in source.text.splitlines(keepends=True):
        if place >= characters and line.strip():
            starts.append(place)
        place += len(line)
    if len(starts) < count:
        raise ValueError(
            f"{source.file} must have {count} lines after {characters} characters, got "
            f"{len(starts)}; ask for fewer prompts or shorter ones"
        )
    chosen = random.Random(f"{seed} {source.file}").sample(starts, count)
    return [source.text[start - characters : start] for start in chosen]
