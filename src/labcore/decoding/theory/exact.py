"""The exact distribution of what a verifier emits, over every draft, coin and token, in fp64.

A model here is a `Table`, a function from a context to its distribution. With at most 8 tokens in
the vocabulary and three drafted ones, the whole probability tree takes less than a second, and a
lossless verifier has the target's distribution up to rounding.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from labcore import checks
from labcore.decoding.contract import Accepted, Draft, Verifier
from labcore.decoding.draws import Drawing, checked_weights
from labcore.decoding.verify import TypicalAcceptance

__all__ = [
    "Case",
    "Propose",
    "Table",
    "cases",
    "chain_proposal",
    "expected_acceptance",
    "outcomes",
    "output_law",
    "proposal",
    "random_table",
    "step_law",
    "target_law",
    "total_variation",
    "typical_bias",
]

T = TypeVar("T")
Context = tuple[int, ...]
Table = Callable[[Context], Tensor]
"""`table(context) -> [V]`: the distribution of the token after the context."""
Propose = Callable[[Context, Drawing], Draft]
"""`propose(context, draws) -> Draft`: all its randomness comes from `draws`."""


class _Script:
    """Answers each question with the branch that a script names, or the first one past its end."""

    def __init__(self, script: Sequence[int]) -> None:
        self.branches = list(script)
        self.counts: list[int] = []
        self.probability = 1.0
        self.log: list[float] = []

    def _choose(self, options: list[tuple[int, float]]) -> int:
        possible = [option for option in options if option[1] > 0]
        if len(self.branches) == len(self.counts):
            self.branches.append(0)
        answer, chance = possible[self.branches[len(self.counts)]]
        self.counts.append(len(possible))
        self.probability *= chance
        self.log.append(chance)
        return answer

    def coin(self, probability: float) -> bool:
        if math.isnan(probability):
            raise ValueError("probability must be a number, got nan")
        heads = min(max(float(probability), 0.0), 1.0)
        return bool(self._choose([(1, heads), (0, 1 - heads)]))

    def token(self, weights: Tensor) -> int:
        wide = checked_weights(weights)
        return self._choose(list(enumerate((wide / wide.sum()).tolist())))


def outcomes(experiment: Callable[[Drawing], T]) -> list[tuple[T, float]]:
    """Return every outcome of `experiment(draws)` with its probability; they add up to 1.

    The experiment may ask `draws` only for coins and tokens, and must do the same again if it gets
    the same answers. The log of these draws holds the probability of each answer.
    """
    found: list[tuple[T, float]] = []
    script: list[int] | None = []
    while script is not None:
        draws = _Script(script)
        found.append((experiment(draws), draws.probability))
        script = draws.branches[: len(draws.counts)]
        while script and script[-1] + 1 == draws.counts[len(script) - 1]:
            script.pop()
        if script:
            script[-1] += 1
        else:
            script = None
    return found


def random_table(
    vocab: int, seed: int, *, support: Collection[int] | None = None, one_hot: bool = False
) -> Table:
    """Return a model with a random fp64 row per context, uniform on the simplex over `support`.

    one_hot: put all mass on one token, as at temperature 0. ValueError for an empty support or a
    token outside the vocabulary.
    """
    checks.positive_int("vocab", vocab)
    tokens = sorted(range(vocab) if support is None else support)
    if not tokens or tokens[0] < 0 or tokens[-1] >= vocab:
        raise ValueError(f"support must hold tokens from 0 to {vocab - 1}, got {tokens}")

    @functools.cache
    def table(context: Context) -> Tensor:
        chance = random.Random(f"{seed} {context}")
        row = torch.zeros(vocab, dtype=torch.float64)
        for token in [chance.choice(tokens)] if one_hot else tokens:
            row[token] = chance.expovariate(1.0)
        return row / row.sum()

    return table


def _path(parents: Sequence[int], tokens: Sequence[int], node: int) -> Context:
    """Return the tokens from the root to `node`, inclusive."""
    found: list[int] = []
    while node >= 0:
        found.append(tokens[node])
        node = parents[node]
    return tuple(reversed(found))


def proposal(q: Table, parents: Sequence[int], certain: Collection[int] | None = None) -> Propose:
    """Return a tree proposer: each node is drawn from q after its own path, siblings independently.

    certain: nodes that aren't drawn but take the most probable token, a second such sibling the
    next most probable; their rows of q are one-hot. None: all of them, with q = None as for an
    n-gram.
    """
    sure = set(range(len(parents)) if certain is None else certain)

    def propose(context: Context, draws: Drawing) -> Draft:
        tokens: list[int] = []
        rows: list[Tensor] = []
        for node, parent in enumerate(parents):
            row = q(context + _path(parents, tokens, parent))
            if node in sure:
                rank = sum(parents[elder] == parent for elder in sure if elder < node)
                token = int(row.argsort(descending=True, stable=True)[rank])
                row = torch.zeros_like(row).index_fill_(0, torch.tensor([token]), 1)
            else:
                token = draws.token(row)
            tokens.append(token)
            rows.append(row)
        return Draft(
            torch.tensor(tokens, dtype=torch.int64),
            torch.tensor(list(parents), dtype=torch.int32),
            None if certain is None or not rows else torch.stack(rows),
        )

    return propose


def chain_proposal(q: Table, gamma: int, *, drawn: bool = True) -> Propose:
    """Return a proposer of chains of gamma tokens, drawn from q or, like an n-gram's, the best."""
    return proposal(q, list(range(-1, gamma - 1)), () if drawn else None)


