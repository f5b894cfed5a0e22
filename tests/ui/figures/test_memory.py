"""The chapter's figures show the bytes that they are given or that `estimate` says, and say so."""

import functools
import random

import plotly.graph_objects as go
import pytest

from labcore import records
from labcore.claims import Measured
from labcore.memory import Breakdown, Moment, estimate
from labcore.memory.accounting.prediction import DTYPES, OPTIMIZERS
from labcore.ui import Choice, IntSlider, Slider, Toggle, explore, twin
from labcore.ui.compact import dumps
from labcore.ui.figures import memory as figures
from labcore.ui.figures.memory.choices import in_bytes

PARTS = tuple(figures.COLORS)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
CONTROLS = {
    "film": {
        "model": Choice(options=tuple(figures.MODELS), default="7B"),
        "card": Choice(options=tuple(figures.CARDS), default="H100"),
        "length": Choice(options=LENGTHS, default=4096),
        "batch": Choice(options=(1, 2, 4, 8, 16)),
        "dtype": Choice(options=DTYPES, default="bfloat16"),
        "optimizer": Choice(options=OPTIMIZERS),
        "checkpointing": Choice(options=tuple(figures.CHECKPOINTING)),
        "moment": IntSlider(low=0, high=100, default=50),
    },
    "levers": {
        "model": Choice(options=tuple(figures.MODELS), default="7B"),
        "card": Choice(options=tuple(figures.CARDS), default="A100"),
        "devices": Choice(options=(1, 2, 4, 8, 16, 64)),
        "rows": Choice(options=(1, 2, 4, 8, 16), default=4),
        "length": Choice(options=LENGTHS[1:6], default=4096),
        "dtype": Choice(options=figures.PRECISIONS, default="bfloat16"),
        "optimizer": Choice(options=figures.OPTIMIZERS, default="adamw8bit"),
        "fused": Toggle(),
        "checkpointing": Choice(options=figures.WAYS, default="every layer"),
        "parts": Choice(options=(1, 2, 4, 8, 16)),
        "no_logits": Toggle(default=True),
        "zero_stage": Choice(options=(0, 1, 2, 3)),
        "offload": Toggle(),
        "adapters": Choice(options=tuple(figures.ADAPTERS)),
        "share": Slider(low=0.1, high=0.9, default=0.5, step=0.05),
    },
    "stages": {
        "optimizer": Choice(options=OPTIMIZERS),
        "checkpointing": Choice(options=tuple(figures.CHECKPOINTING)),
        "model": Choice(options=tuple(figures.MODELS), default="7B"),
        "dtype": Choice(options=DTYPES, default="bfloat16"),
        "batch": Choice(options=(1, 2, 4, 8, 16), default=4),
        "length": Choice(options=LENGTHS[:6], default=4096),
        "devices": Choice(options=(2, 4, 8, 16, 64), default=8),
    },
}


def alt(figure: go.Figure) -> str:
    return figure.layout.meta["alt"]


def heights(figure: go.Figure) -> dict[str, dict[str, float]]:
    """Part -> column -> GB."""
    return {bar.name: dict(zip(bar.x, bar.y, strict=True)) for bar in figure.data}


def labels(figure: go.Figure) -> list[str]:
    return [note.text for note in figure.layout.annotations if note.visible]


def test_stacks_show_every_part_and_the_lines_that_are_near() -> None:
    columns = {
        "a": Breakdown(parameters=10**10, activations=8 * 10**9),
        "b": Breakdown(workspace=3 * 10**9),
    }
    figure = figures.stacks(columns, title="Two")
    shown = heights(figure)
    assert tuple(shown) == PARTS
    assert shown["parameters"] == {"a": 10, "b": 0} and shown["activations"] == {"a": 8, "b": 0}
    assert shown["workspace"]["b"] == 3
    assert [shape.y0 for shape in figure.layout.shapes if shape.visible] == [24, 16]
    assert labels(figure) == ["24 GB", "16 GB"]
    assert figure.layout.yaxis.range[1] > 24
    assert "a: parameters 10 GB, activations 8 GB, together 18 GB; b: workspace 3 GB" in alt(figure)


def test_a_stack_above_all_lines_has_them_all() -> None:
    figure = figures.stacks({"a": Breakdown(parameters=10**12)}, title="One")
    assert {s.y0 for s in figure.layout.shapes if s.visible} == set(figures.CAPACITIES)
    assert labels(figure) == ["141 GB", "80 GB", "24 GB"]
    assert "1 TB" in alt(figure) and figure.layout.yaxis.range[1] > 1000


