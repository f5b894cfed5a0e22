"""The exercises on tensor parallelism, by other ways to the same numbers, and their notebook."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from scipy.optimize import nnls
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from labcore.exercises import Exercise
from labcore.exercises.topics.tensor_parallel import FIT, ODD_RANK, PLACE, RING, ROW
from labcore.exercises.topics.tensor_parallel.matching import one_differs, some_log
from tests.exercises.draws import check_variants
from tests.exercises.notebook import check_changed_rule, solved

SLUG = "tensor_parallel"
FUNCTIONS = (PLACE, RING, ROW, FIT, ODD_RANK)
OWN = (PLACE, RING, ROW, FIT)


def test_students_have_their_own_numbers(seed: int) -> None:
    for exercise in OWN:
        check_variants(exercise, 4, seed)


# Places ------------------------------------------------------------------------------------------


TOKENS, VOCABULARY = 24, 48
Layers = list[tuple[str, int]]


def small(layers: Layers) -> Layers:
    """The same chain with widths that are quick to multiply."""
    width, found = 24, []
    for at, (kind, _) in enumerate(layers):
        if kind in ("embedding", "column", "row", "linear"):
            width = 24 * (1 + at % 3)
        found.append((kind, width))
    return found


def weights_of(layers: Layers, draw: torch.Generator) -> list[Tensor]:
    inputs, found = 24, []
    for kind, width in layers:
        rows = VOCABULARY if kind == "embedding" else inputs
        weight = torch.randn(width, rows, generator=draw, dtype=torch.float64)
        found.append(weight / rows**0.5)
        inputs = width
    return found


def layer(kind: str, x: Tensor, weight: Tensor) -> Tensor:
    """One layer in one process, or of one rank; x: [T, features]."""
    if kind == "attention":
        return x.cumsum(0).tanh()
    if kind == "silu":
        return F.silu(x)
    if kind == "scale":
        return 0.7 * x
    if kind == "norm":
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    return x @ weight.T


def on_ranks(
    layers: Layers, weights: list[Tensor], x: Tensor, collectives: Sequence[str], ranks: int
) -> tuple[list[Tensor], int]:
    """What each rank ends with, and the bytes that one of them sends. A shape may not fit."""
    have, sent = [x.clone() for _ in range(ranks)], 0
    for (kind, width), weight, collective in zip(layers, weights, collectives, strict=True):
        parts: Sequence[Tensor] = [weight] * ranks
        if kind == "column":
            parts = weight.chunk(ranks)
        if kind in ("row", "embedding"):
            parts = weight.chunk(ranks, 1)
        if kind == "embedding":
            have = [*x.chunk(ranks, 1)]
        if kind == "attention" and have[0].shape[1] != width // ranks:
            raise RuntimeError("each rank has heads of its own")
        have = [layer(kind, one, part) for one, part in zip(have, parts, strict=True)]
        whole = torch.stack(have).sum(0)
        if collective == "all-reduce":
            have = [whole.clone() for _ in range(ranks)]
        elif collective == "reduce-scatter":
            have = [*whole.chunk(ranks)]
        elif collective == "all-gather":
            by_token = len(have[0]) < len(x)
            whole = torch.cat(have, 0 if by_token else 1)
            have = [whole.clone() for _ in range(ranks)]
        passes = {"none": 0, "all-reduce": 2}.get(collective, 1)
        sent += passes * (ranks - 1) * 2 * whole.numel() // ranks
    return have, sent


def right(have: Sequence[Tensor], whole: Tensor) -> bool:
    return all(one.shape == whole.shape and torch.allclose(one, whole) for one in have)


@pytest.mark.parametrize("sequence", [False, True])
def test_collectives_make_all_ranks_right_and_all_are_needed(sequence: bool, seed: int) -> None:
    draw, left_out = torch.Generator().manual_seed(seed), 0
    place = solved(SLUG)["place_collectives"]
    for case in PLACE.numbered_cases(seed):
        layers = small(case["layers"])
        weights = weights_of(layers, draw)
        if layers[0][0] == "embedding":
            numbers = torch.randint(VOCABULARY, (TOKENS,), generator=draw)
            x = F.one_hot(numbers, VOCABULARY).double()
        else:
            x = torch.randn(TOKENS, 24, generator=draw, dtype=torch.float64)
        whole = x
        for (kind, _), weight in zip(layers, weights, strict=True):
            whole = layer(kind, whole, weight)
        for ranks in (3, 4):
            found, count = place(layers, TOKENS, sequence, ranks=ranks)
            have, sent = on_ranks(layers, weights, x, found, ranks)
            assert right(have, whole) and count == sent
            for at in [at for at, name in enumerate(found) if name != "none"]:
                less = [*found[:at], "none", *found[at + 1 :]]
                left_out += 1
                try:
                    assert not right(on_ranks(layers, weights, x, less, ranks)[0], whole)
                except (RuntimeError, ValueError):
                    continue
            if not sequence:
                assert (found, count) == PLACE.reference(layers, TOKENS, False, ranks=ranks)
    assert left_out > 20


def test_sequence_parallelism_sends_no_more_where_widths_stay(seed: int) -> None:
    """A reduce-scatter and an all-gather of the same tensor are an all-reduce."""
    place = solved(SLUG)["place_collectives"]
    block = [("norm", 48), ("column", 96), ("silu", 96), ("row", 48), ("scale", 48)]
    layers = [*block, *block, ("norm", 48)]
    (names, sent), (plain, before) = (place(layers, 24, flag, ranks=4) for flag in (True, False))
    assert sent == before and plain.count("all-reduce") == 2
    assert names.count("reduce-scatter") == names.count("all-gather") == 2


def test_the_text_s_example_of_places() -> None:
    layers = [("column", 96), ("silu", 96), ("row", 48)]
    wanted = (["none", "none", "all-reduce"], 3456)
    assert PLACE.reference(layers, 24, False, ranks=4) == wanted
    assert solved(SLUG)["place_collectives"](layers, 24, True, ranks=4) == wanted
    names = ["none", "none", "reduce-scatter", "all-gather"]
    with_norm = [*layers, ("norm", 48)]
    assert solved(SLUG)["place_collectives"](with_norm, 24, True, ranks=4) == (names, 2 * 1728)


# The ring ----------------------------------------------------------------------------------------


def played(tensors: list[Tensor], messages: list[list[Tensor]], first: int) -> list[Tensor]:
    """Sums from messages alone: each rank adds or keeps what comes, by the rule of the text.

    What a rank sends must follow from its own numbers and what has come to it.
    """
    ranks = len(tensors)
    known = [[*one.tensor_split(ranks)] for one in tensors]
    for step, sent in enumerate(messages):
        numbers = [(rank + first - step) % ranks for rank in range(ranks)]
        for rank, number in enumerate(numbers):
            was = known[rank][number].to(sent[rank].dtype)
            assert torch.equal(sent[rank], was)
            if step >= ranks - 1:
                known[rank][number] = sent[rank].float()
        for rank in range(ranks):
            number, came = numbers[rank - 1], sent[rank - 1].float()
            known[rank][number] = came + (known[rank][number] if step < ranks - 1 else 0)
    return [torch.cat(one) for one in known]


def test_every_message_follows_from_what_its_rank_knows(seed: int) -> None:
    for case in RING.numbered_cases(seed, seed):
        sums, messages = RING.reference(**case)
        total = torch.stack(case["tensors"]).sum(0)
        assert all(torch.equal(one, total) for one in sums)
        again = played(case["tensors"], messages, case["first"])
        assert all(torch.equal(one, other) for one, other in zip(sums, again, strict=True))


def test_a_rank_sends_nearly_two_tensors_in_two_passes(seed: int) -> None:
    for case in RING.numbered_cases(seed):
        ranks, length = len(case["tensors"]), len(case["tensors"][0])
        _, messages = RING.reference(**case)
        assert len(messages) == 2 * (ranks - 1)
        by_rank = [sum(len(sent[rank]) for sent in messages) for rank in range(ranks)]
        assert sum(by_rank) == 2 * (ranks - 1) * length
        assert max(by_rank) <= 2 * (ranks - 1) * math.ceil(length / ranks)


def test_narrow_messages_leave_all_ranks_with_the_same_bits(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    ring = solved(SLUG)["ring_all_reduce"]
    for ranks, length in ((1, 5), (2, 9), (5, 3), (6, 200)):
        tensors = [*torch.randn(ranks, length, generator=draw)]
        sums, messages = ring(tensors, True, first=3)
        assert all(torch.equal(one, sums[0]) for one in sums)
        assert {one.dtype for sent in messages for one in sent} <= {torch.bfloat16}
        again = played(tensors, messages, 3)
        assert all(torch.equal(one, other) for one, other in zip(sums, again, strict=True))
        stacked = torch.stack(tensors).double()
        # A partial sum is rounded when it is sent, by 2**-9 of itself, N times at most.
        bound = 2.0**-8 * ranks * stacked.abs().sum(0)
        assert ((sums[0] - stacked.sum(0)).abs() <= bound + 1e-6).all()


def test_the_text_s_example_of_a_ring() -> None:
    tensors = [torch.tensor([1.0, 2, 3]), torch.tensor([10.0, 20, 30])]
    steps = [[[1, 2], [30]], [[33], [11, 22]]]
    for ring, narrow in (
        (RING.reference, False),
        (solved(SLUG)["ring_all_reduce"], False),
        (solved(SLUG)["ring_all_reduce"], True),
    ):
        sums, messages = ring(tensors, narrow, first=0)
        assert [one.tolist() for one in sums] == [[11, 22, 33]] * 2
        assert [[one.tolist() for one in sent] for sent in messages] == steps


# Rows --------------------------------------------------------------------------------------------


def test_the_parts_are_those_of_the_whole_layer(seed: int) -> None:
    for scattered, case in itertools.product((False, True), ROW.numbered_cases(seed, seed)):
        ranks = case["ranks"]
        if scattered:
            case |= {"x": case["x"].repeat(24, 1), "upstream": case["upstream"].repeat(24, 1)}
        x, weight, bias = (case[name].clone().requires_grad_() for name in ("x", "weight", "bias"))
        whole = F.linear(x, weight, bias)
        wanted = torch.autograd.grad(whole, (x, weight, bias), case["upstream"])
        answer = solved(SLUG)["row_parallel"] if scattered else ROW.reference
        summands, outputs, of_x, of_weight, of_bias = answer(**case | {"scattered": scattered})
        assert_close(sum(summands) + case["bias"], whole.detach())
        assert_close(torch.cat(of_x, 1), wanted[0])
        assert_close(torch.cat(of_weight, 1), wanted[1])
        if scattered:
            assert_close(torch.cat(outputs), whole.detach())
            assert_close(sum(of_bias), wanted[2])
        else:
            for output, gradient in zip(outputs, of_bias, strict=True):
                assert_close(output, whole.detach())
                assert_close(gradient, wanted[2])
        assert {len(one) for one in (summands, outputs, of_x, of_weight, of_bias)} == {ranks}


def test_the_text_s_example_of_rows() -> None:
    def some(*rows: list[float]) -> Tensor:
        return torch.tensor(rows, dtype=torch.float64)

    def listed(answer: Any) -> list[list[Any]]:
        return [[one.flatten().tolist() for one in part] for part in answer]

    weight, bias = some([3, 4]), torch.tensor([5.0], dtype=torch.float64)
    wanted = [[[3], [8]], [[16], [16]], [[30], [40]], [[10], [20]], [[10], [10]]]
    for answer in (ROW.reference, solved(SLUG)["row_parallel"]):
        assert listed(answer(some([1, 2]), weight, bias, some([10]), False, ranks=2)) == wanted
    two = solved(SLUG)["row_parallel"](
        some([1, 2], [0, 1]), weight, bias, some([10], [7]), True, ranks=2
    )
    assert listed(two)[1] == [[16], [9]] and listed(two)[4] == [[10], [7]]


# Fits --------------------------------------------------------------------------------------------


def test_fit_is_that_of_scipys_nonnegative_least_squares(seed: int) -> None:
    edges = 0
    for case in FIT.numbered_cases(seed, seed):
        ranks, seconds = case["ranks"], case["seconds"]
        columns = torch.stack(
            (
                torch.full_like(seconds, 2 * (ranks - 1)),
                2 * (ranks - 1) / ranks * case["sizes"].double(),
            ),
            1,
        )
        shares = columns / seconds[:, None]
        scale = shares.norm(dim=0)
        found, _ = nnls((shares / scale).numpy(), torch.ones(len(seconds)).numpy())
        wanted = torch.from_numpy(found) / scale
        for answer in (FIT.reference, solved(SLUG)["fit_link"]):
            alpha, beta, _ = answer(**case)
            assert (alpha, beta) == (
                pytest.approx(wanted[0].item(), rel=1e-6, abs=1e-12),
                pytest.approx(wanted[1].item(), rel=1e-6, abs=1e-18),
            )
        edges += (wanted == 0).any().item()
    assert edges >= 2


def test_without_noise_the_planted_numbers_come_back(seed: int) -> None:
    chance = random.Random(seed)
    for ranks in (2, 3, 8):
        alpha, beta = 1e-6 * chance.uniform(1, 50), 1e-11 * chance.uniform(1, 99)
        sizes = torch.tensor(chance.sample(range(1, 10**7), 5))
        seconds = 2 * (ranks - 1) * (alpha + beta * sizes.double() / ranks)
        found = FIT.reference(sizes, seconds, ranks, 10**6, None, target=5)
        predicted = 8 * (alpha + beta * 10**6 / 5)
        assert found == pytest.approx((alpha, beta, predicted), rel=1e-6)


def test_the_text_s_example_of_a_fit() -> None:
    sizes, seconds = torch.tensor([5000, 1000]), torch.tensor([13e-6, 5e-6], dtype=torch.float64)
    for answer in (FIT.reference, solved(SLUG)["fit_link"]):
        found = answer(sizes, seconds, 2, 16_000, None, target=16)
        assert found == pytest.approx((1.5e-6, 2e-9, 105e-6))
    for names, micro in ((["one-shot"], 481.5), (["two-shot"], 63), (["one-shot", "ring"], 105)):
        *_, predicted = solved(SLUG)["fit_link"](sizes, seconds, 2, 16_000, names, target=16)
        assert predicted == pytest.approx(micro * 1e-6)


# The odd rank ------------------------------------------------------------------------------------


CHANGES = ("kind", "size", "graph", "end cut", "one more", "left out", "exchanged")


def test_what_finishes_is_what_all_logs_begin_with(seed: int) -> None:
    """And exchanging the ranks moves the blame with them."""
    chance = random.Random(seed)
    for change, answer in itertools.product(
        CHANGES, (ODD_RANK.reference, solved(SLUG)["odd_rank"])
    ):
        log = some_log(chance, 8)
        other = one_differs(chance, log, change)
        for odd in range(4):
            logs = [list(other if rank == odd else log) for rank in range(4)]
            pairs = zip(log, other, strict=False)
            alike = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
            assert answer(logs, None) == (len([*alike]), odd)
        assert answer([log] * 5, None) == (8, -1)


def test_replays_are_what_was_captured(seed: int) -> None:
    """Logs written out, and the same with stretches of them in graphs."""
    chance, answer = random.Random(seed), solved(SLUG)["odd_rank"]
    for change in CHANGES:
        log = some_log(chance, 9)
        logs: list[list[Any]] = [list(log) for _ in range(5)]
        logs[3] = one_differs(chance, log, change)
        captured = [{2: one[:3], 8: one[3:5]} for one in logs]
        short = [[("replay", 2), ("replay", 8), *one[5:]] for one in logs]
        assert answer(short, captured) == answer(logs, None) == ODD_RANK.reference(logs, None)
    a, b, c = (("all-gather", size, False) for size in (1, 2, 3))
    assert ODD_RANK.reference([[a, b, c], [a, c], [a, b, c]], None) == (1, 1)  # the text's example


# The notebook's own rules ------------------------------------------------------------------------


RULES: dict[str, tuple[str, Exercise, str]] = {
    "sequence-test": ("place_collectives", PLACE, "whatever `sequence` is"),
    "narrow-test": ("ring_all_reduce", RING, "whatever `narrow` is"),
    "scattered-test": ("row_parallel", ROW, "whatever `scattered` is"),
    "allowed-test": ("fit_link", FIT, "whatever `allowed` is"),
    "captured-test": ("odd_rank", ODD_RANK, "whatever was captured"),
}


@pytest.mark.parametrize("cell", RULES)
def test_a_rule_that_labcore_does_not_know_is_graded(cell: str, seed: int) -> None:
    function, exercise, words = RULES[cell]
    check_changed_rule(SLUG, cell, function, exercise, words, seed)


# What students may also write: no hint that leads away -------------------------------------------


def nothing_needed(layers: Layers, *_: Any, **__: Any) -> tuple[list[str], int]:
    return ["none"] * len(layers), 0


def untouched(tensors: list[Tensor], *_: Any, **__: Any) -> Any:
    return [one.clone() for one in tensors], []


def no_gradients(x: Tensor, weight: Tensor, bias: Tensor, *, ranks: int, **_: Any) -> Any:
    parts = zip(x.chunk(ranks, 1), weight.chunk(ranks, 1), strict=True)
    summands = [one @ part.T for one, part in parts]
    outputs = [torch.stack(summands).sum(0) + bias] * ranks
    zeros = [torch.zeros_like(one) for one in (x.chunk(ranks, 1)[0], weight.chunk(ranks, 1)[0])]
    return summands, outputs, [zeros[0]] * ranks, [zeros[1]] * ranks, [0 * bias] * ranks


def without_latency(sizes: Tensor, seconds: Tensor, *_: Any, **__: Any) -> Any:
    beta = (seconds / sizes).mean().item()
    return 0.0, beta, beta


def nobody(logs: list[list[Any]], captured: None) -> tuple[int, int]:
    return len(logs[0]), -1


OTHERS: list[tuple[Exercise, Callable[..., Any], str]] = [
    (PLACE, nothing_needed, "the returned collectives"),
    (RING, untouched, "the returned sums"),
    (ROW, no_gradients, "the returned gradients of x"),
    (FIT, without_latency, "the returned seconds a "),
    (ODD_RANK, nobody, "the returned finished collectives"),
]


@pytest.mark.parametrize(("exercise", "answer", "words"), OTHERS, ids=[one.id for one in FUNCTIONS])
def test_an_unknown_mistake_is_told_by_its_numbers(
    exercise: Exercise, answer: Callable[..., Any], words: str, seed: int
) -> None:
    given = [answer(**case) for case in exercise.numbered_cases(seed)]
    outcome = exercise.judge(given, seed=seed)
    assert outcome.kind == "wrong" and words in outcome.message, outcome