def _steps(
    verify: Verifier, p: Table, propose: Propose, context: Context
) -> list[tuple[Draft, Accepted, float]]:
    """Return every draft and decision of one step with its probability."""
    found = []
    for draft, chance in outcomes(lambda draws: propose(context, draws)):
        tokens, parents = draft.tokens.tolist(), draft.parents.tolist()
        rows = torch.stack(
            [p(context + _path(parents, tokens, node)) for node in range(-1, len(draft))]
        )
        decide = functools.partial(verify, rows, draft)
        found += [(draft, decision, chance * share) for decision, share in outcomes(decide)]
    return found


def _emitted(draft: Draft, accepted: Accepted) -> Context:
    tokens = draft.tokens.tolist()
    return (*(tokens[node] for node in accepted.path), accepted.next_token)


def target_law(p: Table, length: int, context: Context = ()) -> Tensor:
    """Return the joint distribution of the target's next `length` tokens: fp64 [V] * length."""
    row = p(context).double()
    if length == 1:
        return row
    following = [target_law(p, length - 1, (*context, token)) for token in range(len(row))]
    return torch.stack([share * law for share, law in zip(row, following, strict=True)])


def output_law(
    verify: Verifier, p: Table, propose: Propose, length: int, context: Context = ()
) -> Tensor:
    """Return the joint distribution of the first `length` tokens emitted: [V] * length.

    Speculative decoding takes as many steps as it needs, each from what was emitted before; tokens
    that the last step emits past `length` are summed out. A verifier is lossless if this equals
    `target_law`.
    """
    checks.positive_int("length", length)
    size = len(p(context))
    law = torch.zeros([size] * length, dtype=torch.float64)
    for said, chance in _said(verify, p, propose, context, length).items():
        rest = length - len(said)
        tail = output_law(verify, p, propose, rest, context + said) if rest else 1
        law[said] += chance * tail
    return law


def step_law(
    verify: Verifier, p: Table, propose: Propose, length: int, context: Context = ()
) -> Tensor:
    """Like `output_law`, but after the first step the target continues alone.

    If it equals `target_law` after every context, each step is lossless, and so are all of them. It
    costs one step, and separates the first wrong step from what follows.
    """
    checks.positive_int("length", length)
    size = len(p(context))
    law = torch.zeros([size] * length, dtype=torch.float64)
    for said, chance in _said(verify, p, propose, context, length).items():
        rest = length - len(said)
        law[said] += chance * (target_law(p, rest, context + said) if rest else 1)
    return law


def _said(
    verify: Verifier, p: Table, propose: Propose, context: Context, length: int
) -> dict[Context, float]:
    """Return what one step emits, cut at `length`, with its probability."""
    found: dict[Context, float] = {}
    for draft, accepted, chance in _steps(verify, p, propose, context):
        said = _emitted(draft, accepted)[:length]
        found[said] = found.get(said, 0.0) + chance
    return found


def total_variation(a: Tensor, b: Tensor) -> float:
    """Return half the sum of |a - b|: the largest difference in the probability of an event."""
    if a.shape != b.shape:
        came = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ValueError(f"a and b must have the same shape, got {came}; use one length for both")
    return (a.double() - b.double()).abs().sum().item() / 2


def expected_acceptance(
    verify: Verifier, p: Table, propose: Propose, context: Context = ()
) -> list[float]:
    """Return the probabilities that at least 1, 2, ... drafted tokens of one step are accepted."""
    reached: list[float] = []
    for _, accepted, chance in _steps(verify, p, propose, context):
        reached += [0.0] * (len(accepted.path) - len(reached))
        for depth in range(len(accepted.path)):
            reached[depth] += chance
    return reached


def typical_bias(
    typical: TypicalAcceptance, p: Table, propose: Propose, length: int, context: Context = ()
) -> float:
    """Return the bias of typical acceptance: its total variation from the target's distribution."""
    law = output_law(typical, p, propose, length, context)
    return total_variation(law, target_law(p, length, context))


@dataclass(frozen=True, slots=True)
class Case:
    """A target, a proposer for it, and how many tokens to compare: the most that a step emits."""

    p: Table
    propose: Propose
    length: int

    def distance(self, verify: Verifier) -> float:
        """Return one step's total variation from the target; 0 up to rounding if it's lossless."""
        law = step_law(verify, self.p, self.propose, self.length)
        return total_variation(law, target_law(self.p, self.length))


def cases(seed: int = 0, vocab: int = 4) -> dict[str, Case]:
    """Return named cases, with tables drawn from `seed`; vocab at least 4.

    They cover chains and trees, drawn and one-hot; p and q with zeros, with no token in common, and
    equal.
    """
    if checks.positive_int("vocab", vocab) < 4:
        raise ValueError(f"vocab must be at least 4 for two disjoint halves, got {vocab}")
    p, q = random_table(vocab, 2 * seed), random_table(vocab, 2 * seed + 1)
    low, high = range(vocab // 2), range(vocab // 2, vocab)
    few = random_table(vocab, 2 * seed, support=range(vocab - 1))
    other = random_table(vocab, 2 * seed + 1, support=range(1, vocab))
    tree = (-1, -1, 0, 0)
    return {
        "drawn chain": Case(p, chain_proposal(q, 2), 3),
        "one-hot chain": Case(p, chain_proposal(q, 2, drawn=False), 3),
        "q equals p": Case(p, chain_proposal(p, 2), 3),
        "zeros in p and q": Case(few, chain_proposal(other, 2), 3),
        "nothing in common": Case(
            random_table(vocab, 2 * seed, support=low),
            chain_proposal(random_table(vocab, 2 * seed + 1, support=high), 2),
            3,
        ),
        "drawn tree": Case(p, proposal(q, (-1, -1, 0), ()), 3),
        "one-hot tree": Case(p, proposal(q, tree), 3),
        "mixed tree": Case(p, proposal(q, tree, (0, 3)), 3),
        "no draft": Case(p, proposal(q, ()), 1),
    }
