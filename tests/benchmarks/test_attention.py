"""The cases run small: what is compared is the same, what is counted is what was allocated."""

import math

import pytest
import torch

from benchmarks import attention as cases
from benchmarks.attention import SMALL
from benchmarks.runner import cases_of
from labcore.attention import traffic
from labcore.attention.configs import FORWARD
from labcore.timing import Comparison, Timing
from tests.benchmarks.measurements import by_quantity


def test_every_direction_width_and_mask_has_a_case_for_a_gpu() -> None:
    every = {case.name: case.needs for case in cases_of("attention")}
    wanted = {
        f"{direction}/d{head_dim}-{mask}"
        for direction in ("forward", "backward")
        for head_dim in (64, 128)
        for mask in ("full", "causal")
    }
    decode = {f"decode/{name}" for name in cases.DECODE}
    assert wanted | decode | {"parity/attention", "parity/decode"} == {
        name for name, needs in every.items() if needs == "gpu"
    }
    assert sum(case.minutes for case in cases_of("attention") if case.needs != "gpu") <= 10


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_torch_form_races_against_torch(direction: str) -> None:
    found = by_quantity(cases.on_cpu(direction, SMALL))
    assert len(found) == 2 * 2 * 3
    for mask in ("full", "causal"):
        item = found[f"{direction}/{mask}, 128 tokens"]
        assert set(item.peers) == {"SDPA FLASH", "naive"} and len(item.samples) == 3
        assert item.details["form"] == "plain torch, tiled" and item.unit == "GFLOP/s"
        assert item.details["largest error"]["labcore"] < 1e-4
        # Rates and their ratio come from the same rounds.
        ratios = found[f"{direction} speed over SDPA FLASH/{mask}, 128 tokens"]
        pairs = zip(item.samples, item.peers["SDPA FLASH"], strict=True)
        assert ratios.samples == pytest.approx([ours / theirs for ours, theirs in pairs])
        assert "bar" not in ratios.details


@pytest.mark.parametrize(("direction", "products"), [("forward", 2), ("backward", 5)])
def test_a_rate_is_work_over_time(direction: str, products: int, monkeypatch) -> None:
    def in_a_millisecond(functions: dict, **_: object) -> Comparison:
        return Comparison(timings={name: Timing(samples=(1e-3,)) for name in functions})

    monkeypatch.setattr(cases, "paired", in_a_millisecond)
    found = by_quantity(cases.on_cpu(direction, SMALL))
    work = products * 2 * 2 * 128 * 128 * 64  # heads, tokens, tokens, D
    assert found[f"{direction}/full, 128 tokens"].samples == pytest.approx([work / 1e6])
    share = found[f"{direction} share of a GEMM's rate/full, 128 tokens"].samples
    assert share == pytest.approx([work / (2 * 64**3)])


def test_the_cases_for_a_gpu_take_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "default_device", lambda: torch.device("cpu"))
    found = by_quantity(cases.on_gpu("forward", 64, True)(SMALL))
    shapes = [found[f"forward/causal, {n} tokens"].details for n in (64, 128)]
    assert [s["batch, heads, tokens, D"] for s in shapes] == [[2, 2, 64, 64], [1, 2, 128, 64]]
    assert all(s["dtype"] == "bfloat16" for s in shapes)


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cases.flash_attention
    for factor in (1.1, math.nan):
        monkeypatch.setattr(cases, "flash_attention", lambda *x, f=factor, **y: f * right(*x, **y))
        with pytest.raises(RuntimeError, match="labcore's error must be .* got .*'labcore': "):
            cases.on_cpu("forward", SMALL)


def test_every_form_is_held_against_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "default_device", lambda: torch.device("cpu"))
    (item,) = cases.parity(SMALL)
    assert len(item.samples) == len(item.details["forms"]) == 22
    assert max(item.samples) <= 2
    right = cases.flash_attention

    def wrong(*inputs: torch.Tensor, **given: object) -> torch.Tensor:
        return right(*inputs, **given) * (1.05 if "window" in given else 1.0)

    monkeypatch.setattr(cases, "flash_attention", wrong)
    with pytest.raises(RuntimeError, match=r"at most twice .* got its multiples \{'window, D 64"):
        cases.parity(SMALL)


