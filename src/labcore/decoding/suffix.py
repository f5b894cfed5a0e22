"""Drafts from a suffix automaton: what followed the row's last tokens so far, and how often.

An n-gram lookup takes one earlier occurrence. Here all occurrences count, in the row itself and in
the outputs of earlier requests, and the match is as long as it can be.
Source: Oliaro et al., SuffixDecoding, 2024, arXiv:2411.04975. Lookahead decoding (Fu et al., 2024,
arXiv:2402.02057), which also needs no draft model, makes the target itself guess n-grams in the
same forward; it isn't built here.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from labcore.checks import non_negative, positive, positive_int
from labcore.decoding.contract import Accepted, Draft, SamplingConfig
from labcore.decoding.rows import check_rows

__all__ = ["Suffix", "SuffixIndex"]

_REACH = 64  # tokens of a row that are matched again after the memory has changed


class _Match(NamedTuple):
    """A pattern in an index: its state and its length in tokens."""

    state: int
    length: int


class _Guess(NamedTuple):
    """A tree of tokens. score: the sum of the nodes' estimated probabilities of being accepted."""

    tokens: list[int]
    parents: list[int]
    score: float


_NO_MATCH, _NO_GUESS = _Match(0, 0), _Guess([], [], 0.0)


class SuffixIndex:
    """A suffix automaton: all substrings of a growing text, with their number of occurrences.

    It has at most two states per token. Appending takes constant time on average, plus one step for
    each state whose substrings end the text, because all of them have occurred once more.
    Source: Blumer et al., 1985, doi:10.1016/0304-3975(85)90157-4.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._count = [-1], [0], [0]
        self._last = 0
        self.size = 0  # tokens

    def append(self, token: int) -> None:
        """Add a token to the text."""
        self.size += 1
        new, state = self._new(self._length[self._last] + 1, {}, 0, 0), self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state >= 0:
            self._link[new] = self._split(state, token)
        self._last = state = new
        while state > 0:
            self._count[state] += 1
            state = self._link[state]

    def _new(self, length: int, following: dict[int, int], link: int, count: int) -> int:
        self._next.append(following)
        self._length.append(length)
        self._link.append(link)
        self._count.append(count)
        return len(self._next) - 1

    def _split(self, state: int, token: int) -> int:
        """Return the state of this state's longest substring plus the token."""
        target = self._next[state][token]
        length = self._length[state] + 1
        if self._length[target] == length:
            return target
        of_target = dict(self._next[target]), self._link[target], self._count[target]
        clone = self._new(length, *of_target)
        self._link[target] = clone
        while state >= 0 and self._next[state].get(token) == target:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def count(self, pattern: Sequence[int]) -> int:
        """Return how often a pattern of at least one token occurs in the text."""
        state = 0
        for token in pattern:
            if token not in self._next[state]:
                return 0
            state = self._next[state][token]
        return self._count[state]

    def repeated(self) -> _Match:
        """Return the longest end of the text that has occurred before."""
        state = max(self._link[self._last], 0)
        return _Match(state, self._length[state])

    def follow(self, match: _Match, token: int) -> _Match:
        """Return the longest end of a match plus the token that occurs in the text."""
        state, length = match
        while state and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        if token not in self._next[state]:
            return _NO_MATCH
        return _Match(self._next[state][token], length + 1)

    def shorter(self, match: _Match) -> _Match:
        """Return the longest shorter end of a match that occurs more often."""
        state = max(self._link[match.state], 0)
        return _Match(state, self._length[state])

    def expand(self, match: _Match, *, nodes: int, depth: int, floor: float, tree: bool) -> _Guess:
        """Return the likeliest continuations of a match as a tree, or as a chain.

        A node's probability is its share among the occurrences of what precedes it, times its
        parent's. The likeliest node comes next, as long as it has at least `floor`.
        """
        tokens: list[int] = []
        parents: list[int] = []
        score, order = 0.0, 0
        # -probability, order, state, token, parent, depth; the match itself is no node.
        heap = [(-1.0, 0, match.state, -1, -1, 0)]
        while heap and len(tokens) <= nodes:
            chance, _, state, token, parent, level = heapq.heappop(heap)
            if level:
                if len(tokens) == nodes:
                    break
                score -= chance
                tokens.append(token)
                parents.append(parent)
            if not tree:  # its siblings
                heap.clear()
            if level == depth:
                continue
            following = self._next[state]
            total = sum(self._count[child] for child in following.values())
            for token, child in following.items():
                share = chance * self._count[child] / total
                if token >= 0 and -share >= floor:
                    order += 1
                    heapq.heappush(heap, (share, order, child, token, len(tokens) - 1, level + 1))
        return _Guess(tokens, parents, score)


