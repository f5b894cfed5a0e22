"""The exercises on memory, by other ways to the same numbers, their clinic and their notebook."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from labcore import memory
from labcore.exercises import Exercise
from labcore.exercises.topics.memory import (
    BALANCE,
    CLINIC,
    HELD_BYTES,
    LOSS_FACTORS,
    PACKED_GROUPS,
    STRETCHES,
    last_words,
)
from labcore.exercises.topics.memory.card import CONTEXT, GIB, MIB, TOTAL, Allocator, Card
from labcore.exercises.topics.memory.clinic import LENGTHS, LINES, MODEL, RANKS, ROWS, Job
from labcore.exercises.topics.memory.stretches import divisions, peak
from labcore.memory import experts
from labcore.memory.checkpointing import stretch_bytes
from tests.exercises.draws import check_variants
from tests.exercises.notebook import check_changed_rule, solved, source

FUNCTIONS = (LOSS_FACTORS, STRETCHES, HELD_BYTES, PACKED_GROUPS, BALANCE)
OWN = (HELD_BYTES, BALANCE)


def test_students_have_their_own_numbers(seed: int) -> None:
    for exercise, kinds in zip(OWN, (4, 2), strict=True):
        check_variants(exercise, kinds, seed)


# Parts that add up -------------------------------------------------------------------------------


def cross_entropies(weight: Tensor, labels: Tensor) -> Tensor:
    """Of each predicted token of [B, T], by a model that sees the token before it: [N]."""
    logits = weight[labels[:, :-1].clamp(min=0)].flatten(0, 1)
    every = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="none")
    return every[labels[:, 1:].flatten() != -100]


def test_the_factors_make_the_gradient_of_the_whole_batch(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for case in LOSS_FACTORS.numbered_cases(seed)[:-1]:
        weight = torch.randn(6, 6, generator=generator, dtype=torch.float64).requires_grad_()
        parts = [part for device in case["labels"] for part in device]
        every = torch.cat([cross_entropies(weight, part) for part in parts])
        (right,) = torch.autograd.grad(every.mean(), weight)
        devices = []
        for labels, factors in zip(case["labels"], LOSS_FACTORS.reference(**case), strict=True):
            total = torch.zeros_like(weight)
            for part, factor in zip(labels, factors, strict=True):
                found = cross_entropies(weight, part)
                assert (factor is None) == (found.numel() == 0)
                if factor is not None:
                    total += torch.autograd.grad(factor * found.mean(), weight)[0]
            devices.append(total)
        assert_close(torch.stack(devices).mean(0), right)


def test_the_text_s_example_of_parts() -> None:
    def predicting(count: int) -> Tensor:
        return torch.tensor([[4] * (count + 1) + [-100] * 3])

    labels = [[predicting(2), predicting(6)], [predicting(4), predicting(0)]]
    found = LOSS_FACTORS.reference(labels, None)
    assert_close(found, [[1 / 3, 1.0], [2 / 3, None]])
    assert "[[1/3, 1], [2/3, None]]" in source("memory").read_text("utf-8")


# Stretches ---------------------------------------------------------------------------------------


def test_best_stretches_are_no_worse_than_the_best_equal_ones(seed: int) -> None:
    chance = random.Random(seed)
    for layers in (1, 5, 8):
        boundary = chance.randint(1, 50)
        layer = boundary + chance.randint(0, 90)
        inputs, kept = [boundary] * layers, [layer - boundary] * layers
        equal = []
        for every in range(1, layers + 1):
            lengths = [every] * (layers // every) + [layers % every] * (layers % every > 0)
            equal.append(peak(inputs, kept, lengths))
            assert equal[-1] == stretch_bytes(layers, every, layer=layer, boundary=boundary)
        best = STRETCHES.reference(inputs, kept, None)
        assert peak(inputs, kept, best) <= min(equal)


def test_the_notebook_s_answers_are_the_best_there_are(seed: int) -> None:
    names = solved("memory")
    for case in STRETCHES.numbered_cases(seed):
        for most in (None, 1, 2, 3):
            inputs, kept = case["inputs"], case["kept"]
            best = min(
                peak(inputs, kept, lengths)
                for lengths in divisions(len(inputs))
                if most is None or len(lengths) <= most
            )
            for function in ("best_stretches", "cheapest"):
                lengths = names[function](inputs, kept, most)
                assert peak(inputs, kept, lengths) == best
                assert sum(lengths) == len(inputs)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "may lack its `return`"),
        ([2.0, 1.0], "a list of whole numbers"),
        (torch.tensor([1]), "a list of whole numbers"),
        ([1, 1], "add up to the 5 layers"),
        ([6, -1], "must be above 0"),
        ([0, 5], "must be above 0"),
        (80, "a list of whole numbers"),
    ],
)
def test_an_answer_that_is_no_division_is_told_so(answer: Any, words: str, seed: int) -> None:
    cases = STRETCHES.numbered_cases(seed)
    outcome = STRETCHES.judge([answer] * len(cases), seed=seed)
    assert outcome.kind == "wrong" and words in outcome.message


def test_the_text_s_example_of_stretches() -> None:
    inputs, kept = [10] * 4, [10, 10, 20, 60]
    assert STRETCHES.reference(inputs, kept, None) == [3, 1]
    peaks = [peak(inputs, kept, lengths) for lengths in ([3, 1], [4], [1] * 4)]
    assert peaks == [80, 140, 100]


# Shares ------------------------------------------------------------------------------------------


def test_the_shares_are_torch_s_chunks_and_add_up(seed: int) -> None:
    devices = random.Random(seed).randint(1, 9)
    for case in HELD_BYTES.numbered_cases(seed)[:3]:
        parameters = [torch.empty(shape, device="meta") for shape in case["shapes"]]
        total = sum(parameter.numel() for parameter in parameters)
        chunks = [parameter.chunk(devices) for parameter in parameters]
        held = []
        for device in range(devices):
            mine = sum(parts[device].numel() for parts in chunks if device < len(parts))
            place = {"shapes": case["shapes"], "device": device, "devices": devices}
            for stage, counts in enumerate(
                ((total, total, total), (total, total, mine), (total, mine, mine), (mine,) * 3)
            ):
                right = tuple(n * size for n, size in zip(counts, (2, 4, 12), strict=True))
                assert HELD_BYTES.reference(**place, stage=stage, factored=False) == right
            held.append(mine)
        assert sum(held) == total and held[0] == max(held)


def test_the_text_s_example_of_shares() -> None:
    case = {"shapes": [[5, 3], [2]], "stage": 2, "device": 1, "devices": 4}
    assert HELD_BYTES.reference(**case, factored=False) == (34, 28, 84)
    assert solved("memory")["held_bytes"](**case, factored=True) == (34, 28, 52)
    text = source("memory").read_text("utf-8")
    assert "(34, 28, 84)" in text and "the state is then 52 bytes" in text


# Few bits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_and_scales_give_the_weight_back(bits: int, generator: torch.Generator) -> None:
    group, half = 8, 2 ** (bits - 1)
    weight = torch.randn(5, 4 * group, generator=generator)
    packed, scales = solved("memory")["packed_groups"](weight, group=group, bits=bits)
    runs = [packed.int() >> (place * bits) & (2 * half - 1) for place in range(8 // bits)]
    codes = torch.cat(runs, -1)
    if bits == 4:
        reference = PACKED_GROUPS.reference(weight, group=group, bits=4)
        assert torch.equal(packed, reference[0]) and torch.equal(scales, reference[1])
    steps = scales.float().unsqueeze(-1)
    back = (codes - half) * steps
    blocks = weight.unflatten(1, (-1, group))
    largest = blocks.abs().argmax(-1, keepdim=True)
    assert not codes.gather(-1, largest).any()
    # Half a step; a whole one where there is no code; and the rounding of the scale.
    allowed = torch.where(codes == 2 * half - 1, 1.0, 0.5) * steps.abs()
    assert ((back - blocks).abs() <= allowed + half * steps.abs() * 2**-10).all()


def test_the_text_s_example_of_groups() -> None:
    packed, scales = PACKED_GROUPS.reference(torch.tensor([[0.5, -4, 1, 3.2]]), group=4, bits=4)
    assert packed.flatten().tolist() == [169, 224] and scales.item() == 0.5


def test_no_quotient_lies_near_the_middle(seed: int) -> None:
    for case in PACKED_GROUPS.numbered_cases(seed):
        _, scales = PACKED_GROUPS.reference(**case)
        exact = case["weight"].unflatten(1, (-1, case["group"])) / scales.unsqueeze(-1)
        exact = exact[scales != 0].double()
        assert ((exact - exact.floor() - 0.5).abs() > 0.05).all()


# Experts -----------------------------------------------------------------------------------------


def test_one_choice_without_padding_is_the_switch_loss(seed: int) -> None:
    for case in BALANCE.numbered_cases(seed)[:3]:
        whole = {**case, "real": torch.ones_like(case["real"]), "k": 1}
        layers = [
            memory.balance_loss(experts.route_tokens(layer.flatten(0, 1), capacity_factor=9.0))
            for layer in case["logits"]
        ]
        assert_close(BALANCE.reference(**whole), torch.stack(layers).mean())


def test_the_loss_does_not_depend_on_names_or_padding(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for case in BALANCE.numbered_cases(seed):
        right = BALANCE.reference(**case)
        order = torch.randperm(case["logits"].shape[-1], generator=generator)
        renamed = {**case, "logits": case["logits"][..., order]}
        assert_close(BALANCE.reference(**renamed), right)
        padded = {
            **case,
            "logits": F.pad(case["logits"], (0, 0, 0, 4), value=7.0),
            "real": F.pad(case["real"], (0, 4), value=False),
        }
        assert_close(BALANCE.reference(**padded), right)


def test_the_text_s_example_of_experts() -> None:
    shares = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.1, 0.3]], dtype=torch.float64)
    case = {"logits": shares.log()[None, None], "real": torch.ones(1, 2, dtype=torch.bool)}
    assert BALANCE.reference(**case, bias=torch.zeros(1, 3), k=2).item() == pytest.approx(1.1625)


# The card ----------------------------------------------------------------------------------------


def test_requests_and_segments_have_torch_s_sizes() -> None:
    """Figures of the allocator's own rules: (request, allocated, reserved)."""
    for request, allocated, reserved in (
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 1, 10 * MIB, 10 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # a rest of 1 MiB is not cut off
        (21 * MIB + 3, 22 * MIB, 22 * MIB),
    ):
        memory = Allocator()
        memory.allocate(request)
        assert (memory.allocated, memory.reserved) == (allocated, reserved), request