def test_what_cannot_run_is_named() -> None:
    def broken() -> None:
        raise RuntimeError("no such backend\nmore")

    able, left_out = cases.that_run({"labcore": lambda: 1, "other": broken})
    assert set(able) == {"labcore"} and left_out == {"other": "no such backend"}
    with pytest.raises(RuntimeError, match="no such backend"):
        cases.that_run({"labcore": broken})


def test_memory_is_counted_beside_its_prediction() -> None:
    found = by_quantity(cases.memory(SMALL))
    assert len(found) == 3 * 2
    for name, item in found.items():
        quantity = name.split("/")[0]
        naive, ours = item.peers["naive"][0], item.samples[0]
        for form, size in item.details["predicted"].items():
            measured = {"naive": naive, "flash": ours}[form]
            if form == "naive" or quantity == "kept":
                assert measured == pytest.approx(size, rel=0.05), name
            else:  # the tiles come on top
                assert measured >= size
        assert set(item.peers) == {"SDPA FLASH", "naive"}
    longer, shorter = (found[f"kept/{n} tokens"].samples[0] for n in (128, 64))
    assert longer == 2 * shorter


def test_allocations_are_counted_while_they_live() -> None:
    def call() -> torch.Tensor:
        large = torch.empty(10_000)
        return torch.zeros_like(large[:1000])

    peak, left = cases.allocations(call, torch.device("cpu"))
    assert peak == pytest.approx(44_000, rel=0.02) and left == pytest.approx(4000, rel=0.02)


def test_decode_is_held_against_a_copy_of_as_many_bytes() -> None:
    found = by_quantity(cases.cpu_decode(SMALL))
    step, share = found["decode step"], found["share of copy bandwidth"]
    speed = found["speed over SDPA, whole rows"].samples
    pairs = zip(step.peers["SDPA, whole rows"], step.samples, strict=True)
    assert speed == pytest.approx([theirs / ours for theirs, ours in pairs])
    assert set(step.peers) == {"SDPA, whole rows", "copy"}
    shape = traffic.Shape(
        batch=2, heads=4, kv_heads=2, length=1, key_length=64, head_dim=16, dtype_bytes=4
    )
    copied = 2 * 2 * 64 * 2 * 16 * 4  # the keys, read and written
    for ours, copy, found_share in zip(
        step.samples, step.peers["copy"], share.samples, strict=True
    ):
        rate = traffic.decode_bytes(shape) / ours
        assert found_share == pytest.approx(rate / (copied / copy))


def test_ratios_and_exponents_are_those_of_the_counted_bytes() -> None:
    counted, found = by_quantity(cases.memory(SMALL)), by_quantity(cases.memory_ratios(SMALL))
    assert all(item.details["exact"] and len(item.samples) == 1 for item in found.values())
    for kind in ("kept", "training peak"):
        item = counted[f"{kind}/128 tokens"]
        ratio = found[f"{kind}, naive over labcore/128 tokens"].samples[0]
        assert ratio == pytest.approx(item.peers["naive"][0] / item.samples[0])
    exponents = [found[f"kept, exponent/{name}"].samples[0] for name in ("labcore", "naive")]
    assert exponents[0] == pytest.approx(1, abs=0.01) and 1.4 < exponents[1] <= 2
    assert len(found) == 3 * (2 + 3)


