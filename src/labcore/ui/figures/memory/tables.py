"""What a page needs to repeat `memory.film` and `memory.estimate`: points of a step as numbers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from labcore.memory.accounting import points
from labcore.memory.accounting.part import Part
from labcore.memory.accounting.prediction import OPTIMIZERS, Settings
from labcore.memory.levers import CHUNK
from labcore.ui.figures.memory.choices import CHECKPOINTING, MODELS

__all__ = ["DTYPES", "PLACES", "film_table", "peak_table"]

PLACES = (
    "embedding", "layer", "final norm", "head", "loss", "MLP", "second norm", "first norm",
)  # fmt: skip
RUNS = {"forward": points.forward, "backward": points.backward}
DTYPES = ("float32", "mixed", "bfloat16")  # float16 has the bytes of bfloat16
_PERIODS = range(1, 13)
# Tokens, devices and stages among which a point must be the highest somewhere to be listed.
_TOKENS = tuple(2**power for power in range(6, 21))
_DEVICES = (1, 2, 4, 8, 16, 64, 10**9)  # the last for gradients of earlier parts

Row = tuple[int, ...]


@functools.cache
def _part(model: str, dtype: str, length: int, **settings: Any) -> Part:
    told = Settings(batch=1, length=length, dtype=dtype, device="gpu", **settings)
    return told.ends(MODELS[model])[0]


def _pairs(
    model: str, dtype: str, checkpointing: str, moment: str, whole: bool, **settings: Any
) -> Iterator[tuple[points.Held, Row, Row]]:
    """Yield each point with its activations and its workspace as (constant, per token)."""
    how = CHECKPOINTING[checkpointing]
    one, two = (
        RUNS[moment](_part(model, dtype, n * CHUNK, checkpointing=how, **settings), whole)
        for n in (1, 2)
    )
    for a, b in zip(one, two, strict=True):
        sizes = ((a.activations, b.activations), (a.workspace, b.workspace))
        kept, work = ((round(2 * x - y), round((y - x) / CHUNK)) for x, y in sizes)
        yield a, kept, work


def _minus(one: Row, other: Row) -> list[int]:
    return [a - b for a, b in zip(one, other, strict=True)]


def _repeats(rows: Sequence[Row], start: int, period: int) -> int:
    """Return how often a block of `period` rows repeats from `start`, each time one stride on."""
    block = rows[start : start + period]
    after = rows[start + period : start + 2 * period]
    if len(after) < period:
        return 1
    strides = [_minus(y, x) for x, y in zip(block, after, strict=True)]
    times = 1
    while True:
        begin = start + times * period
        there = rows[begin : begin + period]
        told = [
            tuple(a + times * s for a, s in zip(row, stride, strict=True))
            for row, stride in zip(block, strides, strict=True)
        ]
        if list(there) != told or any(stride[0] for stride in strides):
            return times
        times += 1


def _packed(rows: Sequence[Row]) -> list[Any]:
    """Return rows as [times, block, strides], which is short because layers are alike."""
    found, at = [], 0
    while at < len(rows):
        counts = {period: _repeats(rows, at, period) for period in _PERIODS}
        period = max(counts, key=lambda one: (counts[one] > 1) * counts[one] * one)
        times = counts[period]
        block = rows[at : at + period]
        after = rows[at + period : at + 2 * period] if times > 1 else block
        strides = [_minus(y, x) for x, y in zip(block, after, strict=True)]
        found.append([times, block, strides])
        at += times * period
    return found


def _optimizers(model: str, dtype: str, **settings: Any) -> dict[str, dict[str, int]]:
    """Return each optimizer's state and its step's workspace, plain and under the levers."""
    found = {}
    for name in OPTIMIZERS:
        way = functools.partial(_part, model, dtype, 1, optimizer=name, **settings)
        works = {
            key: round(next(points.step(way(**levers))).workspace)
            for key, levers in {
                "workspace": {},
                "fused": {"fused": True},
            }.items()
        }
        found[name] = {"state": way().state, **works}
    return found


def film_table() -> dict[str, Any]:
    """Return a film's rows by model, dtype and checkpointing, and what doesn't depend on these.

    A row is a place's number, its layer, activations and workspace as constant and per token, and
    gradients.
    """
    table: dict[str, dict[str, Any]] = {}
    for model, dtype in itertools.product(MODELS, DTYPES):
        part = _part(model, dtype, 1)
        films = {
            how: {
                moment: _packed(
                    [
                        (PLACES.index(at.place), at.layer, *kept, *work, round(at.gradients))
                        for at, kept, work in _pairs(model, dtype, how, moment, True)
                    ]
                )
                for moment in RUNS
            }
            for how in CHECKPOINTING
        }
        optimizers = _optimizers(model, dtype)
        table.setdefault(model, {})[dtype] = {
            "weights": part.weights, "optimizers": optimizers, "films": films,
        }  # fmt: skip
    return table


def _totals(rows: Any, part: Part, moment: str, *, stage: int, devices: int, offload: bool) -> Any:
    """Return each row's bytes, but for what all rows share: float64 [rows, _TOKENS]."""
    done, gathered, reached, first, gradients, sent, *held = rows.T[..., None]
    total = held[0] + held[2] + np.array(_TOKENS) * (held[1] + held[3])
    if stage < 2:
        return total + (gradients - sent if offload else 0 if devices > 1 else gradients)
    ahead = part.layers - done
    copied = (done > 0) | ((moment == "forward") & (stage == 2) & (gathered > 0))
    units = np.where(first, 2, reached if stage == 2 else gathered)
    units = np.minimum(ahead, units) + (copied & (first == 0))
    outer = (part.weights - part.layers * part.unit) * (1 + first)
    reduced = sent if offload else done * part.gradients()
    kept = 0 if offload else reduced / devices
    return total + gradients - reduced + outer + part.unit * units + kept


