"""The language model with its windows in other orders.

Each run reads the same windows of text as the random run of its seed that `benchmarks/language.py`
records, so the order is the only difference. `SHORTER` is a yardstick for the harm.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from statistics import fmean

import torch
from torch import Tensor

from labcore.checks import one_of, positive_int
from labcore.models.training import Batches, windows
from labcore.shuffling.orders import BufferShuffle, FullShuffle
from labcore.studies.language import bench
from labcore.studies.language.bench import LENGTH, ROWS, LanguageRun
from labcore.studies.language.tuning import Setting
from labcore.studies.shuffling.tracing import batch_distances

__all__ = [
    "BATCH",
    "BUFFER",
    "ORDERS",
    "SHORTER",
    "arranged",
    "cut",
    "design_effect",
    "places",
    "train_ordered",
]

BATCH = ROWS * LENGTH  # tokens per step: 16 windows, the smallest batch of the recorded runs
BUFFER = 1_024  # a sixth of the windows of bench.TOKENS
SHORTER = "a tenth fewer steps"  # random windows, nine tenths of the tokens, its own schedule


def places(length: int, count: int, seed: int) -> Tensor:
    """Return where the windows of a random run start, in the run's order: int64 [count].

    length: of the text, in tokens. count: a multiple of ROWS.
    """
    take = windows(torch.arange(length), batch=ROWS, length=LENGTH, seed=seed)
    return torch.cat([take(n)[0][:, 0] for n in range(count // ROWS)])


def _rows_at(text: Tensor, starts: Tensor) -> Tensor:
    return text[starts[:, None] + torch.arange(LENGTH + 1)]


def _stored(starts: Tensor, text: Tensor, seed: int) -> Tensor:
    del text, seed
    return starts.sort().values


def _batches_shuffled(starts: Tensor, text: Tensor, seed: int) -> Tensor:
    """Keep the batches of the file order, and draw their order."""
    del text
    batches = starts.sort().values.unflatten(0, (-1, ROWS))
    return batches[list(FullShuffle(len(batches), seed=seed))].flatten()


def _buffered(starts: Tensor, text: Tensor, seed: int) -> Tensor:
    del text
    stored = starts.sort().values
    order = BufferShuffle(len(stored), buffer_size=min(BUFFER, len(stored)), seed=seed)
    return stored[list(order)]


def _sorted(starts: Tensor, text: Tensor, seed: int) -> Tensor:
    """Sort by the number of distinct tokens, from the most repetitive window on."""
    del seed
    ordered = _rows_at(text, starts).sort(1).values
    return starts[ordered.diff(dim=1).ne(0).sum(1).argsort(stable=True)]


ORDERS: Mapping[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "file order": _stored,
    "batches shuffled": _batches_shuffled,
    f"buffer {BUFFER}": _buffered,
    "sorted": _sorted,
}
"""From a run's window starts, the text and the seed to the starts in another order."""


def arranged(
    order: str, *, seed: int, tokens: int = bench.TOKENS, max_files: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the text, and the starts of a random run's windows in one of ORDERS."""
    arrange = ORDERS[one_of("order", order, ORDERS)]
    text = bench.text("report", max_files=max_files)
    count = positive_int("tokens", tokens) // BATCH * ROWS
    return text, arrange(places(len(text), count, seed), text, seed)


def cut(text: Tensor, starts: Tensor) -> Batches:
    """Return batches of ROWS windows of `text`, int64 [ROWS, LENGTH + 1], in the order of starts.

    There are as many whole batches as the starts give.
    """
    return lambda n: (_rows_at(text, starts[n * ROWS : (n + 1) * ROWS]), None)


def design_effect(text: Tensor, starts: Tensor, *, pooled: int = 1) -> float:
    """Return the design effect of the windows' token shares.

    pooled: consecutive batches that count as one, at most as many as there are.
    """
    rows = _rows_at(text, starts)
    shares = torch.zeros(len(rows), int(rows.max()) + 1)
    shares.scatter_add_(1, rows, torch.full(rows.shape, 1 / rows.shape[1]))
    size = min(pooled * ROWS, len(rows))
    whole = shares[: len(rows) // size * size]
    return fmean(batch_distances(whole.split(size), shares))


def train_ordered(
    order: str,
    setting: Setting,
    *,
    seed: int,
    tokens: int = bench.TOKENS,
    max_files: int | None = None,
) -> LanguageRun:
    """Train with AdamW on the windows of a random run, in one of ORDERS, or on SHORTER's."""
    batches = None
    if order == SHORTER:
        tokens = int(0.9 * tokens)
    else:
        batches = cut(*arranged(order, seed=seed, tokens=tokens, max_files=max_files))
    return bench.train_language(
        functools.partial(bench.OPTIMIZERS["AdamW"], lr=setting.lr, decay=setting.decay),
        batch=BATCH,
        seed=seed,
        tokens=tokens,
        batches=batches,
        max_files=max_files,
    )
