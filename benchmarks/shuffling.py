"""Orders of data: experiments with correlated batches, and a comparison with webdataset."""

from __future__ import annotations

import collections
import functools
import itertools
import json
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import webdataset
from torch import Tensor

from benchmarks.runner import Measurement, case, ratios, seen
from labcore.shuffling import (
    BufferShuffle,
    FullShuffle,
    ResumableLoader,
    StreamRows,
    TarShard,
    label_entropy,
    write_shards,
)
from labcore.studies.shuffling import characters, digit_orders, tracing
from labcore.studies.shuffling.characters import BATCH, EpochRun
from labcore.timing import Timing, paired


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much the experiments measure."""

    seeds: tuple[int, ...] = characters.SEEDS  # of the texts
    steps: int | None = None  # of a run on a text; None for an epoch
    stability_seeds: tuple[int, ...] = tuple(range(8))  # a coarse grid of rates needs more runs
    digit_seeds: tuple[int, ...] = digit_orders.SEEDS
    batches: tuple[int, ...] = digit_orders.SIZES  # whose design effect is predicted


FULL = Sizes()
SMALL = Sizes(
    seeds=(0, 1), steps=12, stability_seeds=(0, 1), digit_seeds=(0, 1), batches=(16, 32, 64)
)

# Experiments -------------------------------------------------------------------------------------
SPIKES_FROM = 50  # the detector's window: it can't find earlier spikes
# The documentation has few arms: enough to see whether the sources are an exception.
ARMS: dict[str, tuple[str, ...]] = {
    "sources": tuple(characters.ORDERS),
    "documentation": ("file order", "buffer 256", "buffer 2048", "full"),
}
DRAWN = (0, 1)  # seeds whose curves the explorer shows
HARM, FLAG, MANY = 0.05, 1.5, 2  # nats per letter; design effect; spikes in an epoch


@functools.cache
def _shares(kind: str, seed: int) -> Tensor:
    return tracing.letter_shares(characters.corpus(kind, seed).rows)


def _distances(run: EpochRun, kind: str, seed: int) -> list[float]:
    shares = _shares(kind, seed)
    return tracing.batch_distances((shares[list(rows)] for rows in run.rows), shares)


def _smooth(values: Sequence[float], window: int = 25, every: int = 5) -> list[float]:
    """Return trailing means, which fit an epoch's distances into a record."""
    ends = range(window, len(values) + 1, every)
    return [round(statistics.fmean(values[end - window : end]), 2) for end in ends]