def test_a_film_s_top_is_the_estimate_and_its_cursor_reads_the_parts(seed: int) -> None:
    pick = random.Random(seed)
    chosen = {name: pick.choice(one.positions()) for name, one in CONTROLS["film"].items()}
    figure = figures.film(**chosen)
    settings = {key: chosen[key] for key in ("length", "batch", "dtype", "optimizer")}
    told = estimate(
        figures.MODELS[chosen["model"]],
        **settings,
        checkpointing=figures.CHECKPOINTING[chosen["checkpointing"]],
        device="gpu",
    )
    totals = [sum(parts) for parts in zip(*(area.y for area in figure.data), strict=True)]
    assert max(totals) == pytest.approx(told.total / 1e9)
    memory = figures.CARDS[chosen["card"]].gpu.memory
    assert ("fits" if told.total <= memory else "does not fit") in figure.layout.title.text
    assert figure.layout.shapes[0].y0 == memory / 1e9
    places = list(figure.data[0].x)
    assert places == sorted(places) and (places[0], places[-1]) == (0, 100)
    at = max(n for n, x in enumerate(places) if x <= chosen["moment"])
    assert figure.layout.shapes[1].x0 == places[at]
    read = [f"{area.name.split()[0]} {in_bytes(1e9 * area.y[at])}" for area in figure.data]
    assert [area.name for area in figure.data] == read
    assert all(part in alt(figure) for part in read)


def test_a_film_names_where_its_cursor_stands() -> None:
    def named(moment: float, **settings: str) -> str:
        text = figures.film("1.1B", "A100", moment=moment, **settings).layout.title.text
        return text.split("<br>")[1].rpartition(":")[0]

    assert named(0) == named(100) == "end" and named(95) == "step"
    assert named(30) == "forward, loss"
    assert named(90) == "backward, embedding"
    assert named(15) == named(15, checkpointing="selective") == "forward, layer 12"


def test_stages_are_the_peaks_of_one_gpu_among_many() -> None:
    figure = figures.stages("sgd", "selective", "13B", "float16", devices=64)
    shown = heights(figure)
    for stage in range(4):
        held = estimate(
            figures.MODELS["13B"], batch=1, length=4096, dtype="float16", optimizer="sgd",
            checkpointing="selective", zero_stage=stage, data_parallel=64, device="gpu",
        )  # fmt: skip
        total = sum(shown[part][f"stage {stage}"] for part in PARTS)
        assert total == pytest.approx(held.total / 1e9)


@pytest.mark.parametrize("name", CONTROLS)
def test_frames_share_traces_and_titles_fit_a_phone(name: str, seed: int) -> None:
    controls, draw = CONTROLS[name], getattr(figures, name)
    pick = random.Random(seed)
    points = [
        {key: pick.choice(control.positions()) for key, control in controls.items()}
        for _ in range(40)
    ]
    longest = {
        key: max(control.positions(), key=lambda value: len(f"{value}"))
        for key, control in controls.items()
    }
    kinds = set()
    for point in [longest, *points]:
        figure = draw(**point)
        kinds.add(tuple((trace.name.split()[0], trace.type) for trace in figure.data))
        assert max(map(len, figure.layout.title.text.split("<br>"))) <= 48
        sizes, axis = [bar.y for bar in figure.data], figure.layout.yaxis
        if name == "levers":
            sizes, axis = [bar.x for bar in figure.data[:5]], figure.layout.xaxis
        assert max(map(sum, zip(*sizes, strict=True))) < axis.range[1]
    assert len(kinds) == 1


