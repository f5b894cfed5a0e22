"""Plans: their bytes are the estimate's, and their seconds obey the laws of a roofline."""

import random
from dataclasses import replace

import pytest
from torch.utils.flop_counter import FlopCounterMode

from labcore.attention.traffic import GPUS
from labcore.memory import estimate, set_checkpointing
from labcore.memory.levers import CAUSES, CHUNK, Card, Levers, plan
from labcore.memory.model import CONFIG, batches, fresh
from labcore.models import Llama, next_token_loss
from tests.memory.steps import adapt, config, drawn

CARD = Card(gpu=GPUS["A100"], fp32=19.5e12, link=300e9, network=50e9, host=32e9, main=400e9)


def levers_of_chance(chance: random.Random) -> Levers:
    rank = chance.choice([0, 3])
    return Levers(
        dtype=chance.choice(["float32", "mixed", "bfloat16"]),
        optimizer=chance.choice(["adamw", "adamw8bit", "lion", "adafactor", "sm3"]),
        fused=chance.random() < 0.5,
        checkpointing=chance.choice([None, "selective", 1]),
        parts=chance.choice([1, 2, 4]),
        no_logits=chance.random() < 0.5,
        zero_stage=chance.randint(0, 3),
        offload=chance.random() < 0.5,
        rank=rank,
        bits=chance.choice([0, 4.5]) if rank else 0,
    )


def test_the_bytes_are_the_estimate_s_and_the_seconds_have_their_causes(seed: int) -> None:
    chance = random.Random(seed)
    for case in range(30):
        shape, levers = drawn(seed + case), levers_of_chance(chance)
        told = {"rows": 4, "length": chance.randint(1, 99), "devices": chance.choice([1, 3])}
        found = plan(shape, CARD, levers, **told)
        settings = {name: getattr(levers, name) for name in Levers.__slots__ if name != "no_logits"}
        assert found.held == estimate(
            shape, batch=4, length=told["length"], data_parallel=told["devices"], device="gpu",
            chunk=CHUNK if levers.no_logits else None, **settings,
        )  # fmt: skip
        assert tuple(found.seconds) == CAUSES
        assert found.step == pytest.approx(sum(found.seconds.values()))
        assert (found.seconds["collectives"] == 0) == (told["devices"] == 1)
        assert (found.seconds["PCIe"] == 0) == (not levers.offload)
        assert (found.seconds["recomputed"] == 0) == (levers.checkpointing is None)
        # A card twice as fast in everything needs half the time.
        gpu = replace(CARD.gpu, matmul=2 * CARD.gpu.matmul, bandwidth=2 * CARD.gpu.bandwidth)
        links = ("fp32", "link", "network", "host", "main")
        rates = {name: 2 * getattr(CARD, name) for name in links}
        faster = plan(shape, Card(gpu=gpu, **rates), levers, **told)
        assert faster.step == pytest.approx(found.step / 2)


def test_the_products_are_six_flops_a_weight_and_token() -> None:
    """And three for each of the attention's, per visible pair; 4 and 2 of 6 if all is frozen."""
    shape, rows, length = config("grouped"), 3, 50
    llama = Llama(shape)
    matrices = [p for n, p in llama.named_parameters() if p.dim() == 2 and "embed" not in n]
    pairs = length * (length + 1) // 2
    attention = 4 * rows * shape.num_hidden_layers * 4 * 12 * pairs  # heads of 12
    work = 6 * rows * length * sum(p.numel() for p in matrices) + 3.5 * attention
    told = {"rows": rows, "length": length, "share": 0.25}
    found = plan(shape, CARD, Levers(dtype="bfloat16"), **told)
    assert found.seconds["products"] == pytest.approx(work / (0.25 * 312e12))
    layers = sum(p.numel() for p in llama.layers.parameters() if p.dim() == 2)
    again = plan(shape, CARD, Levers(dtype="bfloat16", checkpointing=1), **told)
    assert again.seconds["products"] == found.seconds["products"]
    down = sum(layer.mlp.down_proj.weight.numel() for layer in llama.layers)
    once = (2 * rows * length * (layers - down) + attention) / (0.25 * 312e12)
    assert again.seconds["recomputed"] == pytest.approx(once)
    adapt(llama, 5)
    trained = sum(p.numel() for p in llama.parameters() if p.requires_grad)
    frozen = 4 * rows * length * sum(p.numel() for p in matrices) + 3.5 * attention
    less = plan(shape, CARD, Levers(dtype="bfloat16", rank=5), **told).seconds["products"]
    assert less == pytest.approx((frozen + 6 * rows * length * trained) / (0.25 * 312e12))


