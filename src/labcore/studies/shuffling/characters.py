"""Loss spikes on Python's source files: a small next-character model with different row orders.

Rows have ROW letters and are cut from files, concatenated in the order of their names, as a folder
lists them. The learning rate falls linearly to zero over a run; "constant" is for comparison. Every
setting was chosen on TUNING_SEEDS, which aren't among the reported seeds. LEARNING_RATE suits the
file order best, so it compares a full shuffle to the file order on the file order's terms; BEST has
the best of RATES for each order.
"""

from __future__ import annotations

import ast
import functools
import itertools
import random
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from labcore.checks import one_of, positive, positive_int
from labcore.data import python_sources
from labcore.shuffling.files import FileRows
from labcore.shuffling.orders import (
    BlockShuffle,
    BufferShuffle,
    FullShuffle,
    Sequential,
    shards_of,
)
from labcore.studies import runs

__all__ = [
    "BATCH",
    "BEST",
    "BUFFERS",
    "CONTEXT",
    "DAMAGES",
    "LEARNING_RATE",
    "LETTERS",
    "OPTIMIZERS",
    "ORDERS",
    "RATES",
    "ROW",
    "SCHEDULES",
    "SEEDS",
    "SGD_RATE",
    "SLICES",
    "Corpus",
    "Damage",
    "EpochRun",
    "NextCharacter",
    "corpus",
    "letters_of",
    "row_losses",
    "run",
    "train",
]

CONTEXT, ROW, LETTERS = 8, 32, 128  # letters of context, letters to predict, distinct letters
BATCH, LEARNING_RATE = 32, 1e-2
SGD_RATE = 2.0  # of plain gradient descent
SCHEDULES = ("decay", "constant")
RATES = (3e-3, 1e-2, 3e-2)
SEEDS = (0, 1, 2, 3, 4)  # the tuning seeds are 10 and 11
BEST: Mapping[str, Mapping[str, float]] = {
    "decay": {"file order": 1e-2, "buffer 2048": 3e-2, "full": 3e-2},
    "constant": {"file order": 1e-2, "buffer 2048": 3e-3, "full": 1e-2},
}
# Each seed has different files: slice k of n is every n-th file of the library, from file k.
SLICES = {"sources": 12, "documentation": 5}
_LARGEST = 200_000  # letters; two files are larger, and one of them would be half of its slice
_HELD_OUT_ROWS = 500


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Corpus:
    """Rows of letters in the order of their files.

    rows: [N, CONTEXT + ROW] int64, each row's letters, 0..LETTERS - 1, preceded by CONTEXT letters.
    held_out: [M, CONTEXT + ROW], rows of other files. files: which file a row is from.
    """

    rows: Tensor
    held_out: Tensor
    files: FileRows

    @property
    def steps(self) -> int:
        """The number of whole batches in an epoch."""
        return len(self.rows) // BATCH

    @property
    def lengths(self) -> tuple[int, ...]:
        """The rows of each file; a row with the end of one file belongs to the next."""
        ends = (*self.files.first_rows[1:], len(self.rows))
        pairs = zip(self.files.first_rows, ends, strict=True)
        return tuple(end - first for first, end in pairs if end > first)