@pytest.mark.parametrize("name", CONTROLS)
def test_the_static_page_computes_every_setting(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABCORE_BOOK", "1")
    formula = getattr(figures, f"{name.upper()}_FORMULA")
    shown = explore(getattr(figures, name), alt="x", formula=formula, **CONTROLS[name])
    packed = shown._repr_mimebundle_()[twin.MIME]
    assert [control["name"] for control in packed["controls"]] == list(CONTROLS[name])
    assert packed["fixed"] == [] and twin.start(packed) == 0
    assert twin.first_slice(packed) == packed
    assert len(dumps(packed)) < 135_000


def test_levers_stack_to_the_estimate_with_all_of_them(seed: int) -> None:
    pick = random.Random(seed)
    controls = CONTROLS["levers"]
    for _ in range(5):
        chosen = {name: pick.choice(one.positions()) for name, one in controls.items()}
        figure = figures.levers(**chosen)
        names = list(figure.data[0].y)
        assert names[0] == "plain" and len(set(names)) == len(names)
        assert all(name.startswith("+ ") for name in names[1:])
        same = {key: chosen[key] for key in ("length", "dtype", "optimizer", "fused", "offload")}
        told = estimate(
            figures.MODELS[chosen["model"]], batch=chosen["rows"], device="gpu", **same,
            parts=min(chosen["parts"], chosen["rows"]), chunk=1024 if chosen["no_logits"] else None,
            checkpointing=figures.CHECKPOINTING[chosen["checkpointing"]],
            zero_stage=chosen["zero_stage"], data_parallel=chosen["devices"],
            **figures.ADAPTERS[chosen["adapters"]],
        )  # fmt: skip
        bars = [sum(column) for column in zip(*(bar.x for bar in figure.data[:5]), strict=True)]
        assert bars[-1] == pytest.approx(told.total / 1e9)
        plain = estimate(
            figures.MODELS[chosen["model"]], batch=chosen["rows"], length=chosen["length"],
            data_parallel=chosen["devices"], device="gpu",
        )  # fmt: skip
        memory = figures.CARDS[chosen["card"]].gpu.memory
        limit = 2.5 * max(told.total, memory)  # longer bars are cut, and say so
        assert bars[0] == pytest.approx(min(plain.total, limit) / 1e9)
        mark = "» " if plain.total > limit else ""
        assert figure.data[4].text[0] == mark + in_bytes(plain.total)
        assert figure.layout.annotations[0].text == f"{in_bytes(memory)} card"
        said = figure.layout.title.text
        assert ("does not fit" not in said) == (told.total <= memory)
        assert figure.layout.shapes[0].x0 == memory / 1e9
        assert f"{names[-1]}: {in_bytes(told.total)}" in alt(figure)


def moment(phase: str, **held: int) -> Moment:
    return Moment(phase=phase, module="", held=Breakdown(**held))


def test_the_timeline_is_the_last_step_stacked() -> None:
    steps = [
        moment("forward", parameters=10**6),
        moment("backward", parameters=10**6),
        moment("between", parameters=10**6),
        moment("forward", parameters=10**6, activations=2 * 10**6),
        moment("backward", parameters=10**6, gradients=3 * 10**6, activations=10**6),
        moment("step", parameters=10**6, gradients=3 * 10**6, optimizer=10**6),
    ]
    figure = figures.timeline(steps, title="One step")
    tops = {trace.name: list(trace.y) for trace in figure.data}
    assert tops["parameters"] == [1, 1, 1]
    assert tops["gradients"] == [1, 4, 4]
    assert tops["workspace"] == [3, 5, 5]
    # What is drawn later covers what was drawn before.
    assert [trace.name for trace in figure.data] == list(reversed(PARTS))
    assert [note.text for note in figure.layout.annotations] == ["forward", "backward", "step"]
    assert "forward: at most 3 MB; backward: at most 5 MB; step: at most 5 MB" in alt(figure)


def test_a_long_timeline_keeps_its_highest_moment(seed: int) -> None:
    sizes = random.Random(seed).sample(range(10**6, 10**8), 5000)
    steps = [moment("forward", activations=size) for size in sizes]
    figure = figures.timeline(steps, title="Many")
    shown = figure.data[0].y
    assert len(shown) <= 250
    assert max(shown) == pytest.approx(max(sizes) / 1e6)
    assert figure.data[0].x[-1] < len(steps)


def test_stretches_set_what_was_held_beside_the_prediction() -> None:
    figure = figures.stretches({1: 4000.0, 2: 3000.0}, {2: 3100.0}, title="Blocks")
    line, dots = figure.data
    assert list(line.y) == [4, 3] and list(dots.x) == [2] and list(dots.y) == [3.1]
    assert figure.layout.xaxis.type == "log" and list(figure.layout.xaxis.tickvals) == [2]
    assert "3 kB at 2" in alt(figure)


def test_a_table_has_predictions_measurements_and_what_was_recorded() -> None:
    shown = figures.compared({"half": (1e6, 2e6)})
    assert shown.rows == [["half", "1", "2", "-50.0%"]]
    near = figures.compared({"same": (1e6, 1e6), "near": (1e6, 1e6 + 9)}, note="So.")
    assert near.rows == [["same", "1"], ["near", "1"]]
    assert near.note == "All predictions are within 0.05%. So."
    assert figures.compared({"a": (8, 8)}).note == "The prediction is exact to the byte."


def test_the_summary_sets_a_7b_beside_what_was_recorded() -> None:
    shown = figures.summary(
        {"pipeline": {"1f1b, stage 0": {"optimizer": "sm3"}}, "lora": {"LoRA": None}}
    )
    size, share = (
        records.find("memory", "bytes/pipeline", f"{what}/1f1b, stage 0").p50
        for what in ("peak", "peak over plain")
    )
    seven = functools.partial(estimate, figures.MODELS["7B"], batch=1, length=4096, device="gpu")
    left = seven(optimizer="sm3").total / seven().total
    name, mb, over, large, loss = shown.rows[0]
    assert name == "1F1B, stage 0" and float(mb) == pytest.approx(size / 1e6, rel=0.01)
    assert (over, large) == (f"{share:.3f}", f"{left:.3f}")
    exact = records.find("memory", "price/pipeline", "loss minus plain/1f1b")
    assert float(loss) == pytest.approx(Measured.recorded(exact).mean, abs=1e-4)
    assert shown.rows[1][3:] == ["", ""]  # neither counted nor measured against plain
    with pytest.raises(KeyError):
        figures.summary({"checkpointing": {"every 9": None}})