def _summits(
    model: str, dtype: str, checkpointing: str, moment: str, **settings: Any
) -> list[list[int]]:
    """Return the rows of a moment that are the highest for some batch, stage and devices."""
    part = _part(model, dtype, 1, **settings)
    listed = [
        [
            at.done, at.gathered, part.layers if at.reached is None else at.reached,
            int(at.first), round(at.gradients), round(at.sent), *kept, *work,
        ]
        for at, kept, work in _pairs(model, dtype, checkpointing, moment, False, **settings)
    ]  # fmt: skip
    rows = np.array(listed, dtype=np.float64)
    highest = {
        int(at)
        for stage, devices, offload in itertools.product((0, 2, 3), _DEVICES, (False, True))
        for at in _totals(rows, part, moment, stage=stage, devices=devices, offload=offload).argmax(
            0
        )
    }
    return [listed[at] for at in sorted(highest)]


def _peaks(model: str, dtype: str, ways: Iterable[str], **settings: Any) -> dict[str, Any]:
    part = _part(model, dtype, 1, **settings)
    return {
        "weights": part.weights,
        "trained": part.trained,
        "unit": part.unit,
        "reduced": part.gradients(),
        "layers": part.layers,
        "optimizers": _optimizers(model, dtype, **settings),
        "points": {
            how: {moment: _summits(model, dtype, how, moment, **settings) for moment in RUNS}
            for how in ways
        },
    }


def peak_table(ways: Iterable[str] = CHECKPOINTING, **settings: Any) -> dict[str, Any]:
    """Return what `estimate` needs by model, dtype and checkpointing, on any number of GPUs.

    A row is the layers done, gathered and reached, whether it's the first, gradients, those sent
    with offload, activations and workspace as constant and per token. ways: keys of CHECKPOINTING.
    settings: of `Settings`.
    """
    return {
        model: {dtype: _peaks(model, dtype, ways, **settings) for dtype in DTYPES}
        for model in MODELS
    }
