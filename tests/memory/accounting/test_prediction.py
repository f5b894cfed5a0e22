"""What is predicted against what the meter counts, and against the numbers that papers print."""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from labcore.memory import Breakdown, Meter, Stage, divide, estimate, set_checkpointing
from labcore.memory.accounting.prediction import DTYPES, MOMENTS, film
from labcore.memory.accounting.shapes import parameter_shapes
from labcore.memory.accounting.states import deepspeed_host, gpt_layer, model_states
from labcore.memory.model import CONFIG
from labcore.models import Llama, LlamaConfig
from tests.memory.steps import (
    AWKWARD,
    OPTIMIZERS,
    config,
    drawn,
    measured,
    model,
    train_step,
)

LLAMA_7B = LlamaConfig(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
)
GB, GIB = 10**9, 2**30
NEW_FSDP = Version(torch.__version__) >= Version("2.14")


@pytest.mark.parametrize("name", AWKWARD)
def test_shapes_are_those_of_the_model(name: str) -> None:
    llama = Llama(config(name), device="meta")
    shapes = {key: tuple(p.shape) for key, p in llama.named_parameters()}
    assert parameter_shapes(config(name)) == shapes


def agrees(shape: LlamaConfig, *, batch: int, length: int, **settings: object) -> None:
    """The peak and each phase within 5 % of the meter; weights, gradients and state exactly."""
    meter = measured(shape, batch=batch, length=length, **settings)
    found = {**meter.phases, "peak": meter.peak}
    moments = [*MOMENTS, "peak"]
    if NEW_FSDP and settings.get("zero_stage") == 3 and settings["checkpointing"]:
        # Seen on 2.15: it gives the last layer's weights back before the backward, which the
        # estimate does not.
        moments.remove("forward")
    for moment in moments:
        guess = estimate(shape, batch=batch, length=length, moment=moment, **settings)
        assert guess.total == pytest.approx(found[moment].total, rel=0.05), (moment, settings)
    step = estimate(shape, batch=batch, length=length, moment="step", **settings)
    rel = 0.05 if settings.get("zero_stage") else 0  # a rank has whole rows
    for part in ("parameters", "gradients", "optimizer"):
        assert getattr(step, part) == pytest.approx(getattr(meter.most, part), rel=rel), part


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("grouped", "float32"),
        ("grouped", "mixed"),
        ("tied", "bfloat16"),
        ("tied", "float32"),
        ("biased", "float16"),
        ("biased", "mixed"),
    ],
)
def test_it_agrees_with_the_meter(name: str, dtype: str) -> None:
    agrees(config(name), batch=3, length=41, dtype=dtype)


@pytest.mark.parametrize("batch, length", [(1, 1), (5, 9), (1, 130)])
def test_it_agrees_for_other_batches_and_lengths(batch: int, length: int) -> None:
    agrees(config("grouped"), batch=batch, length=length, dtype="bfloat16")


@pytest.mark.parametrize(
    "name, dtype", [("tied", "float32"), ("biased", "bfloat16"), ("grouped", "mixed")]
)
@pytest.mark.parametrize("checkpointing", [1, 2, "selective"])
def test_it_agrees_with_what_is_recomputed(checkpointing, name: str, dtype: str) -> None:
    agrees(config(name), batch=3, length=40, dtype=dtype, checkpointing=checkpointing)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_agrees_for_every_optimizer(optimizer: str, dtype: str) -> None:
    agrees(config("biased"), batch=1, length=16, dtype=dtype, optimizer=optimizer)


def settings_of_chance(chance: random.Random, layers: int) -> dict[str, object]:
    """Settings that nobody chose."""
    return {
        "batch": chance.randint(1, 9),
        "length": chance.choice([1, 3, 17, 64, 300, 2000]),
        "dtype": chance.choice(DTYPES),
        "optimizer": chance.choice(list(OPTIMIZERS)),
        "checkpointing": chance.choice([None, 1, 2, 3, 4, "selective"]),
        "zero_stage": chance.randint(0, 3),
        "data_parallel": chance.choice([1, 2, 5]),
        "tensor_parallel": chance.choice([1, 2]),
        "pipeline_parallel": chance.choice([1, min(2, layers)]),
        "device": chance.choice(["cpu", "gpu"]),
        "chunk": chance.choice([None, 16]),
        "fused": chance.random() < 0.5,
        "offload": chance.random() < 0.5,
    }


