"""What holds for the benchmarks of every chapter: each case that is asked for exists."""

import importlib
import inspect
import json
import re
from pathlib import Path

import pytest

from benchmarks.runner import cases_of, slugs
from labcore import claims

ROOT = Path(__file__).resolve().parents[2]
LOOK_UP = re.compile(r'(?:records\.find,?|recorded)\(?\s*"(\w+)",\s*"([^"]+)"')


CHAPTERS = sorted({claim.slug for claim in claims.load().values()})


@pytest.mark.parametrize("slug", CHAPTERS)
def test_every_claim_and_chapter_lookup_names_a_case(slug: str) -> None:
    of_slug = [claim for claim in claims.load().values() if claim.slug == slug]
    asked = {(slug, item.case) for claim in of_slug for item in claim.parts if item.case}
    assert asked
    cells = json.loads((ROOT / f"book/{slug}.ipynb").read_text("utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    asked |= set(LOOK_UP.findall(code))
    assert asked <= {(of, case.name) for of in {of for of, _ in asked} for case in cases_of(of)}


def test_three_benchmarks_are_of_no_single_article() -> None:
    assert set(slugs()) - set(CHAPTERS) == {"capstone", "course", "language"}


@pytest.mark.parametrize("slug", slugs())
def test_cases_with_sizes_have_small_ones_to_be_confirmed_at(slug: str) -> None:
    kinds = {
        type(sizes.default)
        for case in cases_of(slug)
        if (sizes := inspect.signature(case.function).parameters.get("sizes"))
    }
    small = getattr(importlib.import_module(f"benchmarks.{slug}"), "SMALL", None)
    assert kinds <= {type(small)}