def letters_of(text: str) -> Tensor:
    """Return the text as int64 [len(text)]: ASCII codes, and LETTERS - 1 for anything else."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    return torch.from_numpy(points.astype(np.int64)).clamp(max=LETTERS - 1)


def _rows(text: str) -> Tensor:
    count = len(text) // ROW
    letters = letters_of("\n" * CONTEXT + text)[: CONTEXT + count * ROW]
    return letters.unfold(0, CONTEXT + ROW, ROW)


def _docstrings(source: str) -> str:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))
    return "\n\n".join(text for node in nodes if (text := ast.get_docstring(node)))


@functools.cache
def _names(part: str) -> tuple[str, ...]:
    return python_sources(part).files


def _texts(kind: str, names: Sequence[str]) -> dict[str, str]:
    """Return file name -> text, without empty or very large texts."""
    library, found = Path(sysconfig.get_paths()["stdlib"]), {}
    for name in names:
        source = (library / name).read_text(encoding="utf-8", errors="replace")
        text = source if kind == "sources" else _docstrings(source)
        if text.strip() and len(text) <= _LARGEST:
            found[name] = text
    return found


@functools.cache
def _held_out(kind: str) -> Tensor:
    rows = _rows("\n".join(_texts(kind, _names("held_out")).values()))
    return rows[torch.linspace(0, len(rows) - 1, _HELD_OUT_ROWS).long()].clone()


@functools.cache
def corpus(kind: str = "sources", seed: int = 0, *, rows: int | None = None) -> Corpus:
    """Return Python's "sources", or their docstrings ("documentation"), in file name order.

    seed: which slice of the library. A slice is every twelfth source file (some 50), or the
    docstrings of every fifth file (some 100), without the two or three texts of more than 200,000
    letters. Seeds 0 to 11 share no source file, and seeds 0 to 4 no docstring. held_out is the same
    for all: 500 rows, spread evenly over the files that labcore.data holds out.
    rows: read only so many of the first rows.
    """
    slices = SLICES[one_of("corpus", kind, SLICES)]
    texts = _texts(kind, _names("train")[seed % slices :: slices])
    whole = "\n".join(texts.values())[: None if rows is None else positive_int("rows", rows) * ROW]
    starts = [0, *itertools.accumulate(len(text) + 1 for text in texts.values())][:-1]
    starts = [start for start in starts if start < len(whole)]
    names = tuple(texts)[: len(starts)]
    files = FileRows(files=names, starts=tuple(starts), length=len(whole), row_length=ROW)
    return Corpus(rows=_rows(whole), held_out=_held_out(kind), files=files)


class NextCharacter(nn.Module):
    """A network with one hidden layer that sees CONTEXT letters and scores the next one.

    Maps rows [B, CONTEXT + ROW] to scores [B, ROW, LETTERS], fp32, with about 25 thousand weights.
    """

    def __init__(self, hidden: int = 64, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, width)
        self.hidden = nn.Linear(CONTEXT * width, positive_int("hidden", hidden))
        self.head = nn.Linear(hidden, LETTERS)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the scores for each row's letters."""
        seen = self.embedding(rows[:, :-1]).unfold(1, CONTEXT, 1)  # [B, ROW, width, CONTEXT]
        scores: Tensor = self.head(F.relu(self.hidden(seen.flatten(2))))
        return scores


