"""What hosted machines ship must satisfy labcore, or its first cell exchanges what runs there."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
IMAGES = sorted((ROOT / "tests" / "images").glob("*.txt"))
# Small, of Python alone, and loaded by no kernel: the first cell may add these.
ADDED = {"webdataset"}


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def shipped(image: Path) -> dict[str, Version]:
    """A list's packages and their versions, Python's own among them."""
    lines = [line for line in image.read_text("utf-8").splitlines() if not line.startswith("#")]
    return {canonicalize_name(n): Version(v) for n, v in (line.split("==") for line in lines)}


def wanted(told: dict[str, Any], python: Version) -> list[Requirement]:
    """What the first cell asks for on Linux: labcore's core and its extra `labs`."""
    lines = [*told["dependencies"], *told["optional-dependencies"]["labs"]]
    place = {"sys_platform": "linux", "python_version": f"{python.major}.{python.minor}"}
    asked = map(Requirement, lines)
    return [one for one in asked if one.marker is None or one.marker.evaluate(place)]


def problems(told: dict[str, Any], image: dict[str, Version]) -> list[str]:
    """Where the image falls outside what labcore accepts."""
    python = image["python"]
    range_ = told["requires-python"]
    found = [] if python in SpecifierSet(range_) else [f"python {python} is outside {range_}"]
    for one in wanted(told, python):
        version = image.get(canonicalize_name(one.name))
        if version is None and one.name not in ADDED:
            found.append(f"{one.name} is not there")
        if version is not None and version not in one.specifier:
            found.append(f"{one.name} {version} is outside {one.specifier}")
    return found


@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.stem)
def test_a_hosted_machine_ships_what_labcore_accepts(image: Path) -> None:
    assert problems(project(), shipped(image)) == []


def test_a_bound_above_or_below_the_image_is_seen() -> None:
    (image,) = [shipped(path) for path in IMAGES if path.stem == "colab"]
    told = project()
    asked = [one for one in wanted(told, image["python"]) if one.name not in ADDED]
    assert {"torch", "triton", "numpy", "plotly", "ipywidgets"} <= {one.name for one in asked}
    for one in asked:
        version = image[canonicalize_name(one.name)]
        for planted in (f"{one.name}>{version.public}", f"{one.name}<{version.public}"):
            changed = told | {"dependencies": [planted], "optional-dependencies": {"labs": []}}
            assert len(problems(changed, image)) == 1, planted
    assert problems(told | {"requires-python": "<3.13"}, image)
    assert problems(told, {"python": image["python"]})