def test_what_a_step_moves_is_counted_by_hand() -> None:
    shape, told = config("biased"), {"rows": 4, "length": 9}
    weights = sum(p.numel() for p in Llama(shape).parameters())
    count = len(list(Llama(shape).parameters()))

    def seconds(cause: str, devices: int = 1, **levers: object) -> float:
        return plan(shape, CARD, Levers(**levers), **told, devices=devices).seconds[cause]

    bandwidth = CARD.gpu.bandwidth
    assert seconds("optimizer step") == pytest.approx(20 * 4 * weights / bandwidth)
    state = 8 * weights + 4 * count
    once = (12 * weights + 2 * state) / bandwidth
    assert seconds("optimizer step", fused=True) == pytest.approx(once)
    # Offloaded: gradients down, weights up, and the step in main memory, which 8 GPUs share.
    assert seconds("PCIe", offload=True) == pytest.approx(2 * 4 * weights / 32e9)
    assert seconds("PCIe", 4, offload=True, zero_stage=1) == pytest.approx(2 * weights / 32e9)
    assert seconds("PCIe", offload=True, parts=4) == pytest.approx(5 * 4 * weights / 32e9)
    on_cpu = (12 * weights + 2 * state) / 400e9
    for devices, stage, times in ((1, 0, 1), (4, 0, 4), (4, 1, 1), (16, 1, 1 / 2)):
        found = seconds("optimizer step", devices, offload=True, zero_stage=stage)
        assert found == pytest.approx(times * on_cpu)
    # Selective, per token and layer: two norms and a sum, 7 C; q and k turned; SwiGLU, 3 I.
    numbers = shape.num_hidden_layers * (
        7 * shape.hidden_size
        + 2 * (shape.num_attention_heads + shape.kv_heads) * shape.head_size
        + 3 * shape.intermediate_size
    )
    again = seconds("recomputed", checkpointing="selective")
    assert again == pytest.approx(4 * 9 * 4 * numbers / bandwidth)
    ring = 4 * weights * 3 / 4 / 300e9
    moved = {0: 2, 1: 2, 2: 2, 3: 3}  # the paper's: stage 3 moves half as much again
    for stage, times in moved.items():
        assert seconds("collectives", 4, zero_stage=stage) == pytest.approx(times * ring)
    assert seconds("collectives", 4, zero_stage=3, parts=2) == pytest.approx(6 * ring)
    assert seconds("collectives", 4, zero_stage=0, parts=2) == pytest.approx(2 * ring)
    network = 4 * weights * 8 / 9 / 50e9  # the ninth GPU is in another server
    assert seconds("collectives", 9) == pytest.approx(2 * network)


@pytest.mark.parametrize("every", [1, 2])
def test_recomputed_products_are_those_that_torch_runs_again(every: int, seed: int) -> None:
    """Counted by torch; it stops before the last product of each segment."""
    shape, rows, length = CONFIG, 2, 17
    counts = {}
    for how in (None, every):
        llama, draw = fresh(seed), batches(seed, batch=rows, length=length)
        set_checkpointing(llama, how)
        with FlopCounterMode(display=False) as counter:
            next_token_loss(llama, *draw(0))[0].backward()
        products = counter.get_flop_counts()["Global"]
        counts[how] = sum(n for op, n in products.items() if "attention" not in str(op))
    told = {"rows": rows, "length": length, "share": 1.0}
    found = plan(shape, CARD, Levers(dtype="bfloat16", checkpointing=every), **told)
    pairs = length * (length + 1) // 2
    heads, layers = shape.num_attention_heads, shape.num_hidden_layers
    attention = 4 * rows * layers * heads * shape.head_size * pairs
    again = found.seconds["recomputed"] * 312e12 - attention
    assert again == pytest.approx(counts[every] - counts[None])


def test_a_share_is_above_0() -> None:
    with pytest.raises(ValueError, match="share must be"):
        plan(config("tied"), CARD, Levers(), rows=1, length=1, share=0)
