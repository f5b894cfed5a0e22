"""Helpers for proposers with state, which must follow the rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence

from labcore.decoding.contract import SamplingConfig

__all__ = ["check_rows", "common_prefix"]


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two rows (both lists or both tuples) share from the start."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    # Slices are compared in C; the rows differ before `high` and agree before `low`.
    while high - low > 1:
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low


def check_rows(
    contexts: Sequence[Sequence[int]],
    samplings: Sequence[SamplingConfig],
    max_tokens: Sequence[int],
    generators: Sequence[object],
) -> None:
    """Raise ValueError unless each row has a context, a sampling, a limit and a generator.

    A limit is at least 0, and a row with a limit above 0 has a token in its context.
    """
    counts = [len(contexts), len(samplings), len(max_tokens), len(generators)]
    if len(set(counts)) > 1:
        raise ValueError(
            "contexts, samplings, max_tokens and generators must have one entry per row, got "
            f"{', '.join(str(count) for count in counts)}"
        )
    for row, (context, most) in enumerate(zip(contexts, max_tokens, strict=True)):
        if most < 0:
            raise ValueError(f"max_tokens must be at least 0, got {most} for row {row}")
        if most and not len(context):
            raise ValueError(f"a context must hold a token, got none for row {row}; add a BOS")