def test_a_film_s_highest_scene_is_the_estimate(seed: int) -> None:
    chance = random.Random(seed)
    for case in range(100):
        layers = chance.randint(1, 9)
        shape = replace(drawn(seed + case), num_hidden_layers=layers)
        settings = settings_of_chance(chance, layers)
        if settings["tensor_parallel"] == settings["pipeline_parallel"] == 1:
            settings["rank"] = chance.choice([0, 2])
        settings["parts"] = chance.randint(1, settings["batch"])
        scenes = film(shape, **settings)
        peak = max((scene.held for scene in scenes), key=lambda held: held.total)
        assert peak == estimate(shape, **settings), settings
        order = [scene.moment for scene in scenes]
        assert list(dict.fromkeys(order)) == [*MOMENTS, "end"] and order.count("end") == 1
        if settings["pipeline_parallel"] == 1:
            passed = [scene.layer for scene in scenes if scene.moment == "forward" and scene.layer]
            assert passed == list(range(1, layers + 1))
            for moment in MOMENTS:
                highest = max(s.held.total for s in scenes if s.moment == moment)
                assert highest == estimate(shape, moment=moment, **settings).total


def by_layer(places: Iterator[tuple[str, int, Breakdown]], shape: LlamaConfig, width: int):
    """Highest total of the last step by moment and layers begun (or, in a backward, finished)."""
    unit = sum(math.prod(s) for k, s in parameter_shapes(shape).items() if "layers.0." in k)
    outer = (shape.vocab_size + 1) * shape.hidden_size
    found: dict[tuple[str, int], int] = {}
    for moment, layer, held in places:
        if moment == "backward":  # by gradients: what is recomputed runs outside of modules
            layer = (held.gradients // width - outer) // unit
        if moment in ("forward", "backward"):
            key = moment, layer
            found[key] = max(found.get(key, 0), held.total)
    return found


@pytest.mark.parametrize(
    "name, dtype, checkpointing",
    [
        ("grouped", "float32", None),
        ("grouped", "bfloat16", None),
        ("biased", "mixed", None),
        ("biased", "float32", "selective"),
        ("grouped", "bfloat16", 1),
        ("biased", "float32", 2),
    ],
)
def test_a_film_shows_what_the_meter_saw_layer_by_layer(name, dtype, checkpointing) -> None:
    shape, told = config(name), {"dtype": dtype, "checkpointing": checkpointing}
    meter = measured(shape, batch=3, length=40, **told)
    begins = [
        at
        for at, (before, now) in enumerate(pairwise(meter.timeline), 1)
        if now.phase == "forward" != before.phase
    ]
    seen = []
    for moment in meter.timeline[begins[-1] :]:
        path = moment.module.split(".")
        layer = int(path[1]) + 1 if path[0] == "layers" else 0
        seen.append((moment.phase, layer, moment.held))
    scenes = film(shape, batch=3, length=40, **told)
    width = 2 if dtype == "bfloat16" else 4
    saw = by_layer(iter(seen), shape, width)
    said = by_layer(((s.moment, s.layer, s.held) for s in scenes), shape, width)
    if checkpointing == 2:  # the meter sees a segment as one module
        saw.pop(("forward", 2)), said.pop(("forward", 2)), said.pop(("forward", 3))
    assert len(said) >= 7
    for key, total in said.items():
        assert total == pytest.approx(saw[key], rel=0.05), key


def test_it_agrees_on_shapes_that_nobody_chose(seed: int) -> None:
    chance = random.Random(seed)
    for case in range(2):
        agrees(
            drawn(seed + case),
            batch=chance.randint(1, 4),
            length=chance.randint(2, 60),
            dtype=chance.choice(["float32", "bfloat16", "mixed"]),
            checkpointing=chance.choice([None, None, 1, 2, "selective"]),
        )


@pytest.mark.parametrize("dtype", ["float32", "mixed"])
def test_what_the_loss_finds_kept_is_predicted_to_the_byte(dtype: str) -> None:
    # A large head, so that the loss is where a forward and a backward hold most.
    meter = measured(config("biased"), batch=2, length=33, dtype=dtype)
    for moment in ("forward", "backward"):
        guess = estimate(config("biased"), batch=2, length=33, dtype=dtype, moment=moment)
        # Scalars: the loss, its weight, a gradient of one.
        assert abs(guess.activations - meter.phases[moment].activations) <= 64


def test_bytes_grow_by_the_row_and_shrink_by_recomputation() -> None:
    def kept(**settings: object) -> int:
        given = {"batch": 4, "length": 128, "dtype": "bfloat16", "moment": "forward"}
        return estimate(CONFIG, **{**given, **settings}).activations

    assert kept(batch=3) - kept(batch=2) == kept(batch=2) - kept(batch=1)
    assert kept() > kept(checkpointing="selective") > kept(checkpointing=1)
    assert kept(checkpointing=1) > kept(checkpointing=2) > kept(checkpointing=4)
    assert kept(dtype="float32") > kept(dtype="mixed") > kept()


def test_zero_divides_what_each_stage_names() -> None:
    def part(stage: int, devices: int) -> Breakdown:
        told = {"batch": 1, "length": 32, "moment": "step"}
        return estimate(CONFIG, **told, zero_stage=stage, data_parallel=devices)

    alone = part(0, 8)
    assert part(1, 8).optimizer == pytest.approx(alone.optimizer / 8)
    assert (part(1, 8).gradients, part(1, 8).parameters) == (alone.gradients, alone.parameters)
    for stage in (2, 3):  # FSDP2 rests on shards in both
        assert part(stage, 8).gradients == pytest.approx(alone.gradients / 8)
        assert part(stage, 8).parameters == pytest.approx(alone.parameters / 8)
        assert part(stage, 8).workspace == pytest.approx(alone.workspace / 8)


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    """As many ranks of which only the first is there: bytes do not ask what a collective brings."""
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 5], indirect=True)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("name", "checkpointing"), [("grouped", None), ("biased", 1)])
def test_it_agrees_with_what_fsdp_holds(stage, ranks, name, checkpointing) -> None:
    agrees(
        config(name),
        batch=2,
        length=33,
        checkpointing=checkpointing,
        zero_stage=stage,
        data_parallel=ranks,
    )


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_checkpointed_layers_are_divided_one_by_one(ranks: int) -> None:
    llama = model(config("grouped"), "float32")
    set_checkpointing(llama, 1)
    _, optimizer = divide(llama, 3, torch.optim.AdamW)
    assert all(isinstance(layer, FSDPModule) for layer in llama.layers.children())
    with Meter(llama, optimizer) as meter:
        for _ in range(2):
            train_step(llama, optimizer, torch.randint(96, (2, 34)))
    told = {"batch": 2, "length": 33, "checkpointing": 1, "zero_stage": 3, "data_parallel": ranks}
    guess = estimate(config("grouped"), **told)
    assert meter.peak.total == pytest.approx(guess.total, rel=0.05)