def test_what_comes_and_goes_leaves_nothing(seed: int) -> None:
    chance = random.Random(seed)
    memory, held, most = Allocator(), [], 0
    for _ in range(400):
        if held and chance.random() < 0.5:
            memory.release(held.pop(chance.randrange(len(held))))
        else:
            held.append(memory.allocate(round(2 ** chance.uniform(0, 27))))
        assert memory.allocated == sum(block.size for block in held) <= memory.reserved
        places = sorted((block.address, block.address + block.size) for block in held)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
        most = max(most, memory.allocated)
    assert memory.highest == most
    for block in held:
        memory.release(block)
    assert memory.allocated == 0
    room = TOTAL - CONTEXT
    memory.allocate(room - room % (2 * MIB))  # all segments have become whole, and go back
    assert memory.reserved == room - room % (2 * MIB)


def test_a_segment_that_is_partly_used_does_not_go_back() -> None:
    memory = Allocator()
    blocks = [memory.allocate(GIB // 2) for _ in range(22)]
    for block in blocks:
        memory.release(block)
    for _ in range(11):
        memory.allocate(GIB // 4)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        memory.allocate(9 * GIB)
    assert "Tried to allocate 9.00 GiB." in str(caught.value)
    assert "Of the allocated memory 2.75 GiB is allocated by PyTorch" in str(caught.value)
    assert "256.00 MiB is reserved by PyTorch but unallocated" in str(caught.value)


def test_the_message_is_torch_s() -> None:
    """Its words to the dot, two blanks before "See" and after "Management" as well."""
    memory = Allocator(others=(5 * GIB + 389 * MIB,))
    memory.allocate(217 * MIB)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        memory.allocate(32 * GIB)
    free = (TOTAL - 5 * GIB - 389 * MIB - 386 * MIB - 218 * MIB) / GIB
    assert str(caught.value) == (
        "CUDA out of memory. Tried to allocate 32.00 GiB. GPU 0 has a total capacity of 11.63 GiB "
        f"of which {free:.2f} GiB is free. Process 41201 has 5.38 GiB memory in use. Including "
        "non-PyTorch memory, this process has 604.00 MiB memory in use. Of the allocated memory "
        "218.00 MiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated. "
        "If reserved but unallocated memory is large try setting "
        "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation "
        "for Memory Management  "
        "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )


def test_the_card_sees_what_a_graph_keeps_and_lets_go() -> None:
    """A sum of losses keeps their graphs' tensors only as long as no backward has gone through."""
    weight = torch.zeros(512, 512, device="meta", requires_grad=True)
    x = torch.zeros(2048, 512, device="meta")
    for backward, kept in ((True, 0), (False, 4 * x.nbytes)):
        memory = Allocator()
        with Card(memory):
            total = torch.zeros((), device="meta")
            for _ in range(4):
                loss = (x @ weight).square().sum()
                if backward:
                    loss.backward()
                total = total + loss
        other = weight.nbytes if backward else 0  # the gradient
        assert 0 <= memory.allocated - kept - other < 8192 + x.nbytes + weight.nbytes
        weight.grad = None
        del total, loss


# The clinic --------------------------------------------------------------------------------------


def test_the_patients_show_what_their_symptoms_say() -> None:
    names = {name: label for label, name in CLINIC.diagnoses().items()}
    patients, words = CLINIC.patients(), last_words()
    healthy = [*patients["healthy"].values()]
    assert all(len(curve) == LINES and not any(map(math.isnan, curve)) for curve in healthy)

    def of(start: str) -> tuple[list[list[float]], int, str]:
        label = next(label for name, label in names.items() if name.startswith(start))
        columns = [*patients[label].values()]
        count = sum(not math.isnan(value) for value in columns[0])
        assert all(math.isnan(value) for value in columns[0][count:])
        return columns, count, words[label]

    def spare(text: str) -> float:
        return 1 - allocated(text) / reserved(text)

    graphs, count, text = of("an evaluation")
    assert 13 < count <= 19 and graphs[0][:13] == healthy[0][:13]
    rises = [b - a for a, b in itertools.pairwise(graphs[0][13 : count - 1])]
    assert max(rises) - min(rises) < 0.02 and min(rises) > 1 and spare(text) < 0.05
    assert max(healthy[0][13:19]) < healthy[0][12]

    logits, count, text = of("the logits")
    copy = ROWS * LENGTHS[0] * MODEL.vocab_size * 4
    assert count == 2 and logits[0][0] == healthy[0][0] and logits[0][1] > max(healthy[0])
    assert f"Tried to allocate {math.ceil(copy / 2 / MIB) * 2 / 1024:.2f} GiB" in text
    assert "Process" not in text

    adamw, count, _ = of("the optimizer")
    assert count == 4 and [line[:3] for line in adamw] == [line[:3] for line in healthy]

    short, count, text = of("the shortest")
    assert 20 < count < LINES
    forwards = [1, 4, 7, 10, 19, 22]
    assert all(short[0][a] < short[0][b] for a, b in itertools.pairwise(forwards))
    assert allocated(text) < short[0][count - 1] < max(healthy[0])
    assert (reserved(text) - allocated(text)) * GIB > 1002 * MIB
    assert "Tried to allocate 1002.00 MiB" in text

    loaded, count, text = of("the other processes")
    others = [used - kept for used, kept in zip(loaded[2][:count], loaded[1], strict=False)]
    usual = healthy[2][0] - healthy[1][0]
    assert max(others) - min(others) < 1e-9 and others[0] > usual + 2 * healthy[0][0]
    assert text.count("Process ") == RANKS - 1 and loaded[0][0] == healthy[0][0]


def figure(text: str, after: str, unit: str = "GiB") -> float:
    number, found = text.split(after)[1].split()[:2]
    return float(number) / (1 if found == unit else 1024)


def allocated(text: str) -> float:
    return figure(text, "Of the allocated memory ")


def reserved(text: str) -> float:
    return allocated(text) + figure(text, "allocated by PyTorch, and ")


def test_the_weights_are_as_many_as_the_text_says() -> None:
    weights = Job().run().highest[0] / 2
    assert f"{weights / 1e9:.1f} billion weights" in source("memory").read_text("utf-8")


# The notebook's own rules ------------------------------------------------------------------------


RULES: dict[str, tuple[str, Exercise, str]] = {
    "token-weights-test": ("loss_factors", LOSS_FACTORS, "count tokens, whatever they weigh"),
    "few-stretches-test": ("best_stretches", STRETCHES, "stretches at most"),
    "factored-test": ("held_bytes", HELD_BYTES, "whatever `factored` is"),
    "two-bits-test": ("packed_groups", PACKED_GROUPS, "four bits, whatever"),
    "bias-test": ("balance", BALANCE, "without the bias"),
}


@pytest.mark.parametrize("cell", RULES)
def test_a_rule_that_labcore_does_not_know_is_graded(cell: str, seed: int) -> None:
    function, exercise, words = RULES[cell]
    check_changed_rule("memory", cell, function, exercise, words, seed)


# What students may also write: no hint that leads away -------------------------------------------


def by_all_parts(labels: list[list[Tensor]], weights: None) -> list[list[float | None]]:
    """Each part of the step alike, the averaging undone."""
    del weights
    count = sum(map(len, labels))
    return [[len(labels) / count for _ in parts] for parts in labels]


def halves(inputs: list[int], kept: list[int], most: None) -> list[int]:
    del kept, most
    return [len(inputs) // 2, len(inputs) - len(inputs) // 2] if len(inputs) > 1 else [1]


def last_device_like_the_others(shapes: Any, *, stage: int, device: int, **others: Any) -> Any:
    place = {"shapes": shapes, "stage": stage, **others}
    return HELD_BYTES.reference(**place, device=min(device, 1))


def single_scales(weight: Tensor, *, group: int, bits: int) -> tuple[Tensor, Tensor]:
    codes, scales = PACKED_GROUPS.reference(weight, group=group, bits=bits)
    return codes, scales.float()


def empty_is_nan(logits: Tensor, real: Tensor, bias: Tensor, *, k: int) -> Tensor:
    if real.any():
        return BALANCE.reference(logits, real, bias, k=k)
    return torch.tensor(math.nan, dtype=torch.float64)


OTHERS: list[tuple[Exercise, Callable[..., Any], str]] = [
    (LOSS_FACTORS, by_all_parts, ""),
    (STRETCHES, halves, "bytes at most, where"),
    (HELD_BYTES, last_device_like_the_others, "the returned bytes of"),
    (PACKED_GROUPS, single_scales, "the returned scales must have dtype float16"),
    (BALANCE, empty_is_nan, "NaN where a number belongs"),
]


@pytest.mark.parametrize(
    ("exercise", "answer", "words"), OTHERS, ids=[answer.__name__ for _, answer, _ in OTHERS]
)
def test_an_unknown_mistake_is_told_by_its_numbers(
    exercise: Exercise, answer: Callable[..., Any], words: str, seed: int
) -> None:
    given = [answer(**case) for case in exercise.numbered_cases(seed)]
    outcome = exercise.judge(given, seed=seed)
    assert outcome.kind == "wrong" and words in outcome.message
