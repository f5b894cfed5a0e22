"""How unequal requests share one forward, and which beginnings of prompts are read once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import plotly.graph_objects as go

from labcore.checks import one_of
from labcore.studies.inflight.packed import Packed, pack
from labcore.studies.inflight.prefixes import Edge, found_in_blocks, radix_tree, tokenized
from labcore.ui.explorer import describe
from labcore.ui.theme import PALETTE

__all__ = ["LAYOUTS", "packed_mask", "prefix_tree"]

LAYOUTS = ("packed", "padded")
_COLORS = (PALETTE["blue"], PALETTE["green"], PALETTE["orange"])
_WASTE = "#a7adb4"
_B = (2, 1)  # tokens that request B's cache holds, and that it reads


@lru_cache(maxsize=128)
def _step(held: int, chunk: int) -> Packed:
    return pack([(held, 1), _B, (0, chunk)])


def packed_mask(layout: str = "packed", chunk: int = 4, held: int = 5) -> go.Figure:
    """Draw who reads what in a step of three requests, packed or padded to a rectangle.

    A holds `held` tokens and decodes, B holds 2 and decodes, and C reads the first `chunk`
    tokens of its prompt. Each row of the picture is a token of the step, and each column a key.
    Packed, the mask is the one that the engine's attention was measured to have.
    Raises ValueError for another layout.
    """
    one_of("layout", layout, LAYOUTS)
    step = _step(held, chunk)
    sizes = [(held, 1), _B, (0, chunk)]
    longest, widest = max(read for _, read in sizes), max(sum(one) for one in sizes)
    if layout == "packed":
        rows = [f"{'ABC'[who]}{at + 1}" for who, at in step.rows]
        keys = [f"{'ABC'[who]}{at + 1}" for who, at in step.keys]
        z: list[list[int | None]] = [
            [who if seen else None for seen in line]
            for (who, _), line in zip(step.rows, step.mask, strict=True)
        ]
        computed, wasted, own = step.pairs, 0, step.computed
    else:
        rows, z, wasted = [], [], 0
        keys = [str(at + 1) for at in range(widest)]
        for who, (begin, read) in enumerate(sizes):
            for at in range(longest):
                real = at < read
                rows.append(f"{'ABC'[who]}{begin + at + 1}" if real else f"pad {'ABC'[who]}{at}")
                line = [who if real and key <= begin + at else len(sizes) for key in range(widest)]
                wasted += line.count(len(sizes))
                z.append([*line])
        computed = own = len(rows) * widest
    title = f"{len(rows)} tokens; {computed} pairs of query and key,<br>"
    title += (
        f"{wasted} of them for nothing" if wasted else f"all needed; our CPU form computes {own}"
    )
    return describe(
        go.Figure(
            [_cells(z, rows, keys), *_legend(padded=layout == "padded")],
            {
                "title": title,
                "xaxis": {
                    "title": "keys in the cache, after this step", "type": "category",
                    "showgrid": False, "tickangle": 0, "nticks": 14,
                },
                "yaxis": {
                    "title": "tokens of the step", "autorange": "reversed", "type": "category",
                    "showgrid": False,
                },
                "height": 480, "margin": {"t": 64}, "legend": {"xref": "container"},
            },
        ),
        f"{layout}: A and B decode, C reads {chunk} tokens: {len(rows)} go "
        f"through the linear layers, and attention has {computed} pairs of query and key, "
        f"{wasted} of them for nothing. Our CPU form computes {own}.",
    )  # fmt: skip


def _cells(
    z: Sequence[Sequence[int | None]], rows: Sequence[str], keys: Sequence[str]
) -> dict[str, Any]:
    colors = [*_COLORS, _WASTE]
    scale: list[list[Any]] = []
    for at, color in enumerate(colors):
        scale += [[at / len(colors), color], [(at + 1) / len(colors), color]]
    return {
        "type": "heatmap", "z": z, "x": keys, "y": rows, "zmin": -0.5, "zmax": len(colors) - 0.5,
        "colorscale": scale, "showscale": False, "xgap": 2, "ygap": 2, "hoverinfo": "skip",
    }  # fmt: skip


def _legend(*, padded: bool) -> list[dict[str, Any]]:
    kinds = [("A decodes", _COLORS[0]), ("B decodes", _COLORS[1]), ("C reads", _COLORS[2])]
    return [
        {
            "type": "scatter", "x": [None], "y": [None], "mode": "markers", "name": name,
            "marker": {"symbol": "square", "size": 12, "color": color},
            "visible": True if name != "for nothing" or padded else "legendonly",
            "showlegend": name != "for nothing" or padded,
        }
        for name, color in [*kinds, ("for nothing", _WASTE)]
    ]  # fmt: skip


@lru_cache(maxsize=1)
def _prompts() -> list[list[int]]:
    return tokenized()


def prefix_tree(prompts: int = 6, block_size: int = 16) -> go.Figure:
    """Draw the radix tree of the first prompts, and what blocks with chained hashes find.

    prompts: how many of `prefixes.PROMPTS` have come, in order. block_size: tokens per block. Each
    bar is an edge of the tree, from its first token to its last. The diamonds mark how far each
    prompt was found in full blocks of earlier ones.
    """
    given = _prompts()[:prompts]
    edges = radix_tree(given)
    leaf = {one: at for at, one in enumerate(_leaves(edges))}
    places = [sum(leaf[one] for one in edge.prompts) / len(edge.prompts) for edge in edges]
    lines: dict[bool, tuple[list[float | None], list[float | None]]] = {
        True: ([], []),
        False: ([], []),
    }
    stems: tuple[list[float | None], list[float | None]] = ([], [])
    for edge, place in zip(edges, places, strict=True):
        x, y = lines[len(edge.prompts) > 1]
        x += [edge.begin + 0.7, edge.end, None]
        y += [place, place, None]
        if edge.parent >= 0:
            stems[0].extend([edge.begin, edge.begin, None])
            stems[1].extend([places[edge.parent], place, None])
    found = found_in_blocks(given, block_size)
    tree = sum(edge.end - edge.begin for edge in edges)
    total = sum(map(len, given))
    title = f"{total} tokens: the tree reads {tree},<br>blocks of {block_size} read "
    title += f"{total - sum(found)}"
    return describe(
        go.Figure(
            [
                _line(*stems, "branches", "#7d8590", 2, legend=False),
                _line(*lines[True], "shared", PALETTE["blue"], 12),
                _line(*lines[False], "one prompt's own", PALETTE["orange"], 12),
                {
                    "type": "scatter", "x": found, "y": [leaf[one] - 0.3 for one in range(prompts)],
                    "mode": "markers", "name": "found in blocks up to here",
                    "marker": {"symbol": "diamond", "size": 10, "color": PALETTE["vermillion"]},
                },
            ],
            {
                "title": title,
                "xaxis": {"title": "tokens from the beginning", "range": [-2, 100], "nticks": 6},
                "yaxis": {
                    "title": "prompt", "tickvals": list(leaf.values()),
                    "ticktext": [str(one + 1) for one in leaf], "range": [5.6, -0.8],
                    "showgrid": False, "zeroline": False,
                },
                "height": 440, "margin": {"t": 64}, "legend": {"xref": "container"},
            },
        ),
        f"{prompts} prompts, {total} tokens. As a tree, {tree} are read; with blocks of "
        f"{block_size}, {total - sum(found)} are. Found in blocks: "
        + ", ".join(f"prompt {one + 1} {count}" for one, count in enumerate(found)) + ".",
    )  # fmt: skip


def _leaves(edges: Sequence[Edge]) -> list[int]:
    """Return the prompts in the order of their last edges, in which no branches cross."""
    last = {one: at for at, edge in enumerate(edges) for one in edge.prompts}
    return sorted(last, key=lambda one: (last[one], one))


def _line(
    x: list[float | None], y: list[float | None], name: str, color: str, width: int, *,
    legend: bool = True,
) -> dict[str, Any]:  # fmt: skip
    return {
        "type": "scatter", "x": x or [None], "y": y or [None], "mode": "lines", "name": name,
        "line": {"color": color, "width": width, "simplify": False}, "hoverinfo": "skip",
        "showlegend": legend,
    }  # fmt: skip
