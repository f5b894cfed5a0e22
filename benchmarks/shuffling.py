"""Orders of data and loss spikes: letters, digits, a language model, and webdataset's buffer."""

from __future__ import annotations

import collections
import functools
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import webdataset

from benchmarks.runner import Measurement, case, seen
from labcore.shuffling import BufferShuffle, StreamRows, write_shards
from labcore.studies.language.results import best
from labcore.studies.language.tuning import REPORT_SEEDS, Setting
from labcore.studies.shuffling import (
    characters,
    digit_orders,
    language_orders,
    language_results,
    language_spikes,
    tracing,
)
from labcore.studies.shuffling.characters import BATCH, Damage, EpochRun
from labcore.studies.shuffling.language_spikes import Branch, Plan
from labcore.timing import Timing, paired

PLAN, HOT = Plan(), Plan(trunk=0, after=32)  # HOT: at a learning rate that is too high


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much the experiments measure."""

    seeds: tuple[int, ...] = characters.SEEDS  # of the texts
    steps: int | None = None  # of a run on a text; None for an epoch
    bad: int = 20  # batches that are spoilt on purpose
    digit_seeds: tuple[int, ...] = digit_orders.SEEDS
    batches: tuple[int, ...] = digit_orders.SIZES  # whose design effect is predicted
    tokens: int = language_orders.bench.TOKENS  # of a run of the language model
    plan: Plan = PLAN
    hot: Plan = HOT
    files: int | None = None  # that the language model reads


FULL = Sizes()
_TINY = Plan(trunk=2, after=3, bad=1, batch=language_orders.BATCH)
SMALL = Sizes(
    seeds=(0, 1),
    steps=16,
    bad=3,
    digit_seeds=(0, 1),
    batches=(16, 32, 64),
    tokens=3 * language_orders.BATCH,
    plan=_TINY,
    hot=replace(_TINY, trunk=0),
    files=8,
)

# Letters -----------------------------------------------------------------------------------------
# The documentation has few arms: enough to see whether the sources are an exception.
ARMS: dict[str, tuple[str, ...]] = {
    "sources": tuple(characters.ORDERS),
    "documentation": ("file order", "buffer 256", "buffer 2048", "full"),
}
DRAWN = (0, 1)  # seeds whose curves the explorer shows
FLAG, MANY = 1.5, 2.0  # a design effect; spikes in 1,000 steps more than a full shuffle has
SPIKES_FROM = 50  # the detector's window: it can't find earlier spikes
SHORTER = "a tenth fewer steps"  # of a full shuffle without spikes, and its own decay to zero
WITHOUT = "the bad steps left out"  # likewise, with as many fewer steps as were spoilt
POOLED = 16  # consecutive batches whose rows count as one batch: correlation within and between
WITHIN = 2  # steps from a file's beginning to its spike


@functools.cache
def _cached(order: str, seed: int, **options: Any) -> EpochRun:
    return characters.run(order, seed, **options)


def _epoch(order: str, seed: int, **options: Any) -> EpochRun:
    """Run an epoch once for all cases; a default is the same as a value that equals it."""
    kind = options.get("kind", "sources")
    usual = {"lr": characters.LEARNING_RATE, "schedule": "decay", "kind": kind}
    options["steps"] = options.get("steps") or characters.corpus(kind, seed).steps
    return _cached(order, seed, **{**usual, "optimizer": "adamw", **options})


def _smooth(values: Sequence[float], window: int = 25, every: int = 5) -> list[float]:
    """Return trailing means, which fit an epoch's distances into a record."""
    ends = range(window, len(values) + 1, every)
    return [round(statistics.fmean(values[end - window : end]), 2) for end in ends]