def row_losses(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the mean cross-entropy of each row, in nats per letter: [B]."""
    scores = model(rows).transpose(1, 2)
    return F.cross_entropy(scores, rows[:, CONTEXT:], reduction="none").mean(1)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Tensor]
) -> Iterator[float]:
    """Run `runs.train` on the mean loss of each batch's letters, [B, CONTEXT + ROW]."""
    return runs.train(lambda batch: row_losses(model, batch).mean(), optimizer, batches)


# Orders ------------------------------------------------------------------------------------------
BUFFERS = (256, 2048, 8192)
_BLOCK, _BLOCKS = 64, 32  # rows per block, blocks; 2,048 rows in memory, like the second buffer

Order = Callable[[Sequence[int], int], Iterable[int]]  # (rows of each file, seed) -> row indices


def _buffer(size: int, shuffle_shards: bool = False) -> Order:
    return lambda lengths, seed: BufferShuffle(
        lengths, buffer_size=min(size, sum(lengths)), shuffle_shards=shuffle_shards, seed=seed
    )


def _batches_shuffled(lengths: Sequence[int], seed: int) -> Iterator[int]:
    """Yield the batches of the file order, each as it is, in random order; then the rows left."""
    whole, rest = divmod(sum(lengths), BATCH)
    for batch in FullShuffle(whole, seed=seed):
        yield from range(batch * BATCH, (batch + 1) * BATCH)
    yield from range(whole * BATCH, whole * BATCH + rest)


def _blocks(lengths: Sequence[int], seed: int) -> BlockShuffle:
    return BlockShuffle(shards_of(sum(lengths), _BLOCK), blocks=_BLOCKS, seed=seed)


ORDERS: Mapping[str, Order] = {
    "file order": lambda lengths, seed: Sequential(lengths, seed=seed),
    "batches shuffled": _batches_shuffled,
    **{f"buffer {size}": _buffer(size) for size in BUFFERS},
    "files shuffled, buffer 256": _buffer(256, shuffle_shards=True),
    "blocks": _blocks,
    "full": lambda lengths, seed: FullShuffle(lengths, seed=seed),
}


# Damage ------------------------------------------------------------------------------------------
DAMAGES = ("noise", "one file", "long step")
_FIRST_BAD = 100  # a detector must have filled its window
_LONG = 100.0  # factor on the learning rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """A fault made on purpose in a run whose rows are otherwise in order.

    kind: of the bad steps' batches, "noise" has random letters and "one file" neighboring rows. A
    "long step" has a healthy batch and a hundred times the learning rate.
    batches: the number of bad steps. place: where they begin, as a share of the run; None scatters
    them.
    """

    kind: str
    batches: int = 20
    place: float | None = 0.5

    def steps(self, count: int, seed: int) -> list[int]:
        """Return the bad steps of a run of `count` steps.

        Raises ValueError if they do not fit.
        """
        one_of("kind", self.kind, DAMAGES)
        first = _FIRST_BAD if self.place is None else int(self.place * count)
        if count - first < positive_int("batches", self.batches):
            raise ValueError(
                f"the bad steps must fit into the run, got {self.batches} from step {first} of "
                f"{count}; use fewer"
            )
        if self.place is None:
            dice = random.Random(f"{seed}/damage")
            return sorted(dice.sample(range(first, count), self.batches))
        return list(range(first, first + self.batches))


def _damaged(
    batches: Iterable[Tensor], damage: Damage, bad: Sequence[int], rows: Tensor, seed: int
) -> Iterator[Tensor]:
    """Yield the batches, with bad ones in the steps `bad`."""
    generator = torch.Generator().manual_seed(seed)
    last = len(rows) - BATCH * (len(bad) if damage.place is not None else 1)
    start = int(torch.randint(last, (), generator=generator))
    for step, batch in enumerate(batches):
        if step not in bad or damage.kind == "long step":
            yield batch
        elif damage.kind == "noise":
            yield torch.randint(LETTERS, batch.shape, generator=generator)
        else:
            yield rows[start : start + BATCH]
            start += BATCH
            if damage.place is None:
                start = int(torch.randint(last, (), generator=generator))


# Runs --------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class EpochRun:
    """One epoch, in nats per letter.

    losses: each batch's loss before its step. held_out: the loss on held-out rows at the end.
    rows: row indices, by step, of the order alone. bad: the steps with damage.
    """

    losses: tuple[float, ...]
    held_out: float
    rows: tuple[tuple[int, ...], ...]
    bad: tuple[int, ...] = ()


OPTIMIZERS: Mapping[str, Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]] = {
    "adamw": lambda weights, lr: torch.optim.AdamW(weights, lr=lr, weight_decay=0.0, fused=True),
    "sgd": lambda weights, lr: torch.optim.SGD(weights, lr=lr),
}


def run(
    order: str,
    seed: int,
    *,
    kind: str = "sources",
    rows: int | None = None,
    steps: int | None = None,
    lr: float = LEARNING_RATE,
    schedule: str = "decay",
    optimizer: str = "adamw",
    damage: Damage | None = None,
) -> EpochRun:
    """Train a new model for one epoch, or `steps` steps, in one of ORDERS.

    seed: seed of the weights, the order and the files; the data is corpus(kind, seed, rows=rows).
    schedule: "decay", linearly from `lr` to zero over the run, or "constant".
    optimizer: "adamw", without decay of the weights, or "sgd", plain gradient descent.
    Raises ValueError for an unknown name.
    """
    data = corpus(kind, seed, rows=rows)
    positive("lr", lr)
    falls = one_of("schedule", schedule, SCHEDULES) == "decay"
    indices = iter(ORDERS[one_of("order", order, ORDERS)](data.lengths, seed))
    count = data.steps if steps is None else min(positive_int("steps", steps), data.steps)
    chosen = [tuple(next(indices) for _ in range(BATCH)) for _ in range(count)]
    batches: Iterator[Tensor] = (data.rows[list(batch)] for batch in chosen)
    bad = () if damage is None else tuple(damage.steps(count, seed))
    if damage is not None:
        batches = _damaged(batches, damage, bad, data.rows, seed)
    torch.manual_seed(seed)
    model = NextCharacter()
    algorithm = OPTIMIZERS[one_of("optimizer", optimizer, OPTIMIZERS)](model.parameters(), lr)
    long = bad if damage is not None and damage.kind == "long step" else ()

    def scheduled() -> Iterator[Tensor]:
        for step, batch in enumerate(batches):
            factor = (1 - step / count if falls else 1.0) * (_LONG if step in long else 1.0)
            algorithm.param_groups[0]["lr"] = lr * factor
            yield batch

    losses = tuple(train(model, algorithm, scheduled()))
    with torch.no_grad():
        held_out = row_losses(model, data.held_out).mean().item()
    return EpochRun(losses=losses, held_out=held_out, rows=tuple(chosen), bad=bad)
