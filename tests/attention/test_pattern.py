"""Who sees whom: the dense truth against its words, and what is derived from it."""

import itertools
import random

import pytest
import torch

from labcore.attention.pattern import Pattern, allowed, ancestors, key_range, tile_mask, tree_bits
from tests.attention.cases import BANDS, draw_tree

SIZES = ((1, 1), (31, 31), (17, 40), (40, 17), (1, 33))


def by_words(pattern: Pattern, i: int, j: int, q_len: int, k_len: int) -> bool:
    """Whether query i sees key j, said once more, one pair at a time."""
    at = i + (k_len - q_len if pattern.bottom_right else 0)
    left, right = pattern.window or (None, None)
    return not (
        (pattern.is_causal and j > at)
        or (left is not None and j < at - left)
        or (right is not None and j > at + right)
    )


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_allowed_is_what_the_words_say(band: dict, size: tuple[int, int]) -> None:
    pattern, (q_len, k_len) = Pattern(scale=1.0, **band), size
    seen = allowed(pattern, q_len, k_len)
    assert seen.shape == (1, 1, q_len, k_len)
    expected = [[by_words(pattern, i, j, q_len, k_len) for j in range(k_len)] for i in range(q_len)]
    assert seen[0, 0].tolist() == expected


def lineage(parents: list[int], node: int) -> set[int]:
    """A node and its ancestors, found by walking up."""
    found: set[int] = set()
    while node >= 0 and parents[node] != -2:
        found.add(node)
        node = parents[node]
    return found


@pytest.mark.parametrize("nodes", [1, 2, 31, 32, 33, 64, 100])
def test_a_node_sees_its_lineage(nodes: int, generator: torch.Generator) -> None:
    parents = draw_tree(generator, batch=3, nodes=nodes, padding=(0, nodes // 3, nodes))
    parents[0] = torch.arange(nodes) - 1  # a chain has the deepest lineage
    seen = ancestors(parents)
    for row, node in itertools.product(range(3), range(nodes)):
        expected = lineage(parents[row].tolist(), node)
        assert set(seen[row, node].nonzero().flatten().tolist()) == expected
    bits = tree_bits(parents)
    assert bits.dtype == torch.int32
    assert bits.shape == (3, nodes, -(-nodes // 32))
    for j in range(nodes):
        assert torch.equal((bits[:, :, j // 32] >> (j % 32)) & 1 == 1, seen[:, :, j])
    assert not bits[2].any()


def test_a_tree_sees_the_prefix_and_padding_sees_nothing(generator: torch.Generator) -> None:
    parents = draw_tree(generator, batch=2, nodes=9, padding=(0, 4))
    seen = allowed(Pattern(scale=1.0, tree=parents), 9, 21)
    assert seen.shape == (2, 1, 9, 21)
    assert torch.equal(seen[:, 0, :, 12:], ancestors(parents))
    assert seen[0, 0, :, :12].all()
    assert seen[1, 0, :5, :12].all()
    assert not seen[1, 0, 5:].any()
    assert not seen[1, 0, :, 17:].any()


def tiles(q_len: int, k_len: int, rows: int, keys: int):
    for i, j in itertools.product(range(0, q_len, rows), range(0, k_len, keys)):
        yield slice(i, min(i + rows, q_len)), slice(j, min(j + keys, k_len))


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_tiles_are_cut_from_the_truth(band: dict, size: tuple[int, int], seed: int) -> None:
    pattern, (q_len, k_len) = Pattern(scale=1.0, **band), size
    dice = random.Random(seed)
    truth = allowed(pattern, q_len, k_len)[0, 0]
    for rows, keys in tiles(q_len, k_len, dice.randint(1, 20), dice.randint(1, 20)):
        mask = tile_mask(pattern, rows, keys, q_len, k_len)
        assert (mask is None) == bool(truth[rows, keys].all())
        if mask is not None:
            assert torch.equal(mask[0, 0].expand_as(truth[rows, keys]), truth[rows, keys])
        seen = key_range(pattern, rows.start, rows.stop, q_len, k_len)
        hull = truth[rows].any(0).nonzero().flatten().tolist()
        assert list(seen) == hull
    assert len(key_range(pattern, 0, 0, q_len, k_len)) == 0


@pytest.mark.parametrize("prefix", [0, 1, 12])
def test_tiles_of_a_tree(prefix: int, generator: torch.Generator) -> None:
    pattern = Pattern(scale=1.0, tree=draw_tree(generator, batch=2, nodes=11, padding=(3, 0)))
    truth = allowed(pattern, 11, 11 + prefix)
    for rows, keys in tiles(11, 11 + prefix, 4, 5):
        mask = tile_mask(pattern, rows, keys, 11, 11 + prefix)
        expected = truth[:, :, rows, keys]
        assert mask is not None
        assert torch.equal(mask.expand_as(expected), expected)
        seen = key_range(pattern, rows.start, rows.stop, 11, 11 + prefix)
        assert not truth[:, :, rows, seen.stop :].any()


def test_causal_closes_a_window_on_its_right() -> None:
    assert Pattern(scale=1.0, is_causal=True, window=(None, 4)).right == 0
    assert Pattern(scale=1.0, is_causal=True, window=(3, None)).right == 0
    assert Pattern(scale=1.0, window=(3, None)).right is None
    assert Pattern(scale=1.0, window=(3, None)).left == 3
    assert Pattern(scale=1.0).left is None
