"""What holds for the benchmarks of every chapter: each case that is asked for exists."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.runner import cases_of, slugs
from labcore import claims

ROOT = Path(__file__).resolve().parents[2]
LOOK_UP = re.compile(r'(?:records\.find,?|recorded)\(?\s*"(\w+)",\s*"([^"]+)"')


@pytest.mark.parametrize("slug", slugs())
def test_every_claim_and_chapter_lookup_names_a_case(slug: str) -> None:
    names = {case.name for case in cases_of(slug)}
    of_slug = [claim for claim in claims.load().values() if claim.slug == slug]
    of_claims = {item.case for claim in of_slug for item in claim.parts if item.case}
    cells = json.loads((ROOT / f"book/{slug}.ipynb").read_text("utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    of_chapter = {case for of, case in LOOK_UP.findall(code) if of == slug}
    assert of_claims and of_claims | of_chapter <= names