def test_the_laws_follow_from_counting() -> None:
    found = by_quantity(cases.law_bytes())
    for head_dim, kinds in FORWARD.items():
        for kind, gpu in (("hopper", "H100"), ("ampere", "A100")):
            requested, moved = (
                found[f"bytes {what}, naive over flash/D {head_dim}, {gpu}"].samples[0]
                for what in ("requested", "from HBM")
            )
            # Beside the elements of rows: T^2 for the scores, twice for the softmax, and once for
            # each tile of columns of the result; three operands are read T / 128 times. The tiled
            # form reads keys and values T / M times.
            naive = 3 + math.ceil(head_dim / 128) + 3 * head_dim / 128
            assert requested == pytest.approx(naive * kinds[kind].m / (2 * head_dim), rel=0.07)
            shape = traffic.Shape(batch=1, heads=16, length=4096, head_dim=head_dim)
            once = traffic.naive_bytes(shape) / traffic.compulsory_bytes(shape)
            assert moved == pytest.approx(once, rel=0.03)
    assert found["backward products, flash over naive/two kernels"].samples == [7 / 4]
    assert found["backward products, flash over naive/fused"].samples == [5 / 4]


def test_the_longest_length_fits_and_twice_it_does_not() -> None:
    for item in cases.law_longest():
        gpu = traffic.GPUS[item.quantity.split("/")[1]]
        for form, length in item.details["tokens"].items():
            for tokens, fits in ((length, True), (2 * length, False)):
                shape = traffic.Shape(batch=1, heads=32, length=tokens, head_dim=128)
                held = 3 * shape.query_bytes + traffic.kept_bytes(shape, form)
                assert (held <= gpu.memory) == fits


def test_race_against_naive_has_one_sample_per_repetition() -> None:
    found = by_quantity(cases.cpu_against_naive(SMALL))
    assert set(found) == {
        f"{direction} time, labcore over naive/{length} tokens"
        for direction in ("forward", "backward")
        for length in (64, 128)
    }
    assert all(len(item.samples) == 3 and min(item.samples) > 0 for item in found.values())


def test_the_table_of_the_compile_gate_becomes_a_record() -> None:
    (item,) = cases.compiled_resources()
    kernels = item.details["kernels"]
    assert item.mode == "compiled" and all(name.startswith(cases.KERNELS) for name in kernels)
    assert {name.split("/")[0] for name in kernels} >= {"forward_kernel", "dkdv_kernel"}
    assert list(item.details["limits"]) == list(kernels["forward_kernel/bfloat16-d64"])
    need = {"sm_80": {"spills": 0}}
    shown, spills = "forward_kernel/bfloat16-d64", {"sm_80": {"spills": 8}}
    rows = {shown: need, "dq_kernel/b": spills, "lion_kernel/c": spills}
    item = cases.of_table({"triton": "3", "kernels": rows})
    assert item.samples == [1] and item.details["programs"] == 2
    assert item.details["kernels"] == {shown: need}
    with pytest.raises(RuntimeError, match="must have rows for the attention kernels, got none"):
        cases.of_table({"triton": "3", "kernels": {}})


def test_the_compiled_cases_take_the_loops_own_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(grid: dict) -> dict:
        assert {name: len(one) for name, one in grid.items()} == dict.fromkeys(cases.GRID, 1)
        need = {"registers": 99, "spills": 0, "shared": 170_000, "unit": "mma"}
        return {"sm_80 a": {**need, "spills": 8}, "sm_80 b": need, "sm_90 c": need}

    monkeypatch.setattr(cases, "measure_tiles", compiled)
    (item,) = cases.compiled_tiles(SMALL)
    assert item.samples == [1] and set(item.details["limits"]) == {"sm_80"}

    rows = {"matrix": [[0.5, 0.0], [0.25, 0.25]], "softmax": [[0.0, 1.0]] * 2}
    told = {"clocks": {"ahead": 100, "turns": 120}, "ahead": rows, "turns": rows}
    monkeypatch.setattr(cases, "measure_timeline", lambda head_dim: told)
    found = by_quantity(cases.compiled_timeline())
    assert found["tensor cores at work/D 128, turns"].samples == [0.5]
    assert found["tensor cores at work/D 64, ahead"].details["clocks"] == 100
