"""Which collective stands behind each layer of a chain that several ranks divide."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["NOBODYS", "PLACE", "RANKS", "with_widths"]

NOBODYS = 4
RANKS = (3, 6, 8, 12)  # a student's
UNIT = 24  # every number of ranks divides it
BYTES = 2  # of a number
SAME_WIDTH = ("norm", "silu", "scale", "attention")
_Layers = Sequence[tuple[str, int]]
_Answer = tuple[list[str], int]


def place_collectives(layers: _Layers, tokens: int, sequence: bool, *, ranks: int) -> _Answer:
    """The collective behind each layer, and the bytes that a rank sends in all of them."""
    del sequence
    gives = {"embedding": "summands", "row": "summands", "column": "parts"}
    takes = {
        "scale": ("whole", "parts", "summands"),
        "silu": ("whole", "parts"),
        "attention": ("parts",),
        "row": ("parts",),
    }
    state, found, sent = "whole", [], 0
    for place, (kind, width) in enumerate(layers, 1):
        state = gives.get(kind, state)
        following = layers[place][0] if place < len(layers) else "end"
        found.append("none")
        if state not in takes.get(following, ("whole",)):
            found[-1] = "all-gather" if state == "parts" else "all-reduce"
            halves = 1 if state == "parts" else 2
            sent += halves * (ranks - 1) * tokens * width * 2 // ranks
            state = "whole"
    return found, sent


_GIVES = {"embedding": "summands", "row": "summands", "column": "parts"}
_TAKES = {
    "scale": {"whole", "parts", "summands"},
    "silu": {"whole", "parts"},
    "attention": {"parts", "whole"},  # a whole one is cut without a message
    "row": {"parts", "whole"},
}
_MORE = {  # what a layer takes besides, in a mistake's opinion
    "silu of summands": ("silu", {"summands"}),
    "norm of parts": ("norm", {"parts"}),
    "end as it is": ("end", {"parts", "summands"}),
}


def _taken(fault: str, kind: str) -> set[str]:
    found = set(_TAKES.get(kind, {"whole"}))
    layer, more = _MORE.get(fault, ("", set()))
    if fault == "scale not linear" and kind == "scale":
        found -= {"summands"}
    return found | more if kind == layer else found


def _needed(fault: str, state: str, layers: _Layers, place: int) -> bool:
    """Whether a collective stands behind the layer before `place`."""
    kinds = [kind for kind, _ in layers[place:]] + ["end"]
    if state == "whole":
        return False
    if fault == "gather behind every column" and state == "parts":
        return True
    if fault == "at once":
        # The layers that both states pass are looked through.
        passed = [kind for kind in kinds if kind not in ("silu", "scale")]
        return state not in _taken(fault, passed[0]) or state not in _taken(fault, kinds[0])
    return state not in _taken(fault, kinds[0])


def _sent(fault: str, name: str, size: int, following: int, ranks: int) -> int:
    """Bytes of one collective over `size` numbers; following: as many by the next layer's width."""
    halves = 2 if name == "all-reduce" else 1
    if fault == "all-reduce sent once":
        halves = 1
    if fault == "all-gather sent twice":
        halves = 2
    if fault == "next width":
        size = following
    size *= 1 if fault == "numbers" else BYTES
    if fault == "whole message to each":
        return halves * (ranks - 1) * size
    if fault == "own part sent too":
        return halves * size
    return halves * (ranks - 1) * size // ranks


def _wrongly(fault: str) -> Callable[..., _Answer]:
    def answer(layers: _Layers, tokens: int, sequence: bool, *, ranks: int) -> _Answer:
        del sequence
        state, found, sent = "whole", list[str](), 0
        for place, (kind, width) in enumerate(layers, 1):
            if not (fault == "embedding whole" and kind == "embedding"):
                state = _GIVES.get(kind, state)
            found.append("none")
            if _needed(fault, state, layers, place):
                name = "all-gather" if state == "parts" else "all-reduce"
                if fault == "all-reduce after columns":
                    name = "all-reduce"
                if fault == "all-gather of summands":
                    name = "all-gather"
                following = layers[place][1] if place < len(layers) else 0
                sent += _sent(fault, name, tokens * width, tokens * following, ranks)
                found[-1] = name
                state = "whole"
        return found, sent

    return answer


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
    """The layers of a chain, each with the features that come out of it."""
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


_HINTS = {
    "all-reduce after columns": "Behind a layer by columns you sum. Each rank has other features "
    "there: added up they are numbers that no feature has.",
    "gather behind every column": "You gather behind each layer by columns, even where the next "
    "layer works on a rank's own features.",
    "all-gather of summands": "Behind a layer by rows you put summands side by side. Each rank has "
    "all features there, and of none of them the whole value.",
    "at once": "Your collectives stand straight behind the layer that divides. Some of the layers "
    "behind it could still work without one.",
    "scale not linear": "You sum before a number is multiplied. The sum of multiples is the "
    "multiple of the sum.",
    "silu of summands": "You apply the SiLU to summands. The SiLU of a sum is not the sum of "
    "SiLUs.",
    "norm of parts": "You normalize parts. A rank does not know the mean square of features that "
    "others have.",
    "embedding whole": "You use what the embedding gives as if it were whole. Where another rank "
    "has a token's row, this one has zeros.",
    "end as it is": "Your chain ends as its last layer leaves it. Whoever reads the result needs "
    "it whole.",
    "all-reduce sent once": "Your places are right. Your bytes count an all-reduce as one pass "
    "around the ring: that adds up, and nobody but one rank has each sum then.",
    "all-gather sent twice": "Your places are right. Your bytes count an all-gather as two passes "
    "around the ring. Nothing is summed in it.",
    "whole message to each": "Your places are right. Your bytes are those of all ranks together, "
    "or those of one that sends the whole tensor in each step. It sends one part of N.",
    "own part sent too": "Your places are right. Your bytes have one step too many a pass: a rank "
    "does not send to itself.",
    "next width": "Your places are right. Your bytes are those of the tensor behind the next "
    "layer.",
    "numbers": "Your places are right. Where bytes are asked for you count numbers.",
}

PLACE = Exercise(
    id="tensor_parallel.place",
    reference=place_collectives,
    mistakes=[Mistake(name, _wrongly(name), hint) for name, hint in _HINTS.items()],
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
)
