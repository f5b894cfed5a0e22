"""The drawn masks, trees and goodputs are those of their studies."""

from __future__ import annotations

import itertools

import pytest

from labcore.studies.inflight.goodput import PROMPTS, TRANSFERS, WAYS, Times
from labcore.studies.inflight.packed import pack
from labcore.studies.inflight.prefixes import found_in_blocks, radix_tree, tokenized
from labcore.ui.figures import inflight as figures


@pytest.mark.parametrize("held", [1, 5, 9])
@pytest.mark.parametrize("chunk", [1, 4, 8])
def test_a_packed_step_computes_what_is_read_and_a_rectangle_more(held: int, chunk: int) -> None:
    step = pack([(held, 1), (2, 1), (0, chunk)])
    packed, padded = (figures.packed_mask(one, chunk, held) for one in figures.LAYOUTS)
    cells = packed.data[0].z
    assert [[one is not None for one in row] for row in cells] == [list(row) for row in step.mask]
    assert len(cells) == 2 + chunk and packed.data[0].y[0] == f"A{held + 1}"
    wide = max(held + 1, 3, chunk)
    assert len(padded.data[0].z) == 3 * chunk and {len(row) for row in padded.data[0].z} == {wide}
    useful = sum(one != 3 for row in padded.data[0].z for one in row)
    assert useful == step.pairs
    assert f"{3 * chunk * wide - useful} of them" in padded.layout.meta["alt"]
    assert len({len(one.data) for one in (packed, padded)}) == 1
    with pytest.raises(ValueError, match="layout"):
        figures.packed_mask("ragged")


def test_the_tree_is_drawn_edge_by_edge() -> None:
    prompts = tokenized()
    for count, size in itertools.product(range(1, len(prompts) + 1), (4, 16, 32)):
        figure = figures.prefix_tree(count, size)
        _, shared, own, found = figure.data
        drawn = [
            (round(line.x[at] - 0.7), line.x[at + 1])
            for line in (shared, own)
            for at in range(0, len(line.x) - 1, 3)
        ]
        edges = radix_tree(prompts[:count])
        assert sorted(drawn) == sorted((one.begin, one.end) for one in edges)
        assert list(found.x) == found_in_blocks(prompts[:count], size)
        assert figure.layout.xaxis.range[1] > max(map(len, prompts))


def test_goodput_is_read_off_the_shares() -> None:
    good, bad = Times((0.1,) * 10, (0.005,) * 10), Times((0.1,) * 10, (0.05,) * 10)
    data = {
        (way, prompt, transfer): {2: good, 8: good if way == "apart" else bad}
        for way, prompt, transfer in itertools.product(WAYS, PROMPTS, TRANSFERS)
    }
    figure = figures.goodput_curves(512, 1.0, 12, 10, data=data)
    assert [tuple(one.y) for one in figure.data[:3]] == [(100, 0), (100, 0), (100, 100)]
    assert figure.layout.title.text.endswith("whole 2, chunks 2, apart at least 8")
    assert "0, chunks 0" in figures.goodput_curves(512, 0.05, 12, 10, data=data).layout.title.text
    with pytest.raises(ValueError, match="prompt and transfer"):
        figures.goodput_curves(7, data=data)
