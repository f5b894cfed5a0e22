"""The three forwards are timed on the rows that they name."""

from __future__ import annotations

import pytest
import torch

from labcore.serving.engine.runner import Runner
from labcore.studies.inflight.ride import ride
from tests.serving.tiny import tiny


def test_each_forward_has_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    run = Runner.run

    def spied(self: Runner, segments, wanted):
        seen.append(tuple(len(one.tokens) for one in segments))
        assert all(one.start == (9 if len(one.tokens) == 1 else 4) for one in segments)
        return run(self, segments, wanted)

    monkeypatch.setattr(Runner, "run", spied)
    found = ride(tiny(1), decodes=3, chunk=5, held=4, context=9, rounds=2)
    assert seen == [(1, 1, 1), (5,), (1, 1, 1, 5)] * 4
    assert set(found) == {"decodes", "chunk", "together"} and min(found.values()) > 0
    assert torch.is_inference_mode_enabled() is False
    with pytest.raises(ValueError, match="chunk"):
        ride(tiny(1), decodes=3, chunk=0)
