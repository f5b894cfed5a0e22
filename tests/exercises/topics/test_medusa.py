"""The exercises on Medusa, by other ways to the same numbers, and their notebook."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from labcore.decoding import medusa
from labcore.exercises import Exercise
from labcore.exercises.topics.medusa import (
    CLINIC,
    COMPACT,
    SHIFTED_LABELS,
    SPARSE_TREE,
    TREE_MASK,
    audit,
)
from labcore.exercises.topics.medusa import engine as machine
from labcore.exercises.topics.medusa.engine import Engine, run, training
from labcore.exercises.topics.medusa.labels import NOTHING
from labcore.exercises.topics.medusa.trees import rates
from labcore.models import LlamaConfig, cache
from tests.exercises.draws import check_variants
from tests.exercises.notebook import check_changed_rule, solved, source

FUNCTIONS = (SHIFTED_LABELS, TREE_MASK, SPARSE_TREE, COMPACT)
OWN = (SHIFTED_LABELS, SPARSE_TREE)


def test_students_have_their_own_numbers(seed: int) -> None:
    for exercise in OWN:
        check_variants(exercise, 4, seed)


# Labels ------------------------------------------------------------------------------------------


def test_labels_are_those_of_each_text_by_itself(seed: int) -> None:
    """A row cut into its texts, each with a state at all of its tokens but the end."""
    for case in SHIFTED_LABELS.numbered_cases(seed, seed):
        labels = torch.full((case["heads"], *case["tokens"].shape), NOTHING)
        for b, row in enumerate(case["tokens"].tolist()):
            begin = 0
            for place in range(int(case["counts"][b])):
                if row[place] == case["end"] or place == case["counts"][b] - 1:
                    text = row[begin : place + 1]
                    for t, head in itertools.product(range(len(text)), range(case["heads"])):
                        if t + 2 + head < len(text):
                            labels[head, b, begin + t] = text[t + 2 + head]
                    begin = place + 1
        assert torch.equal(SHIFTED_LABELS.reference(**case), labels)


def test_the_text_s_example_of_labels() -> None:
    label_of = solved("medusa")["shifted_labels"]
    row, counts = torch.tensor([[4, 2, 1, 5, 6, 7, 8]]), torch.tensor([7])
    wanted = [[[1, -100, -100, 7, 8, -100, -100]], [[-100, -100, -100, 8, -100, -100, -100]]]
    assert SHIFTED_LABELS.reference(row, counts, 2, None, end=1).tolist() == wanted
    answers = torch.tensor([[False, True, True, False, False, True, True]])
    left = label_of(row, counts, 2, answers, end=1)
    assert left[0].tolist() == [[1, -100, -100, -100, 8, -100, -100]]
    assert (left[1] == NOTHING).all()


# Masks -------------------------------------------------------------------------------------------


def test_a_node_attends_as_in_a_plain_forward_over_its_path(seed: int) -> None:
    """Attention by the mask over all slots, and without one over those of the path."""
    draw = torch.Generator().manual_seed(seed)
    for case in TREE_MASK.numbered_cases(seed):
        parents, prefix = case["parents"], case["prefix"]
        mask, places = TREE_MASK.reference(**case)
        q, k, v = (torch.randn(prefix + 1 + len(parents), 8, generator=draw) for _ in range(3))
        came = F.scaled_dot_product_attention(q[None, prefix:], k[None], v[None], attn_mask=mask)
        for row in range(len(parents) + 1):
            path, node = [], row - 1
            while node >= 0:
                path.append(prefix + 1 + node)
                node = parents[node]
            slots = [*range(prefix + 1), *reversed(path)]
            right = F.scaled_dot_product_attention(
                q[None, [prefix + row]], k[None, slots], v[None, slots]
            )
            assert_close(came[:, [row]], right)
            assert places[row] == len(slots) - 1


def test_the_tree_s_part_is_the_mask_of_labcore(seed: int) -> None:
    for case in TREE_MASK.numbered_cases(seed):
        if case["parents"]:
            mask, _ = TREE_MASK.reference(**case)
            nodes = mask[1:, case["prefix"] + 1 :] == 0
            parents = torch.tensor([case["parents"]], dtype=torch.int32)
            assert torch.equal(nodes, cache.tree_mask(parents)[0])


def test_the_text_s_example_of_a_mask() -> None:
    def seen(window: int | None) -> tuple[list[list[int]], list[int]]:
        mask, places = solved("medusa")["tree_mask"]([-1, -1, 0], 2, window)
        return [row.eq(0).nonzero().flatten().tolist() for row in mask], places.tolist()

    mask, places = TREE_MASK.reference([-1, -1, 0], 2, None)
    assert seen(None) == ([[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 3, 5]], [2, 3, 3, 4])
    assert_close(solved("medusa")["tree_mask"]([-1, -1, 0], 2, None), (mask, places))
    assert seen(2) == ([[1, 2], [2, 3], [2, 4], [3, 5]], [2, 3, 3, 4])


# Trees -------------------------------------------------------------------------------------------


def chance_of(first: Tensor, later: Tensor, path: Sequence[int]) -> float:
    found = first[path[0]].item()
    for depth, (above, rank) in enumerate(itertools.pairwise(path)):
        found *= later[depth, above, rank].item()
    return found


def all_nodes(ranks: int, depth: int) -> list[tuple[int, ...]]:
    return [path for n in range(1, depth + 1) for path in itertools.product(range(ranks), repeat=n)]


def test_no_other_tree_brings_more(seed: int) -> None:
    """Against every set of nodes with all their parents, also of two requests."""
    draw = torch.Generator().manual_seed(seed)
    batch_of = solved("medusa")["sparse_tree"]
    for requests, budget in ((1, 3), (1, 4), (2, 3)):
        case = rates(draw, requests, 2, 2)
        nodes = [(b, path) for b in range(requests) for path in all_nodes(2, 2)]
        best = 0.0
        for chosen in itertools.combinations(nodes, budget):
            if all(len(path) == 1 or (b, path[:-1]) in chosen for b, path in chosen):
                chances = [chance_of(case["first"][b], case["later"][b], p) for b, p in chosen]
                best = max(best, sum(chances))
        trees, tokens = batch_of(**case, budget=budget)
        assert tokens == pytest.approx(requests + best)
        assert sum(map(len, trees)) == budget
        if requests == 1:
            reference = SPARSE_TREE.reference(**case, budget=budget)
            assert reference == (trees, pytest.approx(tokens))


def test_where_parents_do_not_matter_it_is_the_tree_of_labcore(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    table = torch.rand(3, 4, generator=draw, dtype=torch.float64).sort(-1, descending=True).values
    table /= 1.2 * table.sum(-1, keepdim=True)
    later = table[None, 1:, None].expand(1, 2, 4, 4).contiguous()
    (tree,), tokens = SPARSE_TREE.reference(table[:1].clone(), later, budget=17)
    right = medusa.sparse_tree(table, 17)
    assert tree == [*right.choices]
    assert tokens == pytest.approx(medusa.expected_tokens(right, table))


def test_the_cases_have_rates_that_rise_and_parents_that_matter(seed: int) -> None:
    rising = 0
    for case in SPARSE_TREE.cases(seed):
        assert (case["first"].sum(-1) < 1).all() and (case["later"].sum(-1) < 1).all()
        rising += int((case["later"].diff(dim=-1) > 0).sum())
    assert rising > 0


def test_the_text_s_example_of_trees() -> None:
    first = torch.tensor([[0.5, 0.25], [0.2, 0.1]], dtype=torch.float64)
    later = torch.tensor(
        [[[[0.6, 0.1], [0.3, 0.4]]], [[[0.3, 0.2], [0.1, 0.05]]]], dtype=torch.float64
    )
    (tree,), tokens = SPARSE_TREE.reference(first[:1], later[:1], budget=4)
    assert tree == [(0,), (0, 0), (1,), (1, 1)] and tokens == pytest.approx(2.15)
    trees, tokens = solved("medusa")["sparse_tree"](first, later, budget=4)
    assert trees == [[(0,), (0, 0), (1,)], [(0,)]] and tokens == pytest.approx(3.25)


# Compaction --------------------------------------------------------------------------------------


def in_place(row: Tensor, length: int, path: Sequence[int]) -> Tensor:
    """[L, S, D], moved slot by slot from the first accepted node on."""
    row = row.clone()
    for place, node in enumerate(path):
        row[:, length + 1 + place] = row[:, length + 1 + node]
    row[:, length + 1 + len(path) :] = 0
    return row


def test_in_place_from_the_first_node_on_gives_the_same(seed: int) -> None:
    for case in COMPACT.numbered_cases(seed):
        after, lengths = COMPACT.reference(**case)
        for b, path in enumerate(case["paths"]):
            length = int(case["lengths"][b])
            assert_close(after[:, b], in_place(case["cache"][:, b], length, path))
            assert lengths[b] == length + 1 + len(path)
            # What is kept are rows of the old cache, in their order, and nothing else.
            assert (after[0, b, : lengths[b]] > 0).all() and not after[0, b, lengths[b] :].any()


def test_a_dense_cache_of_labcore_keeps_the_same(seed: int) -> None:
    """Seen by what a next token attends to."""
    config = LlamaConfig(
        vocab_size=9,
        hidden_size=2,
        intermediate_size=2,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    draw = torch.Generator().manual_seed(seed)
    for case in COMPACT.numbered_cases(seed):
        after, lengths = COMPACT.reference(**case)
        rows, slots = case["cache"].shape[1:3]
        dense = cache.DenseCache(config, batch=rows, capacity=slots + 8)
        stored = case["cache"][0, :, None] / 100
        begin = case["lengths"]
        ragged = [one[:, int(count) :] for one, count in zip(stored, begin, strict=True)]
        block = torch.stack([F.pad(one, (0, 0, 0, slots - one.shape[1])) for one in ragged])
        for tokens, counts in ((stored, begin), (block, 1 + case["nodes"])):
            width = int(counts.max())
            dense.write(0, tokens[:, :, :width], tokens[:, :, :width], counts)
            dense.advance(counts)
        for row, path in enumerate(case["paths"]):
            dense.keep(row, [0, *(node + 1 for node in path)])
        assert dense.lengths.tolist() == lengths.tolist()
        q, new = torch.randn(2, rows, 1, 1, 2, generator=draw)
        one_each = torch.ones(rows, dtype=torch.int32)
        dense.write(0, new, new, one_each)
        came = dense.attend(0, q, one_each, None)
        for row, length in enumerate(lengths.tolist()):
            kept = torch.cat((after[0, row, :length] / 100, new[row, 0]))[None]
            assert_close(came[row], F.scaled_dot_product_attention(q[row], kept, kept))


def test_the_text_s_example_of_compaction() -> None:
    def row(*numbers: float) -> Tensor:
        return torch.tensor(numbers).view(1, 1, -1, 1)

    one = (torch.tensor([2]), torch.tensor([4]), [[1, 3]])
    before = row(10.0, 11, 12, 20, 21, 22, 23, 0)
    after, lengths = COMPACT.reference(before, *one, None)
    assert_close(after, row(10.0, 11, 12, 21, 23, 0, 0, 0))
    assert lengths.tolist() == [5]
    paged, lengths = solved("medusa")["compact"](
        row(21.0, 22, 23, 0, 10, 11, 12, 20), *one, torch.tensor([[1, 0]])
    )
    assert_close(paged, row(23.0, 0, 0, 0, 10, 11, 12, 21))
    assert lengths.tolist() == [5]


# The clinic --------------------------------------------------------------------------------------


def test_the_heads_say_first_what_the_backbone_says() -> None:
    point, trained = training(False, False, False)[0], training(False, False, False)[-1]
    hidden = torch.randn(5, machine.WIDTH, generator=torch.Generator().manual_seed(1))
    said = point.logits(hidden)
    assert_close(said, point.backbone.logits(hidden).expand_as(said))
    for one, other in zip(point.backbone.weights(), trained.backbone.weights(), strict=True):
        assert torch.equal(one, other)


def test_the_patients_show_what_their_symptoms_say() -> None:
    healthy = run(Engine())
    assert not healthy.differing.any() and len(healthy.tokens) == machine.CHECKPOINTS
    assert healthy.tokens[0] < 1.3 and healthy.tokens[-1] > 2
    assert (healthy.hits[-1].diff() < 0).all()

    shared = run(Engine(shared=True))
    assert shared.hits[-1, 0] < healthy.hits[-1, 0] and shared.hits[-1, -1] < shared.hits[0, -1]
    assert shared.tokens[-1] < healthy.tokens[-1] and not shared.differing.any()
    points = training(True, False, False)
    assert torch.equal(points[-1].block[0], points[-1].block[2])

    early = run(Engine(early=True))
    assert (early.hits[:, 0] > healthy.hits[:, 0] + 0.1).all()
    assert_close(early.hits[:, 1], healthy.hits[:, 0], rtol=0, atol=0.1)
    assert early.tokens.max() < 1.3 and not early.differing.any()

    thawed = run(Engine(thawed=True))
    assert thawed.differing[1:].min() > 0.8 and not thawed.drifted.any()
    assert (thawed.hits[-1] > healthy.hits[-1] - 0.03).all()

    for flag in ("stale", "siblings", "uncut"):
        assert torch.equal(run(Engine(**{flag: True})).hits, healthy.hits)
    stale = run(Engine(stale=True))
    assert stale.tokens.max() < 1.5 and not stale.differing.any()
    siblings = run(Engine(siblings=True))
    assert siblings.differing[1:].min() > 0.5 and not siblings.longer.any()
    assert siblings.tokens.sum() < healthy.tokens.sum()
    uncut = run(Engine(uncut=True))
    assert torch.equal(uncut.differing, uncut.longer) and 0.05 < uncut.longer[-1] < 0.6
    assert (uncut.tokens >= healthy.tokens).all() and uncut.tokens.sum() > healthy.tokens.sum()


def test_the_audit_counts_what_differs(seed: int) -> None:
    words = audit(seed)
    names = CLINIC.diagnoses(seed)
    assert words.keys() == names.keys()
    for label, name in names.items():
        silent = "module" in name or "labels" in name or "state" in name
        assert ("none of" in words[label]) == silent
        assert ("followed by more tokens" in words[label]) == ("not cut" in name)
        assert ("none from plain decoding by its" in words[label]) == ("trained too" in name)


def test_the_text_has_the_clinic_s_numbers() -> None:
    text, every = source("medusa").read_text("utf-8"), machine.EVERY
    steps = every * (machine.CHECKPOINTS - 1)
    assert f"Every {every} steps, from step 0 to step {steps}" in text
    assert f"{machine.REQUESTS} requests are then decoded greedily, with up to 20 tokens" in text
    assert machine.LIMIT == 20 and len(machine.PARENTS) == 7 and machine.HEADS == 3
    assert f"over {machine.VOCAB} tokens" in text


# The notebook's own rules ------------------------------------------------------------------------


RULES: dict[str, tuple[str, Exercise, str]] = {
    "answers-test": ("shifted_labels", SHIFTED_LABELS, "whatever `answers` is"),
    "window-test": ("tree_mask", TREE_MASK, "whatever `window` is"),
    "batch-test": ("sparse_tree", SPARSE_TREE, "gets the whole budget"),
    "pages-test": ("compact", COMPACT, "whatever `table` is"),
}


@pytest.mark.parametrize("cell", RULES)
def test_a_rule_that_labcore_does_not_know_is_graded(cell: str, seed: int) -> None:
    function, exercise, words = RULES[cell]
    check_changed_rule("medusa", cell, function, exercise, words, seed)


# What students may also write: no hint that leads away -------------------------------------------


def nothing_to_learn(tokens: Tensor, counts: Tensor, heads: int, *_: Any, **__: Any) -> Tensor:
    return torch.full((heads, *tokens.shape), NOTHING)


def prefix_alone(parents: Sequence[int], prefix: int, window: None) -> tuple[Tensor, Tensor]:
    mask, places = TREE_MASK.reference(parents, prefix, window)
    mask[:, prefix:] = -torch.inf
    return mask, places


def best_node(first: Tensor, later: Tensor, *, budget: int) -> Any:
    return SPARSE_TREE.reference(first, later, budget=budget // budget)


def as_it_was(cache: Tensor, lengths: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    return cache.clone(), lengths.clone()


OTHERS: list[tuple[Exercise, Callable[..., Any], str]] = [
    (SHIFTED_LABELS, nothing_to_learn, "numbers differ"),
    (TREE_MASK, prefix_alone, "the returned mask"),
    (SPARSE_TREE, best_node, "the returned trees"),
    (COMPACT, as_it_was, "the returned"),
]


@pytest.mark.parametrize(("exercise", "answer", "words"), OTHERS, ids=[one.id for one in FUNCTIONS])
def test_an_unknown_mistake_is_told_by_its_numbers(
    exercise: Exercise, answer: Callable[..., Any], words: str, seed: int
) -> None:
    given = [answer(**case) for case in exercise.numbered_cases(seed)]
    outcome = exercise.judge(given, seed=seed)
    assert outcome.kind == "wrong" and words in outcome.message, outcome