def _traced(kind: str, runs: Sequence[EpochRun], seeds: Sequence[int]) -> list[Measurement]:
    """Measure how often the file order's spikes begin with a file; skip seeds without spikes."""
    tests = []
    for run, seed in zip(runs, seeds, strict=True):
        data = characters.corpus(kind, seed)
        onsets = [spike.step for spike in tracing.spikes_of(run.losses)]
        steps = range(SPIKES_FROM, data.steps)
        if any(step in steps for step in onsets):
            starts = [row // BATCH for row in data.files.first_rows]
            tests.append(tracing.boundary_test(onsets, starts, steps=steps, within=WITHIN))
    if not tests:
        raise RuntimeError(f"found no spike in the file order of {kind}: there is nothing to trace")
    details: dict[str, Any] = {
        "within": WITHIN,
        "onsets": [test.onsets for test in tests],
        "share": [test.share for test in tests],
        "chance": [test.chance for test in tests],
        "p": [test.p for test in tests],
    }
    near = [test.share - test.chance for test in tests]
    recall = [test.recall for test in tests]
    name, files = (
        "share at a file's beginning, minus chance",
        "share of files that begin with a spike",
    )
    return [
        seen(f"{name}/{kind}", "share of spikes", near, **details),
        seen(f"{files}/{kind}", "share of files", recall, **details),
    ]


def _arm(
    kind: str, order: str, runs: Sequence[EpochRun], full: Sequence[EpochRun], seeds: Sequence[int]
) -> list[Measurement]:
    effects = [
        tracing.epoch_distances(run, kind, seed) for run, seed in zip(runs, seeds, strict=True)
    ]
    rate = [tracing.spike_rate(run.losses) for run in runs]
    details: dict[str, Any] = {
        "seeds": seeds,
        "onsets": [[spike.step for spike in tracing.spikes_of(run.losses)] for run in runs],
        "held out": [run.held_out for run in runs],
        "design effect": [statistics.fmean(each) for each in effects],
        f"design effect of {POOLED} batches": [
            statistics.fmean(tracing.epoch_distances(run, kind, seed, pooled=POOLED))
            for run, seed in zip(runs, seeds, strict=True)
        ],
    }
    if kind == "sources" and order != "blocks":
        details["losses"] = [[round(x, 3) for x in runs[i].losses] for i in DRAWN]
        details["distances"] = [_smooth(effects[i]) for i in DRAWN]
    found = [seen(f"spikes/{kind}, {order}", "in 1,000 steps", rate, **details)]
    if order == "full":
        return found
    pairs = list(zip(runs, full, strict=True))
    more = [tracing.spike_rate(a.losses) - tracing.spike_rate(b.losses) for a, b in pairs]
    harm = [a.held_out - b.held_out for a, b in pairs]
    return [
        *found,
        seen(f"spikes minus full/{kind}, {order}", "in 1,000 steps", more),
        seen(f"held-out loss minus full/{kind}, {order}", "nats per letter", harm),
    ]


def _flags(found: Sequence[Measurement], seeds: Sequence[int]) -> list[Measurement]:
    """Return how well a large design effect tells the orders that spike more than a full shuffle.

    found: the measurements of all arms.
    """
    by_name = {item.quantity: item for item in found}
    pairs = {
        name.removeprefix("spikes minus full/"): item.samples
        for name, item in by_name.items()
        if name.startswith("spikes minus full/")
    }
    scores, tables = [], []
    for place, _ in enumerate(seeds):
        table = {
            arm: (
                more[place] >= MANY,
                by_name[f"spikes/{arm}"].details["design effect"][place] > FLAG,
            )
            for arm, more in pairs.items()
        }
        tables.append(table)
        spiking, flagged = (sum(column) for column in zip(*table.values(), strict=True))
        both = sum(all(row) for row in table.values())
        # Without flags there is no false alarm; without spikes there is nothing to miss.
        scores.append((both / flagged if flagged else 1.0, both / spiking if spiking else 1.0))
    details: dict[str, Any] = {"design effect above": FLAG, "spikes": MANY, "tables": tables}
    return [
        seen(f"{name} of the flag", "share of orders", samples, **details)
        for name, samples in zip(("precision", "recall"), zip(*scores, strict=True), strict=True)
    ]


@case("text/orders", minutes=4)
def text_orders(sizes: Sizes = FULL) -> list[Measurement]:
    """One epoch in every order: spikes, held-out loss, correlation, and what traces the spikes."""
    seeds = sizes.seeds
    runs = {
        (kind, order): [_epoch(order, s, kind=kind, steps=sizes.steps) for s in seeds]
        for kind, orders in ARMS.items()
        for order in orders
    }
    found = []
    for (kind, order), each in runs.items():
        found += _arm(kind, order, each, runs[kind, "full"], seeds)
    found += _flags(found, seeds)
    for kind in ARMS:
        found += _traced(kind, runs[kind, "file order"], seeds)
    return found


@case("text/schedules", minutes=5)
def text_schedules(sizes: Sizes = FULL) -> list[Measurement]:
    """Held-out loss by learning rate, constant or falling to zero, in three orders."""
    tested = tuple(characters.BEST["decay"])
    loss = {
        (schedule, lr, order): [
            _epoch(order, seed, lr=lr, schedule=schedule, steps=sizes.steps).held_out
            for seed in sizes.seeds
        ]
        for schedule in characters.SCHEDULES
        for lr in characters.RATES
        for order in tested
    }
    found = []
    for (schedule, lr, order), own in loss.items():
        name = f"{schedule}, rate {lr:g}, {order}"
        found.append(seen(f"held-out loss/{name}", "nats per letter", own, seeds=sizes.seeds))
        if order != "full":
            harm = _minus(own, loss[schedule, lr, "full"])
            found.append(seen(f"held-out loss minus full/{name}", "nats per letter", harm))
    for schedule, best_rates in characters.BEST.items():
        at_best = {order: loss[schedule, lr, order] for order, lr in best_rates.items()}
        for order in tested[:-1]:
            name = f"{schedule}, best rates, {order}"
            harm = _minus(at_best[order], at_best["full"])
            found.append(seen(f"held-out loss minus full/{name}", "nats per letter", harm))
    return found


def _minus(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    return [one - other for one, other in zip(ones, others, strict=True)]


@case("text/made", minutes=2.5)
def text_made(sizes: Sizes = FULL) -> list[Measurement]:
    """Spikes made on purpose in a full shuffle, and what they leave behind."""
    noise = Damage(kind="noise", batches=sizes.bad)
    made = {
        "single batches of noise": ("adamw", replace(noise, place=None)),
        "a shard of noise": ("adamw", noise),
        "a shard of noise, SGD": ("sgd", noise),
        "a shard of one file": ("adamw", replace(noise, kind="one file")),
        "one long step": ("adamw", Damage(kind="long step", batches=1)),
    }
    rates = {"adamw": characters.LEARNING_RATE, "sgd": characters.SGD_RATE}
    found = []
    for name, (optimizer, damage) in made.items():
        options = {"optimizer": optimizer, "lr": rates[optimizer]}
        runs, clean, shorter, without = [], [], [], []
        for seed in sizes.seeds:
            runs.append(_epoch("full", seed, damage=damage, steps=sizes.steps, **options))
            clean.append(_epoch("full", seed, steps=sizes.steps, **options))
            count = len(clean[-1].losses)
            shorter.append(_epoch("full", seed, steps=round(0.9 * count), **options))
            without.append(_epoch("full", seed, steps=count - damage.batches, **options))
        pairs = list(zip(runs, clean, strict=True))
        details: dict[str, Any] = {
            "seeds": sizes.seeds,
            "rise": [max(_minus(run.losses, base.losses)) for run, base in pairs],
        }
        rate = [tracing.spike_rate(run.losses) for run in runs]
        later = [
            tracing.later_spikes(run.losses, run.bad[-1])
            - tracing.later_spikes(base.losses, run.bad[-1])
            for run, base in pairs
        ]
        found += [
            seen(f"spikes/{name}", "in 1,000 steps", rate, **details),
            seen(f"later spikes minus clean/{name}", "spikes", later),
        ]
        ends = {
            what: [run.held_out for run in each]
            for what, each in (("clean", clean), (SHORTER, shorter), (WITHOUT, without))
        }
        harmed = [run.held_out for run in runs]
        for what, base_ends in ends.items():
            quantity = f"held-out loss minus {what}/{name}"
            found.append(seen(quantity, "nats per letter", _minus(harmed, base_ends)))
        for what in (SHORTER, WITHOUT):
            cost = _minus(ends[what], ends["clean"])
            found.append(seen(f"{what} minus clean/{name}", "nats per letter", cost))
    return found


# Digits ------------------------------------------------------------------------------------------
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
    """Design effect measured over predicted, at the largest batch; the others in the details."""
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
        last = [each.measured[-1] / each.predicted[-1] for each in every]
        name = f"measured over predicted, largest batch/{order}"
        found.append(seen(name, "ratio", last, **details))
    return found


# The language model ------------------------------------------------------------------------------
def _tuned(batch: int) -> Setting:
    return best(batch, "AdamW")


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in values]


def _declare_order(order: str, seed: int) -> None:
    @case(f"language/{order}/seed {seed}", minutes=3.6)
    def _(sizes: Sizes = FULL) -> list[Measurement]:
        read: dict[str, Any] = {"seed": seed, "tokens": sizes.tokens, "max_files": sizes.files}
        run = language_orders.train_ordered(order, _tuned(language_orders.BATCH), **read)
        details: dict[str, Any] = {
            "losses": _rounded(run.curve.losses),
            "norms": _rounded([norm or 0.0 for norm in run.curve.norms]),
            "seed": seed,
        }
        if order != language_orders.SHORTER:
            text, starts = language_orders.arranged(order, **read)
            for name, pooled in (("", 1), (f" of {POOLED} batches", POOLED)):
                effect = language_orders.design_effect(text, starts, pooled=pooled)
                details[f"design effect{name}"] = round(effect, 3)
        return [seen("held-out loss", "nats/token", [run.loss], **details)]


def _branch(name: str, branch: Branch) -> Measurement:
    details: dict[str, Any] = {
        "losses": _rounded(branch.losses),
        "norms": _rounded(branch.norms),
        "fixed": _rounded(branch.fixed),
    }
    return seen(f"held-out loss/{name}", "nats/token", [branch.held_out], **details)


def _declare_damage(what: str, cure: str, seed: int, minutes: float) -> None:
    """Declare a trunk with its branches: damaged ones, or ones that mend the data."""

    @case(f"language/{what}/seed {seed}", minutes=minutes)
    def _(sizes: Sizes = FULL) -> list[Measurement]:
        plan = sizes.plan
        clean = language_spikes.stream(plan, seed, max_files=sizes.files)
        if what == "mended":
            streams = language_spikes.mended(clean, plan, seed)
        else:
            kinds = language_spikes.kinds_with(cure)
            spoilt = {kind: language_spikes.damaged(clean, kind, plan, seed) for kind in kinds}
            streams = {"clean": clean, **spoilt}
            if cure == "none":
                streams[language_spikes.FEWER] = language_spikes.fewer(clean, plan)
        found = language_spikes.branches(
            streams, _tuned(PLAN.batch), plan, seed=seed, cure=cure, max_files=sizes.files
        )
        return [_branch(name, branch) for name, branch in found.items()]


def _declare_hot(seed: int) -> None:
    @case(f"language/{language_results.HOT}/seed {seed}", minutes=4.0)
    def _(sizes: Sizes = FULL) -> list[Measurement]:
        found = []
        for cure in language_spikes.CURES:
            branch = language_spikes.train_hot(
                _tuned(PLAN.batch),
                sizes.hot,
                seed=seed,
                cure=cure,
                factor=8.0,
                max_files=sizes.files,
            )
            found.append(_branch(cure, branch))
        return found


for _seed in REPORT_SEEDS:
    for _order in (*language_orders.ORDERS, language_orders.SHORTER):
        _declare_order(_order, _seed)
    _declare_damage("damaged", "none", _seed, 4.6)
    _declare_damage("mended", "none", _seed, 2.5)
    _declare_damage("damaged, z-loss", "z-loss", _seed, 3.2)
    _declare_damage("damaged, QK-norm", "QK-norm", _seed, 3.2)
    _declare_hot(_seed)


# These two only read the records of the runs above; their minutes put them after those.
@case("language/orders", minutes=4.8)
def language_order_records(_: Sizes = FULL) -> list[Measurement]:
    """The orders against random windows, whole and a tenth fewer: held-out loss and spikes."""
    return [
        seen(name, language_results.unit_of(name), samples)
        for name, samples in language_results.order_differences().items()
    ]


@case("language/spikes", minutes=4.8)
def language_spike_records(_: Sizes = FULL) -> list[Measurement]:
    """Spikes made on purpose, plain and with each cure, against the same model's clean branch."""
    return [
        seen(name, language_results.unit_of(name), samples)
        for name, samples in language_results.spike_differences().items()
    ]


# Peers -------------------------------------------------------------------------------------------
SHARDS, ROWS_PER_SHARD, CLASSES = 12, 250, 10
ROWS = SHARDS * ROWS_PER_SHARD
BUFFER, INITIAL = 1000, 100  # webdataset's defaults


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
