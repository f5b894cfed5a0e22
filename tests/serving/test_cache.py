"""A paged cache in decode graphs: steps are those of the model, and ask the device nothing."""

from __future__ import annotations

import pytest
import torch

from labcore.parallel import GraphedDecoder
from labcore.parallel.recording import launch_sequence
from labcore.serving.engine import cache as module
from labcore.serving.engine.cache import PagedCache, Segment
from tests.models.shapes import CONFIGS, model_of, tokens_of
from tests.parallel.small import made
from tests.serving.pool import CLOSE, SIZES, alone, forward, poisoned, scattered


def test_sizes_below_one_are_refused() -> None:
    fitting = {"num_blocks": 6, "block_size": 4, "rows": 3, "max_blocks": 2}
    for name in fitting:
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            PagedCache(CONFIGS["plain"], **{**fitting, name: 0})


@pytest.mark.parametrize("block_size", SIZES)
def test_graphed_steps_are_those_of_the_model(
    block_size: int, seed: int, generator: torch.Generator
) -> None:
    """Rows are bound anew before each step, and some of five rest."""
    model = made(seed).double()
    cache = poisoned(model, block_size, rows=5)
    blocks = scattered(cache, 5, generator)
    rows = [tokens_of(model.config, (1, n), generator)[0].tolist() for n in (3, 9, 1, 14, 6)]
    forward(
        model,
        cache,
        [Segment(blocks=b, start=0, tokens=r) for b, r in zip(blocks, rows, strict=True)],
    )
    with GraphedDecoder(model, cache, batches=(1, 2, 4, 8)) as decoder, torch.inference_mode():
        assert decoder.batches == (1, 2, 4, 5)
        for count in (5, 3, 1, 4, 2, 5):
            order = torch.randperm(5, generator=generator).tolist()[:count]
            new = tokens_of(model.config, (1, count), generator)[0]
            cache.bind(
                [Segment(blocks=blocks[row], start=len(rows[row]), tokens=()) for row in order]
            )
            logits = decoder(new)
            for place, row in enumerate(order):
                rows[row].append(int(new[place]))
                torch.testing.assert_close(logits[place], alone(model, rows[row])[-1], **CLOSE)


@torch.inference_mode()
def test_a_graphed_step_asks_the_device_nothing(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    grouped = model_of(CONFIGS["grouped"], generator).double()
    # On a GPU paged_attention asks nothing; its torch form, which runs here, does.
    monkeypatch.setattr(module, "paged_attention", lambda q, *_, **__: torch.zeros_like(q))
    cache = poisoned(grouped, 4)
    segments = [Segment(blocks=b, start=3, tokens=()) for b in scattered(cache, 4, generator)]
    tokens = tokens_of(grouped.config, (4, 1), generator)
    cache.bind(segments)
    launch_sequence(lambda: grouped(tokens, cache=cache))  # raises where something waits
    assert cache.lengths.tolist() == [4, 4, 4, 4]
    with pytest.raises(RuntimeError, match="must not wait"):
        launch_sequence(cache.lengths.tolist)
