"""Dynamic trees: the chosen nodes are the best ones, and drafts are trees."""

from __future__ import annotations

import itertools
import random

import pytest

from labcore.decoding.eagle import Costs, Grown


def grown_at_random(draw: random.Random, levels: int = 3, ranks: int = 2) -> Grown:
    grown, ends = Grown(), [-1]
    for _ in range(levels):
        chances = []
        for _ in ends:
            row = sorted((draw.random() for _ in range(ranks)), reverse=True)
            whole = sum(row) + draw.random()
            chances.append([one / whole for one in row])
        grown.add(ends, chances, [draw.sample(range(50), ranks) for _ in ends])
        last = list(grown.last_level())
        ends = sorted(draw.sample(last, min(len(last), draw.randint(1, 2))))
    return grown


def test_the_best_nodes_are_the_best_of_all_subsets(seed: int) -> None:
    draw = random.Random(seed)
    kinds = set()
    for _ in range(40):
        grown = grown_at_random(draw)
        rows = sorted(draw.sample(range(2, 9), 3))
        steps = itertools.accumulate(draw.random() / 3 for _ in rows)
        forward = ((1, 1.0), *((row, 1 + step) for row, step in zip(rows, steps, strict=True)))
        costs = Costs(forward=forward, worth=draw.uniform(0.5, 2), branching=draw.random() / 3)

        def value(nodes, grown=grown, costs=costs) -> float:
            sure = sum(grown.confidence[node] for node in nodes)
            cost = costs.of_rows(len(nodes) + 1)
            if len({grown.parents[node] for node in nodes}) < len(nodes):
                cost += costs.branching
            return sure - costs.worth * cost

        found = costs.best(grown)
        whole = [
            nodes
            for size in range(len(grown.tokens) + 1)
            for nodes in itertools.combinations(range(len(grown.tokens)), size)
            if all(grown.parents[node] in (-1, *nodes) for node in nodes)
        ]
        assert tuple(sorted(found)) in whole
        assert value(found) == pytest.approx(max(map(value, whole)))
        kinds.add((len(found) > 1, len({grown.parents[node] for node in found}) < len(found)))
    assert kinds == {(False, False), (True, False), (True, True)}


def test_drafts_keep_each_nodes_path(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        grown = grown_at_random(draw)
        nodes = grown.ranked()[: draw.randint(1, 6)]
        draft = grown.draft(nodes)
        paths = []
        for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        wanted = [
            tuple(grown.tokens[one] for one in reversed(grown.way(node))) for node in sorted(nodes)
        ]
        assert paths == wanted and draft.q is None


def test_costs_are_interpolated_and_end() -> None:
    some = ((1, 1.0), (3, 1.5), (4, 2.0))
    costs = Costs(forward=some)
    assert [costs.of_rows(rows) for rows in (1, 2, 3, 4)] == [1.0, 1.25, 1.5, 2.0]
    assert costs.of_rows(5) == float("inf")
    grown = Grown()
    grown.add([-1], [[0.9, 0.08]], [[4, 7]])
    assert Costs(forward=((1, 1.0),)).best(grown) == []
    # The rows cost 0.25 each: 0.08 tokens pay below 0.32 tokens per unit, 0.9 below 3.6.
    for worth, nodes in ((0.3, [0, 1]), (0.34, [0]), (3.5, [0]), (3.7, [])):
        assert Costs(forward=some, worth=worth, branching=0).best(grown) == nodes, worth


def test_only_the_surest_of_the_last_level_go_on() -> None:
    grown = Grown()
    grown.add([-1], [[0.5, 0.3, 0.15]], [[1, 2, 3]])
    assert Costs(go_on=0.1, beam=2).expanded(grown) == [0, 1]
    assert Costs(go_on=0.4, beam=2).expanded(grown) == [0]
    assert Costs(go_on=0.6, beam=2).expanded(grown) == []
    grown.add([0, 1], [[0.2, 0.1], [0.9, 0.05]], [[4, 5], [6, 7]])
    assert grown.confidence[3:] == pytest.approx([0.1, 0.05, 0.27, 0.015])
    assert Costs(go_on=0.1, beam=1).expanded(grown) == [5]
    assert [grown.row_of(node) for node in range(3, 7)] == [0, 0, 1, 1]


def test_costs_that_say_nothing_are_refused() -> None:
    for forward in ((), ((2, 1.0),), ((1, 1.0), (3, 1.2), (3, 1.3)), ((1, 2.0),)):
        with pytest.raises(ValueError, match=r"start with \(1, 1.0\)"):
            Costs(forward=forward)
    for name in ("beam", "ranks"):
        with pytest.raises(ValueError, match=name):
            Costs(**{name: 0})