def _boundaries(kind: str, seed: int, onsets: Sequence[int]) -> tracing.BoundaryTest | None:
    data = characters.corpus(kind, seed)
    starts = [row // BATCH for row in data.files.first_rows]
    steps = range(SPIKES_FROM, data.steps)
    if not any(step in steps for step in onsets):
        return None
    return tracing.boundary_test(onsets, starts, steps=steps, within=WITHIN)


WITHIN = 2  # steps from a file's beginning to its spike


def _traced(kind: str, onsets: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Measurement]:
    """Measure how often the file order's spikes begin with a file; skip seeds without spikes."""
    tests = [_boundaries(kind, seed, each) for seed, each in zip(seeds, onsets, strict=True)]
    found = [test for test in tests if test is not None]
    if not found:
        raise RuntimeError(f"found no spike in the file order of {kind}: there is nothing to trace")
    details: dict[str, Any] = {
        "within": WITHIN,
        "onsets": [test.onsets for test in found],
        "share": [test.share for test in found],
        "chance": [test.chance for test in found],
        "p": [test.p for test in found],
    }
    return [
        seen(
            f"share at a file's beginning, minus chance/{kind}",
            "share of spikes",
            [test.share - test.chance for test in found],
            **details,
        ),
        seen(
            f"share of files that begin with a spike/{kind}",
            "share of files",
            [test.recall for test in found],
            **details,
        ),
    ]


def _arm(
    kind: str,
    order: str,
    runs: Sequence[EpochRun],
    full: Sequence[EpochRun],
    seeds: Sequence[int],
) -> list[Measurement]:
    onsets = [[spike.step for spike in tracing.spikes_of(run.losses)] for run in runs]
    effects = [_distances(run, kind, seed) for run, seed in zip(runs, seeds, strict=True)]
    rate = [1000 * len(each) / len(run.losses) for each, run in zip(onsets, runs, strict=True)]
    base = [1000 * len(tracing.spikes_of(run.losses)) / len(run.losses) for run in full]
    details: dict[str, Any] = {
        "seeds": seeds,
        "onsets": onsets,
        "steps": [len(run.losses) for run in runs],
        "held out": [run.held_out for run in runs],
        "design effect": [statistics.fmean(each) for each in effects],
    }
    if kind == "sources" and ("buffer" in order or order in ("file order", "full")):
        details["losses"] = [[round(x, 3) for x in runs[i].losses] for i in DRAWN]
        details["distances"] = [_smooth(effects[i]) for i in DRAWN]
    found = [seen(f"spikes/{kind}, {order}", "in 1,000 steps", rate, **details)]
    if order == "full":
        return found
    pairs = list(zip(runs, full, strict=True))
    compared = {
        ("spikes minus full", "in 1,000 steps"): [a - b for a, b in zip(rate, base, strict=True)],
        ("held-out loss minus full", "nats a letter"): [a.held_out - b.held_out for a, b in pairs],
        ("steps over full", "ratio"): [characters.steps_ratio(a, b) for a, b in pairs],
    }
    return found + [
        seen(f"{name}/{kind}, {order}", unit, samples) for (name, unit), samples in compared.items()
    ]


def _flags(runs: dict[tuple[str, str], list[EpochRun]], seeds: Sequence[int]) -> list[Measurement]:
    """Return how well two signs predict which runs end worse than a full shuffle."""
    scores: dict[str, list[tuple[float, float]]] = {"design effect": [], "spikes": []}
    tables: list[dict[str, Any]] = []
    for place, seed in enumerate(seeds):
        table = {}
        for (kind, order), each in runs.items():
            run, full = each[place], runs[kind, "full"][place]
            table[f"{kind}, {order}"] = (
                run.held_out - full.held_out > HARM,
                statistics.fmean(_distances(run, kind, seed)) > FLAG,
                len(tracing.spikes_of(run.losses)) >= MANY,
            )
        tables.append(table)
        for name, column in (("design effect", 1), ("spikes", 2)):
            harmed = [row[0] for row in table.values()]
            flagged = [row[column] for row in table.values()]
            both = sum(a and b for a, b in zip(harmed, flagged, strict=True))
            # Without flags there is no false alarm; without harm there is nothing to miss.
            scores[name].append(
                (
                    both / sum(flagged) if any(flagged) else 1.0,
                    both / sum(harmed) if any(harmed) else 1.0,
                )
            )
    details: dict[str, Any] = {
        "harm above": HARM,
        "design effect above": FLAG,
        "spikes at least": MANY,
        "harmed, by design effect, by spikes": tables,
    }
    return [
        seen(
            f"{title} of the flag/{name}",
            "share of runs",
            [pair[place] for pair in pairs],
            **details,
        )
        for name, pairs in scores.items()
        for place, title in enumerate(("precision", "recall"))
    ]


@case("text/orders", minutes=3.5)
def text_orders(sizes: Sizes = FULL) -> list[Measurement]:
    """One epoch in every order: spikes, held-out loss, steps, correlation, and signs of harm."""
    seeds = sizes.seeds
    runs = {
        (kind, order): [characters.run(order, s, kind=kind, steps=sizes.steps) for s in seeds]
        for kind, orders in ARMS.items()
        for order in orders
    }
    found = []
    for (kind, order), each in runs.items():
        found += _arm(kind, order, each, runs[kind, "full"], seeds)
    for kind in ARMS:
        each = runs[kind, "file order"]
        onsets = [[spike.step for spike in tracing.spikes_of(run.losses)] for run in each]
        found += _traced(kind, onsets, seeds)
    return found + _flags(runs, seeds)


@case("text/learning-rate", minutes=0.8)
def text_learning_rate(sizes: Sizes = FULL) -> list[Measurement]:
    """Spikes and held-out loss at the learning rate that suits a full shuffle better."""
    runs = {
        order: [
            characters.run(order, seed, lr=characters.OTHER_RATE, steps=sizes.steps)
            for seed in sizes.seeds
        ]
        for order in ("file order", "buffer 256", "full")
    }
    found = []
    for order, each in runs.items():
        counts = [len(tracing.spikes_of(run.losses)) / len(run.losses) for run in each]
        pairs = zip(each, runs["full"], strict=True)
        details: dict[str, Any] = {
            "seeds": sizes.seeds,
            "held out": [run.held_out for run in each],
        }
        found += [
            seen(f"spikes/{order}", "in 1,000 steps", [1000 * n for n in counts], **details),
            seen(
                f"held-out loss minus full/{order}",
                "nats a letter",
                [run.held_out - full.held_out for run, full in pairs],
            ),
        ]
    return found


@case("text/stability", minutes=0.5)
def text_stability(sizes: Sizes = FULL) -> list[Measurement]:
    """The largest learning rate of plain gradient descent that does not diverge, by order."""
    seeds = sizes.stability_seeds
    largest = {
        order: [characters.largest_stable_rate(order, seed) for seed in seeds]
        for order in ("file order", "full")
    }
    if not min(largest["full"]):
        raise RuntimeError(f"a full shuffle diverges at {characters.RATES[0]}; lower the rates")
    return [
        seen(
            "largest stable learning rate, file order over full",
            "ratio",
            ratios(largest["file order"], largest["full"]),
            seeds=seeds,
            rates=characters.RATES,
            largest=largest,
        )
    ]


@case("digits/collapse", minutes=0.2)
def digits_collapse(sizes: Sizes = FULL) -> list[Measurement]:
    """Test accuracy on class-sorted digits by order, with the label entropy within a batch."""
    found = []
    for order in digit_orders.ORDERS:
        runs = [digit_orders.train(order, seed) for seed in sizes.digit_seeds]
        details: dict[str, Any] = {
            "seeds": sizes.digit_seeds,
            "entropy within a batch": [run.entropy.within for run in runs],
            "entropy expected": runs[0].entropy.expected,
            "entropy of the data": runs[0].entropy.data,
        }
        found.append(seen(f"accuracy/{order}", "", [run.accuracy for run in runs], **details))
    return found


@case("digits/design-effect", minutes=0.4)
def digits_design_effect(sizes: Sizes = FULL) -> list[Measurement]:
    """Measured minus predicted design effect, at the predictor's batch size and at others."""
    found = []
    for order in digit_orders.ORDERS:
        every = [
            digit_orders.effects(order, seed=seed, sizes=sizes.batches)
            for seed in sizes.digit_seeds
        ]
        details: dict[str, Any] = {
            "seeds": sizes.digit_seeds,
            "at": every[0].at,
            "icc": [each.icc for each in every],
            "sizes": every[0].sizes,
            "predicted": [each.predicted for each in every],
            "measured": [each.measured for each in every],
        }
        for place, size in enumerate(sizes.batches):
            found.append(
                seen(
                    f"measured minus predicted/{order}, batch {size}",
                    "",
                    [each.measured[place] - each.predicted[place] for each in every],
                    **(details if size == every[0].at else {}),
                )
            )
    return found


@case("digits/noise-scale", minutes=0.2)
def digits_noise_scale(sizes: Sizes = FULL) -> list[Measurement]:
    """Ratio of the noise scale estimated from two batches to the exact one, by order."""
    found = []
    for order in digit_orders.ORDERS:
        pairs = [digit_orders.noise_scales(order, seed=seed) for seed in sizes.digit_seeds]
        exact = [one.scale for one, _ in pairs]
        estimates = [one.scale for _, one in pairs]
        details: dict[str, Any] = {
            "seeds": sizes.digit_seeds,
            "exact": exact,
            "two batches": estimates,
        }
        found.append(
            seen(f"two batches over exact/{order}", "ratio", ratios(estimates, exact), **details)
        )
    return found


# Peers -------------------------------------------------------------------------------------------
SHARDS, ROWS_PER_SHARD, CLASSES = 12, 250, 10
ROWS = SHARDS * ROWS_PER_SHARD
BUFFER, INITIAL = 1000, 100  # webdataset's defaults
MIXERS = ("BufferShuffle", "webdataset", "webdataset, initial as large")
RESUMED, SMALL_BUFFER = 6000, 200  # an epoch much larger than the buffer
LOADED = 8192  # rows of the in-memory dataset


def _samples(rows: int = ROWS) -> Iterator[dict[str, Any]]:
    """Yield rows of 256 bytes of text and a label, sorted by label."""
    for row in range(rows):
        yield {"__key__": f"{row:06d}", "cls": row * CLASSES // rows, "txt": f"{row:256d}"}


def _webdataset(paths: Sequence[Path], size: int = BUFFER) -> Iterator[dict[str, Any]]:
    data = webdataset.WebDataset([str(path) for path in paths], shardshuffle=False)
    return iter(data.shuffle(size, initial=INITIAL, seed=0))


def _exhaust(rows: Iterable[Any]) -> None:
    collections.deque(rows, maxlen=0)


def _same_rows_or_refuse(*readers: Iterable[dict[str, Any]]) -> None:
    found = [sorted((row["__key__"], row["txt"], row["cls"]) for row in rows) for rows in readers]
    if any(rows != found[0] for rows in found) or len(found[0]) != ROWS:
        raise RuntimeError("the readers must return the same rows to be timed, got different ones")


def _per_second(timing: Timing, rows: int) -> list[float]:
    return [rows / seconds for seconds in timing.samples]


@case("shards/rows-per-second", minutes=0.6, needs="cpu")
def shards_rows_per_second() -> list[Measurement]:
    """Rows per second of one reader, from cached tar files through equal shuffle buffers."""
    with tempfile.TemporaryDirectory() as folder:
        shards = write_shards(_samples(), Path(folder) / "ours", rows_per_shard=ROWS_PER_SHARD)
        (Path(folder) / "theirs").mkdir()
        pattern = f"{folder}/theirs/shard-%06d.tar"
        with webdataset.ShardWriter(pattern, maxcount=ROWS_PER_SHARD, verbose=0) as writer:
            for sample in _samples():
                writer.write(sample)
        paths = [shard.path for shard in shards]
        others = sorted((Path(folder) / "theirs").glob("*.tar"))
        lengths = [len(shard) for shard in shards]
        order = BufferShuffle(lengths, buffer_size=BUFFER, initial=INITIAL)
        _same_rows_or_refuse(StreamRows(shards, order), _webdataset(paths), _webdataset(others))
        compared = paired(
            {
                "StreamRows": lambda: _exhaust(StreamRows(shards, order)),
                "webdataset": lambda: _exhaust(_webdataset(paths)),
                "webdataset, its own shards": lambda: _exhaust(_webdataset(others)),
            },
            rounds=15,
            warmup=1,
        )
        stored = {
            "bytes": sum(path.stat().st_size for path in paths),
            "bytes of webdataset's own": sum(path.stat().st_size for path in others),
        }
    rates = {name: _per_second(timing, ROWS) for name, timing in compared.timings.items()}
    details: dict[str, Any] = {
        "rows": ROWS,
        "shards": SHARDS,
        "buffer": BUFFER,
        "initial": INITIAL,
        **stored,
    }
    return [
        seen("rows per second", "rows/s", rates.pop("StreamRows"), peers=rates, **details),
        seen(
            "StreamRows over webdataset, time",
            "ratio",
            compared.ratios("StreamRows", "webdataset"),
            **details,
        ),
        seen(
            "shards of write_shards over webdataset's own, time of webdataset",
            "ratio",
            compared.ratios("webdataset", "webdataset, its own shards"),
            **details,
        ),
    ]


def _within(labels: Sequence[int]) -> float:
    return label_entropy(torch.tensor(labels).split(32)).within


@case("shards/mixing", minutes=0.2)
def shards_mixing() -> list[Measurement]:
    """Entropy within batches of 32 from sorted labels, with our rule and with webdataset's."""
    labels = [row * CLASSES // ROWS for row in range(ROWS)]
    found = []
    for size in (128, 512, 2048):
        drawn: dict[str, list[list[int]]] = {name: [] for name in MIXERS}
        for seed in range(5):
            order = BufferShuffle(ROWS, buffer_size=size, seed=seed)
            drawn["BufferShuffle"].append([labels[row] for row in order])
            for name, initial in (("webdataset", INITIAL), ("webdataset, initial as large", size)):
                mixed = webdataset.shuffle(size, initial=initial, seed=seed)(iter(labels))
                drawn[name].append(list(mixed))
        data = label_entropy(torch.tensor(labels).split(32))
        for part, rows in (("epoch", ROWS), ("first 10 batches", 320)):
            within = {
                name: [_within(each[:rows]) for each in orders] for name, orders in drawn.items()
            }
            found.append(
                Measurement(
                    quantity=f"entropy within a batch, buffer {size}, {part}",
                    unit="nats",
                    samples=within.pop("BufferShuffle"),
                    peers=within,
                    details={
                        "rows": ROWS,
                        "classes": CLASSES,
                        "initial of webdataset": INITIAL,
                        "initial of ours": size,
                        "expected of random batches": data.expected,
                    },
                )
            )
    return found


class _Counted:
    """A shard that counts the rows read from it."""

    def __init__(self, shard: TarShard, counter: list[int]) -> None:
        self.shard, self.counter = shard, counter

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for row in self.shard:
            self.counter[0] += 1
            yield row


@case("shards/resume", minutes=0.6, needs="cpu")
def shards_resume() -> list[Measurement]:
    """Resume at three quarters of an epoch: ours from a state, webdataset by reading all again."""
    place = 3 * RESUMED // 4
    with tempfile.TemporaryDirectory() as folder:
        shards = write_shards(_samples(RESUMED), folder, rows_per_shard=ROWS_PER_SHARD)
        paths = [shard.path for shard in shards]
        lengths = [len(shard) for shard in shards]
        order = BufferShuffle(lengths, buffer_size=SMALL_BUFFER, shuffle_shards=True)
        begun, held = StreamRows(shards, order), 0
        for _ in itertools.islice(begun, place):
            held = max(held, begun.held)
        state = begun.state_dict()
        counter = [0]
        counted = StreamRows([_Counted(shard, counter) for shard in shards], order)
        counted.load_state_dict(state)
        next(iter(counted))

        def ours() -> None:
            stream = StreamRows(shards, order)
            stream.load_state_dict(state)
            next(iter(stream))

        def theirs() -> None:
            next(itertools.islice(_webdataset(paths, SMALL_BUFFER), place, None))

        compared = paired({"StreamRows": ours, "webdataset": theirs}, rounds=9, warmup=1)
    details: dict[str, Any] = {
        "rows": RESUMED,
        "rows handed out": place,
        "rows read again": counter[0],
        "most rows held": held,
        "buffer": SMALL_BUFFER,
        "bytes of the state": len(json.dumps(state)),
        "rows in the state": 0,
    }
    seconds = {name: list(timing.samples) for name, timing in compared.timings.items()}
    return [
        seen("time to the next row", "s", seconds.pop("StreamRows"), peers=seconds, **details),
        seen(
            "StreamRows over webdataset, time to the next row",
            "ratio",
            compared.ratios("StreamRows", "webdataset"),
            **details,
        ),
    ]


@case("loader/epoch", minutes=0.2, needs="cpu")
def loader_epoch() -> list[Measurement]:
    """An epoch of a small in-memory dataset, in this process: the cost of an exact state."""
    data = torch.utils.data.TensorDataset(torch.zeros(LOADED, 64), torch.arange(LOADED))
    loaders: dict[str, Iterable[Any]] = {
        "ResumableLoader": ResumableLoader(data, FullShuffle(LOADED), batch_size=32),
        "torch DataLoader": torch.utils.data.DataLoader(data, batch_size=32, shuffle=True),
    }
    for batches in loaders.values():
        if sorted(torch.cat([rows for _, rows in batches]).tolist()) != list(range(LOADED)):
            raise RuntimeError("a loader must return each row once to be timed, got other rows")
    compared = paired(
        {name: functools.partial(_exhaust, batches) for name, batches in loaders.items()},
        rounds=25,
    )
    details: dict[str, Any] = {"rows": LOADED, "batch": 32, "workers": 0}
    rates = {name: _per_second(timing, LOADED) for name, timing in compared.timings.items()}
    return [
        seen("rows per second", "rows/s", rates.pop("ResumableLoader"), peers=rates, **details),
        seen(
            "ResumableLoader over torch DataLoader, time",
            "ratio",
            compared.ratios("ResumableLoader", "torch DataLoader"),
            **details,
        ),
    ]
