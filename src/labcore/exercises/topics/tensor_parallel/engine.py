"""Simulate four ranks that decode together from graphs in one process, and their faults.

The model has a fading mean of the past, two blocks (each a layer split by columns and one split by
rows), and a head split by vocabulary. A rank is a generator: it yields its input to a collective
and receives the output. A collective happens once all ranks have reached the same one. Ranks that
wait for different ones hang.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["EAGER", "LAYERS", "RANKS", "REPLAY", "REQUESTS", "SIZES", "STEPS", "Engine", "Log"]

RANKS = 4
REQUESTS, STEPS = 16, 25
SIZES = (1, 2, 4, 8, 16)  # rows of the captured graphs
FAULTY = 8  # rows of the graph that some faults affect
VOCAB, WIDTH, INNER, LAYERS = 32, 24, 32, 2
END, ENDING = 0, 1.2  # the token that ends an output, and the bonus on its logit
FADING = 0.5  # the factor of the past per token
REPLAY = 3  # launches per step: fill in the tokens, replay the graph, draw
EAGER = REPLAY + 1 + 5 * LAYERS + 1  # launches per step without a graph, one per operation
SEED = 39


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Configure how the ranks decode; each flag is a fault.

    shorter: the 8-row graph of rank 2 lacks the last all-reduce. ungraphed: rank 1 has no 8-row
    graph and launches these steps op by op. wider: rank 3 has no 8-row graph and pads its rows to
    16. unfilled: rank 1 replays on the tokens that its buffers held first. unreduced: no graph
    contains an all-reduce. own_draws: each rank draws tokens with its own random numbers.
    """

    shorter: bool = False
    ungraphed: bool = False
    wider: bool = False
    unfilled: bool = False
    unreduced: bool = False
    own_draws: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Describe the collective that a rank waits in. numbers: the input of the rank."""

    kind: str
    numbers: Tensor
    replayed: bool

    @property
    def meets(self) -> tuple[str, tuple[int, ...], bool]:
        """Return what must be the same on all ranks."""
        return self.kind, tuple(self.numbers.shape), self.replayed


@dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    """Record a run. Lists are [STEPS], with NaN after the step in which the ranks hang.

    right: share of requests whose output so far matches one process. finished: collectives per
    step. fewest, most: the fewest and the most launches of a rank. waiting: what each rank waits
    in at the end, or None. total: collectives that finished in the whole run.
    """

    right: list[float]
    finished: list[float]
    fewest: list[float]
    most: list[float]
    waiting: list[Call | None]
    total: int


@dataclass(kw_only=True, slots=True)
class _Rank:
    """Hold one process. mixed: the requests' past, [REQUESTS, C]; static: what its graphs read."""

    number: int
    ranks: int
    tokens: Tensor
    mixed: Tensor
    static: Tensor
    alive: list[int]
    written: Tensor
    launches: int = field(default=0)


@functools.cache
def _weights() -> Mapping[str, Tensor]:
    draw = torch.Generator().manual_seed(SEED)

    def some(*shape: int, scale: float) -> Tensor:
        return scale * torch.randn(*shape, generator=draw, dtype=torch.float64)

    return {
        "own": some(VOCAB, WIDTH, scale=1.0),
        "past": some(VOCAB, WIDTH, scale=0.6),
        "up": some(LAYERS, INNER, WIDTH, scale=WIDTH**-0.5),
        "down": some(LAYERS, WIDTH, INNER, scale=2.0 * INNER**-0.5),
        "out": some(VOCAB, WIDTH, scale=0.35),
    }


def _noise(step: int, seed: int) -> Tensor:
    """Draw the Gumbel noise that makes the largest logit a sample, [REQUESTS, V]."""
    draw = torch.Generator().manual_seed(1000 * SEED + 100 * seed + step)
    flat = torch.rand(REQUESTS, VOCAB, generator=draw, dtype=torch.float64)
    return -(-flat.clamp(min=1e-12).log()).log()


def _new(number: int, ranks: int) -> _Rank:
    draw = torch.Generator().manual_seed(SEED + 1)
    tokens = torch.randint(1, VOCAB, (REQUESTS,), generator=draw)
    return _Rank(
        number=number,
        ranks=ranks,
        tokens=tokens,
        mixed=torch.zeros(REQUESTS, WIDTH, dtype=torch.float64),
        static=torch.ones(max(SIZES), dtype=torch.long),
        alive=[*range(REQUESTS)],
        written=torch.full((REQUESTS, STEPS), -1),
    )