class Suffix:
    """Proposes what followed the row's last tokens most often, in the row and in earlier outputs.

    gamma: the most nodes of a draft. factor: nodes per token of the match, so that a long match
    drafts more. floor: the least estimated probability of a node. tree: whether a draft may have
    branches; a chain takes the likeliest token each time. memory: about how many tokens of earlier
    outputs to keep, the newest ones; 0 keeps none. Each row's own prompt and output are always
    searched. The draft is the one with the highest score, over both texts and all lengths of the
    match: the sum of its nodes' estimated probabilities.
    An output enters the memory when its row receives another context. So a prompt that is decoded
    again finds its own output there; measure with memory=0, or let each prompt come once.
    Nothing is drawn: q is one-hot. Raises TypeError or ValueError for other options.
    Source: Oliaro et al., SuffixDecoding, 2024, arXiv:2411.04975.
    """

    reads_hidden = False

    def __init__(
        self,
        *,
        gamma: int = 8,
        factor: float = 1.0,
        floor: float = 0.1,
        tree: bool = False,
        memory: int = 100_000,
    ) -> None:
        self.gamma = positive_int("gamma", gamma)
        self.factor = positive("factor", factor)
        self.floor = non_negative("floor", floor)
        self.tree = tree
        self.memory = int(non_negative("memory", memory))
        self.earlier = SuffixIndex()
        self._outputs: deque[list[int]] = deque()
        self._rows: list[_Row] = []

    def propose(
        self,
        contexts: Sequence[Sequence[int]],
        samplings: Sequence[SamplingConfig],
        max_tokens: Sequence[int],
        generators: Sequence[torch.Generator],
        *,
        hidden: Tensor | None = None,  # noqa: ARG002 - the protocol's
    ) -> list[Draft]:
        """Return a tree without q for each row, empty if nothing matches; see `Proposer`."""
        check_rows(contexts, samplings, max_tokens, generators)
        if len(self._rows) != len(contexts):
            for row in self._rows:
                self._remember(row.output())
            self._rows = [_Row([]) for _ in contexts]
        drafts = []
        for place, (context, most) in enumerate(zip(contexts, max_tokens, strict=True)):
            guess = self._guess(place, list(context), most) if most else _NO_GUESS
            parents = torch.tensor(guess.parents, dtype=torch.int32)
            drafts.append(Draft(torch.tensor(guess.tokens, dtype=torch.int64), parents))
        return drafts

    def commit(self, accepted: Sequence[Accepted]) -> None:
        """Do nothing: the next contexts show what was accepted."""

    def _guess(self, place: int, context: list[int], most: int) -> _Guess:
        row = self._rows[place]
        if context[: len(row.tokens)] != row.tokens or not row.tokens:
            self._remember(row.output())
            self._rows[place] = row = _Row(context)
        row.read(context, self.earlier)
        best = self._best(row.own, row.own.repeated(), most, _NO_GUESS)
        return self._best(self.earlier, row.match, most, best)

    def _best(self, index: SuffixIndex, match: _Match, most: int, best: _Guess) -> _Guess:
        """Return the best guess for a match or a shorter one, if it's better than `best`."""
        while match.length:
            nodes = min(self.gamma, max(1, int(self.factor * match.length)))
            if nodes <= best.score:  # no node has more than 1
                break
            guess = index.expand(match, nodes=nodes, depth=most, floor=self.floor, tree=self.tree)
            best = max(best, guess, key=lambda one: one.score)
            match = index.shorter(match)
        return best

    def _remember(self, output: list[int]) -> None:
        if not output or not self.memory:
            return
        self._outputs.append(output)
        fresh = [output]
        if self.earlier.size + len(output) > 2 * self.memory:
            while sum(map(len, self._outputs)) > self.memory:
                self._outputs.popleft()
            self.earlier, fresh = SuffixIndex(), list(self._outputs)
        for one in fresh:
            self.earlier.append(-1 - self.earlier.size)  # a token of its own: no match crosses it
            for token in one:
                self.earlier.append(token)


class _Row:
    """One row: its text and index, and where its end occurs in the memory."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.own, self.match = SuffixIndex(), _NO_MATCH
        self._prompt = len(prompt)
        self._searched: tuple[SuffixIndex | None, int] = None, 0

    def output(self) -> list[int]:
        """Return the tokens after the prompt."""
        return self.tokens[self._prompt :]

    def read(self, context: list[int], memory: SuffixIndex) -> None:
        """Add the context's new tokens, which continue the row, and follow them in the memory."""
        new = context[len(self.tokens) :]
        self.tokens = context
        for token in new:
            self.own.append(token)
        if self._searched != (memory, memory.size):  # new outputs may have split its states
            self._searched, self.match = (memory, memory.size), _NO_MATCH
            new = context[-_REACH:]
        for token in new:
            self.match = memory.follow(self.match, token)
