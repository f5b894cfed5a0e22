"""Place the collectives after the layers of a chain that several ranks split."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["NOBODYS", "PLACE", "RANKS", "with_widths"]

NOBODYS = 4
RANKS = (3, 6, 8, 12)  # for numbered students
UNIT = 24  # every number of ranks divides it
SAME_WIDTH = ("norm", "silu", "scale", "attention")
_Layers = Sequence[tuple[str, int]]
_Answer = tuple[list[str], int]


def place_collectives(layers: _Layers, tokens: int, sequence: bool, *, ranks: int) -> _Answer:
    """Return the collective after each layer, and the bytes that a rank sends in all of them."""
    del sequence
    gives = {"embedding": "summands", "row": "summands", "column": "parts"}
    takes = {
        "scale": ("parts", "summands"),
        "silu": ("parts",),
        "attention": ("parts",),
        "row": ("parts",),
    }
    state, found, sent = "whole", [], 0
    for place, (kind, width) in enumerate(layers, 1):
        state = gives.get(kind, state)
        following = layers[place][0] if place < len(layers) else "end"
        found.append("none")
        if state not in ("whole", *takes.get(following, ())):
            found[-1] = "all-gather" if state == "parts" else "all-reduce"
            halves = 2 if found[-1] == "all-reduce" else 1
            sent += halves * (ranks - 1) * tokens * width * 2 // ranks
            state = "whole"
    return found, sent


_CHAINS = (
    "norm column silu row",
    "column",
    "embedding norm column attention row scale norm column silu row norm column",
    "column silu norm linear",
    "linear silu column scale silu column row",
    "embedding scale silu norm",
    "column row silu column row scale",
    "norm column scale norm silu linear column silu",
)


def with_widths(chance: random.Random, chain: str) -> list[tuple[str, int]]:
    """Return the layers of a chain, each with the number of features that it outputs."""
    kinds = chain.split()
    widths = iter(chance.sample(range(1, 200), len(kinds) + 1))
    width, layers = UNIT * next(widths), []
    for kind in kinds:
        if kind not in SAME_WIDTH:
            width = UNIT * next(widths)
        layers.append((kind, width))
    return layers


def _cases(seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    return [
        {
            "layers": with_widths(chance, chain),
            "tokens": UNIT * chance.randint(1, 9),
            "sequence": False,
        }
        for chain in _CHAINS
    ]


def _own_ranks(student: int) -> Mapping[str, Any]:
    chance = random.Random(f"tensor_parallel.place:{student}")
    return {"ranks": chance.choice(RANKS) if student else NOBODYS}


PLACE = Exercise(
    id="tensor_parallel.place",
    points=5,
    beyond=2,
    reference=place_collectives,
    mistakes=[
        Mistake(
            "all-reduce after columns",
            ('"all-gather" if state == "parts" else ', ""),
            "Behind a layer by columns you sum. Each rank has other features there: added up they "
            "are numbers that no feature has.",
        ),
        Mistake(
            "gather behind every column",
            ("if state not in", 'if state == "parts" or state not in'),
            "You gather behind each layer by columns, even where the next layer works on a rank's "
            "own features.",
        ),
        Mistake(
            "all-gather of summands",
            (' if state == "parts" else "all-reduce"', ""),
            "Behind a layer by rows you put summands side by side. Each rank has all features "
            "there, and of none of them the whole value.",
        ),
        Mistake(
            "at once",
            (
                "if state not in",
                'last = next((kind for kind, _ in layers[place:] if kind not in ("silu", "scale")),'
                ' "end")\n        if state not in ("whole", *takes.get(last, ())) or state not in',
            ),
            "Your collectives stand straight behind the layer that divides. Some of the layers "
            "behind it could still work without one.",
        ),
        Mistake(
            "scale not linear",
            ('"parts", "summands"', '"parts",'),
            "You sum before a number is multiplied. The sum of multiples is the multiple of the "
            "sum.",
        ),
        Mistake(
            "silu of summands",
            ('"silu": ("parts",)', '"silu": ("parts", "summands")'),
            "You apply the SiLU to summands. The SiLU of a sum is not the sum of SiLUs.",
        ),
        Mistake(
            "norm of parts",
            ('"silu"', '"norm": ("parts",), "silu"'),
            "You normalize parts. A rank does not know the mean square of features that others "
            "have.",
        ),
        Mistake(
            "embedding whole",
            ('"embedding": "summands", ', ""),
            "You use what the embedding gives as if it were whole. Where another rank has a "
            "token's row, this one has zeros.",
        ),
        Mistake(
            "end as it is",
            ('"silu"', '"end": ("parts", "summands"), "silu"'),
            "Your chain ends as its last layer leaves it. Whoever reads the result needs it whole.",
        ),
        Mistake(
            "all-reduce sent once",
            ('2 if found[-1] == "all-reduce" else 1', "1"),
            "Your places are right. Your bytes count an all-reduce as one pass around the ring: "
            "that adds up, and nobody but one rank has each sum then.",
        ),
        Mistake(
            "all-gather sent twice",
            ('2 if found[-1] == "all-reduce" else 1', "2"),
            "Your places are right. Your bytes count an all-gather as two passes around the ring. "
            "Nothing is summed in it.",
        ),
        Mistake(
            "whole message to each",
            (" // ranks", ""),
            "Your places are right. Your bytes are those of all ranks together, or those of one "
            "that sends the whole tensor in each step. It sends one part of N.",
        ),
        Mistake(
            "own part sent too",
            ("(ranks - 1) * tokens * width * 2 // ranks", "tokens * width * 2"),
            "Your places are right. Your bytes have one step too many a pass: a rank does not send "
            "to itself.",
        ),
        Mistake(
            "next width",
            ("tokens * width", 'tokens * [*layers, ("end", 0)][place][1]'),
            "Your places are right. Your bytes are those of the tensor behind the next layer.",
        ),
        Mistake(
            "width of the layer that needs it",
            ("tokens * width", 'tokens * [*layers, ("end", width)][place][1]'),
            "Your places are right. Your bytes are counted with the width of the layer that needs "
            "the tensor. What is sent is what the layer before it gives.",
        ),
        Mistake(
            "numbers",
            ("width * 2", "width"),
            "Your places are right. Where bytes are asked for you count numbers.",
        ),
    ],
    cases=_cases,
    variant=_own_ranks,
    returns=("collectives", "bytes"),
    explanation="What a rank has is one of three things: the whole tensor, its own features, or a "
    "summand of every feature. A split by columns gives the second, a split by rows the third, "
    "and each needs another collective to become whole. None is needed while the next layer can "
    "do its work on what is there, which is why a column split is followed by a row split: "
    "everything between works feature by feature or head by head. Multiplying by a number passes "
    "a sum; a SiLU and a norm do not. The vocabulary-parallel embedding is a split by rows in "
    "disguise, as its input is a vector with a single one. This reference leaves the norms whole "
    "on every rank.",
    hints=(
        "For each layer of the example, write down which of the three things a rank has after it. "
        'Then find the next layer in the table and read its column "works on". What follows the '
        "last layer?",
        "Walk along the chain and keep track of the state: whole, features, or summands. A "
        "`column` sets it to features, and an `embedding` or a `row` sets it to summands. If the "
        "next layer does not work on the state, or the chain ends, a collective makes it whole: "
        "an all-gather for features, an all-reduce for summands.",
        '`works_on = {"features": ("silu", "scale", "attention", "row"), "summands": ("scale",)}` '
        "lists for each state the layers that need no collective before them. A collective sends "
        "`passes * (ranks - 1) * tokens * width * 2 // ranks` bytes, with the width of the layer "
        "before it.",
    ),
)