def _step(engine: Engine, rank: _Rank, step: int) -> Generator[Call, Tensor, None]:
    """Run one decode step of a rank: yield inputs of collectives, receive their outputs."""
    weights, rows = _weights(), list(rank.alive)
    rank.launches = 0
    if not rows:
        return
    size = min(one for one in SIZES if one >= len(rows))
    replayed, filled = True, True
    if engine.ungraphed and rank.number == 1:
        replayed = size != FAULTY
    if engine.wider and rank.number == 3 and size == FAULTY:
        size *= 2
    if engine.unfilled and rank.number == 1:
        filled = False
    # The host does not wait for the device, so it launches the whole step even if ranks hang.
    rank.launches = (REPLAY if replayed else EAGER) - (not filled)
    if filled:
        rank.static[: len(rows)] = rank.tokens[rows]
    mixed = torch.zeros(size, WIDTH, dtype=torch.float64)
    mixed[: len(rows)] = rank.mixed[rows]
    hidden = weights["own"][rank.static[:size]] + mixed
    for layer in range(LAYERS):
        up = weights["up"][layer].chunk(rank.ranks)[rank.number]
        down = weights["down"][layer].chunk(rank.ranks, 1)[rank.number]
        summand = torch.tanh(hidden @ up.T) @ down.T
        left_out = engine.shorter and rank.number == 2 and size == FAULTY and layer == LAYERS - 1
        if not (left_out or engine.unreduced):
            summand = yield Call(kind="all-reduce", numbers=summand, replayed=replayed)
        hidden = hidden + summand
    part = hidden @ weights["out"].chunk(rank.ranks)[rank.number].T
    logits = yield Call(kind="all-gather", numbers=part, replayed=replayed)
    seed = rank.number if engine.own_draws else 0
    logits[:, END] += ENDING
    drawn = (logits[: len(rows)] + _noise(step, seed)[rows]).argmax(-1)
    rank.mixed[rows] = FADING * (rank.mixed[rows] + weights["past"][rank.tokens[rows]])
    rank.tokens[rows] = drawn
    rank.written[rows, step] = drawn
    rank.alive = [row for row, token in zip(rows, drawn.tolist(), strict=True) if token != END]


def _met(calls: Sequence[Call | None]) -> Tensor | None:
    """Return the output of a collective, or None when the ranks wait for different ones."""
    present = [call for call in calls if call is not None]
    if len(present) < len(calls) or len({call.meets for call in present}) > 1:
        return None
    numbers = [call.numbers for call in present]
    if present[0].kind == "all-gather":
        return torch.cat(numbers, -1)
    return torch.stack(numbers).sum(0)


def _together(engine: Engine, ranks: Sequence[_Rank], step: int) -> tuple[int, list[Call | None]]:
    """Run one step of all ranks; return the finished collectives and what each rank waits in."""
    running = [_step(engine, rank, step) for rank in ranks]
    calls: list[Call | None] = [next(one, None) for one in running]
    finished = 0
    while any(calls):
        came = _met(calls)
        if came is None:
            return finished, calls
        finished += 1
        for place, one in enumerate(running):
            try:
                calls[place] = one.send(came.clone())
            except StopIteration:
                calls[place] = None
    return finished, calls


@functools.cache
def _one_process() -> Tensor:
    """Return outputs [REQUESTS, STEPS] of a rank with the whole model; -1 follows an end."""
    alone = [_new(0, 1)]
    for step in range(STEPS):
        _together(Engine(), alone, step)
    return alone[0].written


@functools.cache
def run(engine: Engine, ranks: int = RANKS) -> Log:
    """Decode STEPS steps, or until the ranks hang."""
    all_ranks = [_new(number, ranks) for number in range(ranks)]
    nan = [float("nan")] * STEPS
    columns = {name: nan.copy() for name in ("right", "finished", "fewest", "most")}
    waiting: list[Call | None] = [None] * ranks
    total = 0
    for step in range(STEPS):
        finished, waiting = _together(engine, all_ranks, step)
        total += finished
        launches = [rank.launches for rank in all_ranks]
        columns["finished"][step] = finished
        columns["fewest"][step], columns["most"][step] = min(launches), max(launches)
        if any(waiting):
            break
        seen = all_ranks[0].written[:, : step + 1]
        same = (seen == _one_process()[:, : step + 1]).all(1)
        columns["right"][step] = same.double().mean().item()
    return Log(**columns, waiting=waiting, total=total)
