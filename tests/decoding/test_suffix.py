"""The suffix automaton against brute force, and its drafts: exact, adaptive, and remembered."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from labcore.decoding import SamplingConfig, generate
from labcore.decoding.audit import near_tie_audit
from labcore.decoding.contract import Draft
from labcore.decoding.draws import Drawing
from labcore.decoding.suffix import Suffix, SuffixIndex
from labcore.decoding.theory.exact import random_table, step_law, target_law, total_variation
from labcore.decoding.verify import block_verification, rejection_sampling
from tests.models.shapes import CONFIGS, model_of


def text(seed: int, size: int, letters: int = 3) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(letters) for _ in range(size)]


def index_of(tokens: Sequence[int]) -> SuffixIndex:
    index = SuffixIndex()
    for token in tokens:
        index.append(token)
    return index


def occurrences(pattern: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Where a pattern begins."""
    size = len(pattern)
    every = range(len(tokens) - size + 1)
    return [at for at in every if list(tokens[at : at + size]) == list(pattern)]


def drafts(
    proposer: Suffix, contexts: Sequence[Sequence[int]], most: int | Sequence[int] = 99
) -> list[Draft]:
    limits = [most] * len(contexts) if isinstance(most, int) else list(most)
    many = len(contexts)
    return proposer.propose(contexts, [SamplingConfig()] * many, limits, [torch.Generator()] * many)


@pytest.mark.parametrize(("size", "letters"), [(1, 1), (17, 1), (40, 2), (60, 3), (50, 20)])
def test_every_substring_is_counted(size: int, letters: int, seed: int) -> None:
    tokens = text(seed, size, letters)
    index = SuffixIndex()
    for end in range(1, size + 1):
        index.append(tokens[end - 1])
        if end % 7 and end != size:
            continue
        known = tokens[:end]
        for start in range(end):
            for stop in range(start + 1, min(end, start + 9) + 1):
                pattern = known[start:stop]
                assert index.count(pattern) == len(occurrences(pattern, known))
        longest = max(
            (n for n in range(end) if len(occurrences(known[end - n :], known)) > 1), default=0
        )
        assert index.repeated().length == longest
    assert index.count([letters]) == 0
    assert len(index._next) <= 2 * size + 1


def test_a_match_is_the_longest_end_in_the_memory(seed: int) -> None:
    known, other = text(seed, 30), text(seed + 1, 50, 4)
    index = index_of(known)
    match = index.follow(index.repeated()._replace(state=0, length=0), other[0])
    for end in range(1, len(other) + 1):
        longest = max(
            n for n in range(end + 1) if not n or occurrences(other[end - n : end], known)
        )
        assert match.length == longest
        if end < len(other):
            match = index.follow(match, other[end])


@pytest.mark.parametrize("tree", [False, True])
def test_nodes_have_the_shares_of_what_followed(tree: bool, seed: int) -> None:
    tokens = text(seed, 80)
    index = index_of(tokens)
    match = index.repeated()
    pattern = tokens[len(tokens) - match.length :]
    guess = index.expand(match, nodes=6, depth=4, floor=0.05, tree=tree)
    assert 1 <= len(guess.tokens) <= 6
    total, paths = 0.0, list[list[int]]()
    for token, parent in zip(guess.tokens, guess.parents, strict=True):
        before = paths[parent] if parent >= 0 else []
        paths.append([*before, token])
        chance = 1.0
        for depth in range(len(paths[-1])):
            seen = [*pattern, *paths[-1][:depth]]
            followed = [at for at in occurrences(seen, tokens) if at + len(seen) < len(tokens)]
            right = [at for at in followed if tokens[at + len(seen)] == paths[-1][depth]]
            chance *= len(right) / len(followed)
        assert chance >= 0.05 - 1e-12 and len(paths[-1]) <= 4
        total += chance
    assert guess.score == pytest.approx(total)
    if not tree:
        assert guess.parents == list(range(-1, len(guess.tokens) - 1))


def test_a_longer_match_drafts_more() -> None:
    line = list(range(20))
    proposer = Suffix(gamma=8, memory=0)
    for matched in (1, 3, 8, 12):
        context = [*line, 77, *line[:matched]]
        (draft,) = drafts(proposer, [context])
        assert draft.tokens.tolist() == line[matched : matched + min(matched, 8)]
    (twice,) = drafts(Suffix(gamma=8, factor=2.0, memory=0), [[*line, 77, *line[:2]]])
    assert len(twice) == 4
    (none,) = drafts(proposer, [[*line, 78]])
    assert not len(none)
    (cut,) = drafts(proposer, [[*line, 77, *line[:8]]], 3)
    assert len(cut) == 3


