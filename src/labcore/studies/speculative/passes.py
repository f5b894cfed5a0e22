"""What the time of a forward over one token is made of, on the CPU that runs this."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from labcore.checks import positive_int
from labcore.decoding.decoders import as_decoder
from labcore.models import Llama

__all__ = ["PassTimes", "forward_costs", "pass_times"]

_BEFORE = 64  # tokens in the cache
_EVICTING = 1 << 28  # bytes written between passes, several times a large cache


@dataclass(frozen=True, kw_only=True, slots=True)
class PassTimes:
    """Seconds, the fastest of all rounds, because other programs can only make a round slower.

    warm: a forward over one token after another. evicted: the same after other data has filled the
    caches. reading: reading as many bytes as the weights have, once, from memory. hollow: a forward
    of a model with the same layers and operators and hardly any weights. weight_bytes: of the
    weights as they are read.
    """

    warm: float
    evicted: float
    reading: float
    hollow: float
    weight_bytes: int


def pass_times(model: Llama, *, bytes_per_weight: int = 2, rounds: int = 15) -> PassTimes:
    """Measure a Llama's forward over one token after 64, and what might explain its time.

    The four kinds take turns, so that a change of the machine's speed meets all of them.
    bytes_per_weight: as the fast form stores them.
    """
    positive_int("rounds", rounds)
    size = bytes_per_weight * sum(weight.numel() for weight in model.parameters())
    whole, hollow = _forward(model), _forward(_hollow(model))
    weights, other = torch.zeros(size // 4), torch.zeros(_EVICTING // 4)
    found: dict[str, list[float]] = {name: [] for name in ("warm", "evicted", "reading", "hollow")}
    for _ in range(rounds):
        whole()
        found["warm"].append(_timed(whole))
        other.add_(1)
        found["evicted"].append(_timed(whole))
        other.add_(1)
        found["reading"].append(_timed(weights.sum))
        hollow()
        found["hollow"].append(_timed(hollow))
    return PassTimes(weight_bytes=size, **{name: min(times) for name, times in found.items()})


def forward_costs(
    model: Any, sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64), *, rounds: int = 15
) -> dict[int, float]:
    """Return the time of one forward over so many tokens, in forwards over one token.

    The sizes take turns, and the fastest round of each counts. No size is cheaper than a smaller
    one: what noise is left gets flattened.
    """
    positive_int("rounds", rounds)
    runs = {size: _forward(model, size) for size in sizes}
    found: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(rounds):
        for size, run in runs.items():
            run()
            found[size].append(_timed(run))
    costs, least = {}, 1.0
    for size in sizes:
        least = max(least, min(found[size]) / min(found[sizes[0]]))
        costs[size] = least
    return costs


def _hollow(model: Llama) -> Llama:
    """Return a Llama with the same layers and heads, two numbers wide per head."""
    config = model.config
    heads = config.num_attention_heads
    return Llama(
        dataclasses.replace(
            config, hidden_size=2 * heads, head_dim=2, intermediate_size=8, vocab_size=8
        )
    ).eval()


def _forward(model: Any, tokens: int = 1) -> Callable[[], None]:
    """Return a call of one forward over `tokens` tokens after the same 64."""
    decoder = as_decoder(model)
    cache = decoder.new_cache(1, _BEFORE + tokens)
    before = torch.zeros(1, _BEFORE, dtype=torch.int64)
    counts = torch.tensor([tokens], dtype=torch.int32)
    lengths = torch.tensor([_BEFORE], dtype=torch.int32)
    given = torch.zeros(1, tokens, dtype=torch.int64)
    with torch.inference_mode():
        decoder(before, counts=lengths, cache=cache)

    @torch.inference_mode()
    def run() -> None:
        cache.truncate(lengths)
        decoder(given, counts=counts, cache=cache)

    return run


def _timed(call: Callable[[], Any]) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start