def test_data_parallel_keeps_room_for_all_gradients() -> None:
    """That is DistributedDataParallel's, in a group of one rank too."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        meter = measured(config("biased"), batch=1, length=9, data_parallel=2)
    finally:
        dist.destroy_process_group()
    told = {"batch": 1, "length": 9, "data_parallel": 2}
    for moment in MOMENTS:
        guess = estimate(config("biased"), **told, moment=moment)
        assert guess.total == pytest.approx(meter.phases[moment].total, rel=0.05)
        if moment != "backward":  # there each stands twice until it is in its bucket
            assert guess.gradients == meter.phases[moment].gradients


def test_a_gpu_spares_a_copy_and_steps_on_all_weights_at_once() -> None:
    told = {"batch": 3, "length": 50, "dtype": "bfloat16", "optimizer": "adamw"}
    shape = config("grouped")
    cpu, gpu = (estimate(shape, **told, moment="forward", device=d) for d in ("cpu", "gpu"))
    copies = shape.num_hidden_layers * 150 * shape.num_attention_heads * shape.head_size * 2
    assert cpu.activations - gpu.activations == copies
    for stage, ranks in ((0, 1), (1, 4), (3, 4)):
        step = estimate(
            shape, **told, moment="step", device="gpu", zero_stage=stage, data_parallel=ranks
        )
        assert step.workspace == pytest.approx(cpu.parameters / ranks)
    counted = estimate(
        shape, **told, moment="step", device="gpu", zero_stage=3, data_parallel=4, convention="16"
    )
    assert counted.workspace == pytest.approx(step.workspace)


def test_tensor_parallel_splits_products_and_pipeline_the_layers() -> None:
    told = {"batch": 2, "length": 64, "dtype": "bfloat16", "moment": "forward"}
    alone = estimate(CONFIG, **told)
    halves = estimate(CONFIG, **told, tensor_parallel=2)
    norms = 9 * CONFIG.hidden_size * 2
    assert halves.parameters == (alone.parameters - norms) // 2 + norms
    assert alone.activations / 2 < halves.activations < alone.activations
    # What every device has of its own does not shrink, the rest is divided: a line in 1 / t.
    shape = replace(CONFIG, vocab_size=6000)
    one, two, six = (estimate(shape, **told, tensor_parallel=t).activations for t in (1, 2, 6))
    assert 5 * (one - two) == 3 * (one - six)
    stages = estimate(CONFIG, **told, pipeline_parallel=2)
    # The first of two stages keeps two micro-batches of half the layers, and gradients stand.
    assert stages.gradients == stages.parameters == stage_bytes(CONFIG, 0, 2) // 2
    short = estimate(replace(CONFIG, num_hidden_layers=2), **told)
    inputs = 2 * 65 * 8 + 2 * 64 * CONFIG.head_size * 2  # tokens and the rotation
    assert stages.activations == 2 * (alone.activations - short.activations + inputs)


def stage_bytes(shape: LlamaConfig, stage: int, stages: int) -> int:
    """Of its parameters in float32."""
    part = Stage(Llama(shape, device="meta"), stage, stages)
    return sum(p.nbytes for p in part.parameters())


def test_earlier_stages_have_the_layers_that_are_too_many() -> None:
    """The loss makes the last stage the fullest in the backward; the first has most weights."""
    shape = replace(config("biased"), vocab_size=6000)
    told = {"batch": 2, "length": 33, "pipeline_parallel": 2}
    last = estimate(shape, **told, moment="backward")
    assert last.parameters == last.gradients == stage_bytes(shape, 1, 2)
    assert last.optimizer == pytest.approx(2 * last.parameters, rel=1e-3)
    first = estimate(shape, **told, moment="step")
    assert first.parameters == stage_bytes(shape, 0, 2) > last.parameters


@pytest.mark.parametrize(("stage", "printed"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_the_sixteen_bytes_give_the_numbers_of_the_zero_paper(stage: int, printed: float) -> None:
    told = model_states(7.5e9, zero_stage=stage, data_parallel=64)
    assert told.total / GB == pytest.approx(printed, rel=0.003)  # three digits are printed


@pytest.mark.parametrize(("stage", "printed"), [(2, 15.93), (3, 6.09)])
def test_the_eighteen_bytes_give_the_numbers_of_deepspeed(stage: int, printed: float) -> None:
    told = model_states(
        2851e6, convention="18", zero_stage=stage, data_parallel=8, largest_layer=32e6
    )
    assert told.total / GIB == pytest.approx(printed, abs=0.01)
    assert model_states(1e9, convention="18").total == 18 * GB


@pytest.mark.parametrize(
    ("stage", "offload", "largest", "printed"),
    [
        (2, "none", None, 127.45),
        (2, "optimizer", None, 127.45),
        (3, "all", 32e6, 71.69),
        (3, "all", None, 127.45),
        (3, "optimizer", 32e6, 63.72),
        (3, "none", 32e6, 1.43),
        (3, "none", None, 127.45),
    ],
)
def test_the_host_needs_what_deepspeed_prints(stage, offload, largest, printed) -> None:
    told = deepspeed_host(
        2851e6, zero_stage=stage, devices=8, offload=offload, largest_layer=largest
    )
    assert told / GIB == pytest.approx(printed, abs=0.01)


def test_the_host_shares_over_nodes_as_deepspeed_does() -> None:
    """By the source of its estimators: stage 2 offloaded takes the processes of all nodes."""
    told = {"devices": 8, "nodes": 2}
    assert deepspeed_host(1e9, zero_stage=2, offload="optimizer", **told) == 96 * GB
    assert deepspeed_host(1e9, zero_stage=2, **told) == 48 * GB
    assert deepspeed_host(1e9, zero_stage=3, offload="all", **told) == 48 * GB
    shared = deepspeed_host(1e9, zero_stage=3, offload="all", largest_layer=1e6, **told)
    assert shared == 13.5 * GB
    with pytest.raises(ValueError, match="nodes must be at least 1"):
        deepspeed_host(1e9, zero_stage=2, devices=8, nodes=0)
    with pytest.raises(ValueError, match="largest_layer must be a finite number above 0"):
        deepspeed_host(1e9, zero_stage=3, devices=8, largest_layer=-1)
    with pytest.raises(ValueError, match="largest_layer must be a finite number, at least 0"):
        model_states(1e9, convention="18", zero_stage=3, largest_layer=-1)


@pytest.mark.parametrize(("hidden", "heads", "scores"), [(12288, 96, 80), (20480, 128, 64)])
def test_gpt_keeps_what_korthikanti_and_others_count(hidden: int, heads: int, scores: int) -> None:
    def bytes_a_unit(**settings: object) -> float:
        told = gpt_layer(batch=1, length=2048, hidden=hidden, heads=heads, **settings)
        return told / (2048 * hidden)

    assert bytes_a_unit() == pytest.approx(34 + scores)
    assert bytes_a_unit(selective=True) == pytest.approx(34)
    assert bytes_a_unit(tensor_parallel=8) == pytest.approx(10 + (24 + scores) / 8)
    shared = bytes_a_unit(tensor_parallel=8, sequence_parallel=True)
    assert shared == pytest.approx((34 + scores) / 8)


@pytest.mark.parametrize("convention, bytes_a_parameter", [("16", 16), ("18", 18)])
def test_a_convention_replaces_weights_gradients_and_state(convention, bytes_a_parameter) -> None:
    told = {"batch": 1, "length": 4096, "dtype": "bfloat16"}
    exact = estimate(LLAMA_7B, **told, moment="backward")
    counted = estimate(LLAMA_7B, **told, convention=convention, moment="backward")
    states = counted.parameters + counted.gradients + counted.optimizer
    assert states == bytes_a_parameter * 6_738_415_616
    assert counted.activations == exact.activations


def test_a_7b_in_16_bits_passes_80_gb_without_recomputation() -> None:
    told = {"length": 4096, "dtype": "bfloat16", "device": "gpu"}
    states = 2 * 6_738_415_616
    step = estimate(LLAMA_7B, batch=1, **told, moment="step")
    assert (step.parameters, step.gradients) == (states, states)
    assert step.optimizer == pytest.approx(2 * states, rel=1e-6)
    totals = {
        every: estimate(LLAMA_7B, batch=2, **told, checkpointing=every).total for every in (None, 1)
    }
    assert totals[None] > 80 * GB > totals[1] > 5 * states
    lean = estimate(LLAMA_7B, batch=1, **told, checkpointing=1, optimizer="adafactor")
    assert 2 * states < lean.total < 3.2 * states
    divided = estimate(LLAMA_7B, batch=1, **told, checkpointing=1, zero_stage=3, data_parallel=64)
    assert divided.total < 0.4 * states  # no whole copy of anything


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"dtype": "fp32"}, "dtype must be one of"),
        ({"optimizer": "adam"}, "did you mean 'adamw'"),
        ({"checkpointing": 0}, "checkpointing must be at least 1"),
        ({"checkpointing": "all"}, "checkpointing must be a whole number"),
        ({"zero_stage": 4}, "zero_stage must be one of"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"pipeline_parallel": 5}, "at most the number of layers, 4"),
        ({"convention": "16"}, "pass dtype='bfloat16'"),
        ({"convention": "17"}, "convention must be one of"),
        ({"moment": "end"}, "moment must be one of"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict, sentence: str) -> None:
    with pytest.raises((ValueError, TypeError), match=sentence):
        estimate(CONFIG, **{"batch": 1, "length": 8, **settings})


def test_offload_of_weights_needs_stage_3() -> None:
    with pytest.raises(ValueError, match="offload must be one of 'none', 'optimizer'"):
        deepspeed_host(1e9, zero_stage=2, devices=8, offload="all")