def test_rare_continuations_are_branches_or_are_left_out() -> None:
    context = [*[1, 2, 3] * 3, 1, 2, 4, 9, 1, 2]
    (tree,) = drafts(Suffix(tree=True, factor=4.0, memory=0), [context])
    assert {3, 4} <= set(tree.tokens[tree.parents < 0].tolist())
    assert tree.tokens[0] == 3
    (steep,) = drafts(Suffix(tree=True, factor=4.0, floor=0.3, memory=0), [context])
    assert 4 not in steep.tokens[steep.parents < 0].tolist()


def test_earlier_outputs_are_searched_once_their_row_has_moved_on() -> None:
    proposer = Suffix()
    prompt, said, other = [50, 51], [1, 2, 3, 4, 5, 6], [60, 61]
    drafts(proposer, [prompt])
    drafts(proposer, [prompt + said])
    (before,) = drafts(Suffix(), [[*other, 2, 3]])
    (after,) = drafts(proposer, [[*other, 2, 3]])
    assert not len(before) and after.tokens.tolist() == [4, 5]
    (of_prompt,) = drafts(proposer, [[60, 50]])
    assert not len(of_prompt), "prompts aren't remembered"
    drafts(proposer, [[70]])
    drafts(proposer, [[70, 7, 8, 9]])
    (across,) = drafts(proposer, [[60, 5, 6]])
    assert not len(across), "no match crosses from one output to the next"


def test_a_row_under_way_finds_what_another_row_has_just_said() -> None:
    proposer = Suffix()
    drafts(proposer, [[60, 1, 2, 3], [61]])
    drafts(proposer, [[60, 1, 2, 3], [61, 1, 2, 3, 4, 5, 6]])
    first, _ = drafts(proposer, [[60, 1, 2, 3, 4], [62]])
    again, _ = drafts(proposer, [[60, 1, 2, 3, 4], [62, 0]])
    # The other output is complete once its slot has a new request, in this very call.
    assert first.tokens.tolist() == [] and again.tokens.tolist() == [5, 6]


def test_rows_keep_their_own_text_and_share_the_memory(seed: int) -> None:
    proposer = Suffix()
    rows = [text(seed + row, 30, 3 + row) for row in range(3)]
    together = drafts(proposer, rows, [99, 0, 99])
    alone = [drafts(Suffix(), [row])[0] for row in rows]
    assert together[0].tokens.equal(alone[0].tokens) and together[2].tokens.equal(alone[2].tokens)
    assert not len(together[1])
    fresh = drafts(proposer, rows)
    assert [x.tokens.tolist() for x in fresh] == [x.tokens.tolist() for x in alone]


def test_the_memory_forgets_the_oldest() -> None:
    proposer = Suffix(memory=40)
    for turn in range(20):
        drafts(proposer, [[1000 + turn]])
        drafts(proposer, [[1000 + turn, *range(10 * turn, 10 * turn + 10)]])
    assert proposer.earlier.size <= 80 + 20
    (old,) = drafts(proposer, [[2000, 0, 1]])
    (new,) = drafts(proposer, [[2001, 170, 171]])
    assert not len(old) and new.tokens.tolist() == [172, 173]


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("verify", [rejection_sampling, block_verification])
def test_drafts_of_a_suffix_are_lossless(tree: bool, verify: object, seed: int) -> None:
    p, start = random_table(3, seed), text(seed, 12)

    def propose(context: tuple[int, ...], draws: Drawing) -> Draft:
        proposer = Suffix(gamma=3, factor=3.0, floor=0.0, tree=tree)
        return drafts(proposer, [[*start, *context]], 3)[0]

    law = step_law(verify, p, propose, 4)  # type: ignore[arg-type]
    assert total_variation(law, target_law(p, 4)) < 1e-13


@pytest.mark.parametrize("tree", [False, True])
def test_greedy_outputs_are_the_plain_ones(tree: bool, seed: int) -> None:
    model = model_of(CONFIGS["tied"], torch.Generator().manual_seed(seed)).double()
    prompts = [text(seed + row, 9 + 5 * row, 5) for row in range(3)]
    asked = SamplingConfig(max_tokens=30)
    plain = generate(model, prompts, asked)
    # The second run finds the first one's outputs in the memory.
    proposer = Suffix(tree=tree, factor=3.0)
    accepted = []
    for _ in range(2):
        found = generate(model, prompts, asked, proposer=proposer)
        accepted.append(found.statistics.accepted)
        for prompt, tokens, expected in zip(prompts, found.tokens, plain.tokens, strict=True):
            assert tokens == expected or near_tie_audit(model, prompt, tokens, gap=1e-9).passed
    assert accepted[1] > accepted[0]


def test_wrong_options_are_refused() -> None:
    for options in ({"gamma": 0}, {"factor": 0.0}, {"floor": -0.1}, {"memory": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Suffix(**options)  # type: ignore[arg-type]
