"""Drafts by lookup: what followed an earlier occurrence of the row's last tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labcore.checks import one_of, positive_int
from labcore.decoding.contract import Accepted, Draft, SamplingConfig
from labcore.decoding.rows import check_rows, common_prefix

__all__ = ["NGram", "NGramIndex"]


class NGramIndex:
    """Where each n-gram of one row ends; it grows and shrinks with the row.

    tokens: the row. Options as in `NGram`. Adding, removing and looking up one token take one
    dictionary access per n, whatever the length of the row.
    """

    def __init__(
        self,
        maximum: int = 3,
        minimum: int = 1,
        *,
        match: str = "longest",
        occurrence: str = "latest",
    ) -> None:
        if positive_int("maximum", maximum) < positive_int("minimum", minimum):
            raise ValueError(f"maximum must be at least minimum, got {maximum} and {minimum}")
        self.tokens: list[int] = []
        self._sizes = range(minimum, maximum + 1)
        longest = one_of("match", match, ("longest", "shortest")) == "longest"
        self._order = tuple(reversed(self._sizes)) if longest else tuple(self._sizes)
        self._taken = (
            -1 if one_of("occurrence", occurrence, ("latest", "earliest")) == "latest" else 0
        )
        # Ascending ends of each n-gram that has a next token, so never the one at the row's end.
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def follow(self, context: Sequence[int]) -> None:
        """Make the row equal to `context`, at the cost of the tokens that differ."""
        row = list(context)
        kept = common_prefix(self.tokens, row)
        if 2 * kept < len(self.tokens):  # another text: starting over is cheaper
            self.tokens, self._ends, kept = [], {}, 0
        self.truncate(kept)
        for token in row[kept:]:
            self.append(token)

    def append(self, token: int) -> None:
        """Add a token to the row."""
        end = len(self.tokens)
        for size in self._sizes:
            if size > end:
                break
            self._ends.setdefault(tuple(self.tokens[end - size :]), []).append(end)
        self.tokens.append(token)

    def truncate(self, length: int) -> None:
        """Forget all tokens after the first `length`; a shorter row doesn't change."""
        while len(self.tokens) > max(length, 0):
            self.tokens.pop()
            end = len(self.tokens)
            for size in self._sizes:
                if size > end:
                    break
                gram = tuple(self.tokens[end - size :])
                self._ends[gram].pop()  # the last one: ends ascend
                if not self._ends[gram]:
                    del self._ends[gram]

    def lookup(self, count: int) -> list[int]:
        """Return at most `count` tokens that followed the match, or none without a match."""
        length = len(self.tokens)
        for size in self._order:
            if size > length:
                continue
            ends = self._ends.get(tuple(self.tokens[length - size :]))
            if ends:
                start = ends[self._taken]
                return self.tokens[start : start + count]
        return []


class NGram:
    """Proposes what followed an earlier occurrence of the row's last n tokens, without a model.

    maximum, minimum: the range of n; the prompt and the output are both searched.
    gamma: the most tokens in a draft, which is shorter if the match is near the end of the row.
    match: "longest" tries the largest n first, "shortest" the smallest. occurrence: whether to use
    the "latest" or the "earliest" match of that n. A long match guesses better. The earliest match
    is followed by more tokens; in a loop, by as many as the loop has run.
    transformers' prompt lookup is NGram(2, 1, gamma=10, occurrence="earliest"), and vLLM's n-gram
    proposer also uses the longest and earliest match.
    Nothing is drawn: q is one-hot. Raises TypeError or ValueError for other options.
    Source: Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding.
    """

    reads_hidden = False

    def __init__(
        self,
        maximum: int = 3,
        minimum: int = 1,
        *,
        gamma: int = 8,
        match: str = "longest",
        occurrence: str = "latest",
    ) -> None:
        self.maximum, self.minimum = maximum, minimum
        self.gamma = positive_int("gamma", gamma)
        self.match, self.occurrence = match, occurrence
        self.index()  # checks the options
        self._rows: list[NGramIndex] = []

    def index(self) -> NGramIndex:
        """Return an empty index with these options."""
        return NGramIndex(self.maximum, self.minimum, match=self.match, occurrence=self.occurrence)

    def propose(
        self,
        contexts: Sequence[Sequence[int]],
        samplings: Sequence[SamplingConfig],
        max_tokens: Sequence[int],
        generators: Sequence[torch.Generator],
        *,
        hidden: Tensor | None = None,  # noqa: ARG002 - the protocol's
    ) -> list[Draft]:
        """Return a chain without q for each row, empty if nothing matches; see `Proposer`."""
        check_rows(contexts, samplings, max_tokens, generators)
        if len(self._rows) != len(contexts):
            self._rows = [self.index() for _ in contexts]
        drafts = []
        for index, context, most in zip(self._rows, contexts, max_tokens, strict=True):
            if most:
                index.follow(context)
            drafts.append(Draft.chain(index.lookup(min(self.gamma, most)) if most else []))
        return drafts

    def commit(self, accepted: Sequence[Accepted]) -> None:
        """Do nothing: the next contexts show what was accepted."""
