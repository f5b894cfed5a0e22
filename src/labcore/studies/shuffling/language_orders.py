"""The language model with its windows in other orders.

Each run reads the same windows of text as the random run of its seed that `benchmarks/language.py`
records, so the order is the only difference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch
from torch import Tensor

from labcore.checks import one_of, positive_int
from labcore.models.training import Batches, windows
from labcore.shuffling.orders import BufferShuffle
from labcore.studies.language import bench
from labcore.studies.language.bench import LENGTH, ROWS, LanguageRun
from labcore.studies.language.tuning import Setting

__all__ = ["BATCH", "BUFFER", "ORDERS", "WINDOW", "cut", "heights", "places", "train_ordered"]

BATCH = 8_192  # tokens per step
BUFFER = 2_048  # a third of the windows of bench.TOKENS
WINDOW = 16  # steps of the trailing median


def places(length: int, count: int, seed: int) -> Tensor:
    """Return where the windows of a random run start, in the run's order: int64 [count].

    length: of the text, in tokens. count: a multiple of ROWS.
    """
    take = windows(torch.arange(length), batch=ROWS, length=LENGTH, seed=seed)
    return torch.cat([take(n)[0][:, 0] for n in range(count // ROWS)])


def _stored(starts: Tensor, text: Tensor, seed: int) -> Tensor:
    del text, seed
    return starts.sort().values


def _buffered(starts: Tensor, text: Tensor, seed: int) -> Tensor:
    del text
    stored = starts.sort().values
    order = BufferShuffle(len(stored), buffer_size=min(BUFFER, len(stored)), seed=seed)
    return stored[list(order)]


def _sorted(starts: Tensor, text: Tensor, seed: int) -> Tensor:
    """Sort by the number of distinct tokens, from the most repetitive window on."""
    del seed
    ordered = text[starts[:, None] + torch.arange(LENGTH + 1)].sort(1).values
    return starts[ordered.diff(dim=1).ne(0).sum(1).argsort(stable=True)]


ORDERS: Mapping[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "file order": _stored,
    f"buffer {BUFFER}": _buffered,
    "sorted": _sorted,
}
"""From a run's window starts, the text and the seed to the starts in another order."""


def cut(text: Tensor, starts: Tensor) -> Batches:
    """Return batches of ROWS windows of `text`, int64 [ROWS, LENGTH + 1], in the order of starts.

    There are as many whole batches as the starts give.
    """

    def batch_number(n: int) -> tuple[Tensor, None]:
        chosen = starts[n * ROWS : (n + 1) * ROWS]
        return text[chosen[:, None] + torch.arange(LENGTH + 1)], None

    return batch_number


def train_ordered(
    order: str,
    setting: Setting,
    *,
    seed: int,
    tokens: int = bench.TOKENS,
    batch: int = BATCH,
    max_files: int | None = None,
) -> LanguageRun:
    """Train with AdamW on the windows of a random run, in one of ORDERS."""
    arrange = ORDERS[one_of("order", order, ORDERS)]
    text = bench.text("report", max_files=max_files)
    count = positive_int("tokens", tokens) // batch * batch // LENGTH
    starts = arrange(places(len(text), count, seed), text, seed)
    return bench.train_language(
        functools.partial(bench.OPTIMIZERS["AdamW"], lr=setting.lr, decay=setting.decay),
        batch=batch,
        seed=seed,
        tokens=tokens,
        batches=cut(text, starts),
        max_files=max_files,
    )


def heights(losses: Sequence[float], window: int = WINDOW) -> list[float]:
    """Return how far each loss lies above the median of the `window` losses before it, in nats.

    There are as many as losses after the first window.
    """
    positive_int("window", window)
    return [
        losses[step] - median(losses[step - window : step]) for step in range(window, len(losses))
    ]
