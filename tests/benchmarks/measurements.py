"""What the tests of every slug's benchmarks ask of their measurements."""

from __future__ import annotations

import json

from benchmarks.runner import Measurement
from labcore import claims


def by_quantity(found: list[Measurement]) -> dict[str, Measurement]:
    json.dumps([(x.details, x.samples, x.peers) for x in found], allow_nan=False, default=dict)
    names = [item.quantity for item in found]
    assert len(set(names)) == len(names)
    return {item.quantity: item for item in found}


def asked(slug: str, case: str) -> set[str]:
    """The quantities of one case that the claims ask for."""
    every = [claim for claim in claims.load().values() if claim.slug == slug]
    return {item.quantity for claim in every for item in claim.parts if item.case == case}
