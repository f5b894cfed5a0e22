"""What generation keeps for one request: its output so far, and the draft of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labcore.decoding.contract import Accepted, Draft, SamplingConfig, Verifier
from labcore.decoding.sampling import tree_probabilities
from labcore.decoding.stops import StopTexts, TextDecoder
from labcore.decoding.trace import Tally
from labcore.decoding.verify import greedy_match

__all__ = ["Plan", "Request", "Settled", "likeliest"]


class Settled(NamedTuple):
    """What a step brought one request.

    tokens: the new ones. slots: of the tokens that the step read, those that stay in the cache.
    accepted: for the proposer; shorter than the verdict where the output ended first.
    """

    tokens: list[int]
    slots: list[int]
    accepted: Accepted


class Request:
    """One request: its tokens so far, and whether and why its output ended.

    ends_after: for measurements, the number of tokens after which the output ends with "eos".
    """

    def __init__(
        self, prompt: Sequence[int], sampling: SamplingConfig, tokenizer: TextDecoder | None
    ) -> None:
        self.context = list(prompt)  # all tokens, the last not yet read by the target
        self.prompt = len(prompt)
        self.sampling = sampling
        self.generator = torch.Generator().manual_seed(sampling.seed)
        self.stops: StopTexts | None = None
        if sampling.stop and tokenizer is not None:
            self.stops = StopTexts(sampling.stop, tokenizer)
        self.tally = Tally()
        self.finish = ""
        self.ends_after: int | None = None
        self._stopped: tuple[int, int] | None = None  # tokens and characters before a stop text

    @property
    def emitted(self) -> int:
        """The number of tokens after the prompt."""
        return len(self.context) - self.prompt

    @property
    def kept(self) -> int:
        """The number of tokens in the output."""
        return self.emitted if self._stopped is None else self._stopped[0]

    def output(self) -> list[int]:
        """Return the tokens of the output so far, including a stop text that's still incomplete."""
        return self.context[self.prompt : self.prompt + self.kept]

    def text(self, tokenizer: TextDecoder) -> str:
        """Return the text of the output."""
        end = None if self._stopped is None else self._stopped[1]
        return tokenizer.decode(self.output())[:end]

    def take(self, block: Sequence[int], ends: frozenset[int]) -> int:
        """Add a block of tokens until the output ends; return how many were added, at least 1.

        The earliest end counts. On the same token, EOS comes before a stop text, and a stop text
        before max_tokens.
        """
        start = self.emitted
        most, imposed = self.sampling.max_tokens, self.ends_after
        left = (most if imposed is None else imposed) - start
        count = plain = min(len(block), left)  # plain: those that have a text
        if count == left:
            self.finish = "length" if imposed is None else "eos"
        if not ends.isdisjoint(block[:count]):
            plain = next(place for place, token in enumerate(block) if token in ends)
            count, self.finish = plain + 1, "eos"
        self.context += block[:count]
        if self.stops is not None and plain:
            said = self.context[self.prompt : self.prompt + start + plain]
            match = self.stops.match(said, plain)
            if match is not None:
                self.finish, self._stopped = "stop", (match.kept, match.characters)
                del self.context[self.prompt + match.read :]
        return self.emitted - start


class Plan:
    """A row's draft as Python numbers, so that each step reads the tensors once.

    depth: the most tokens on a path; room: the most nodes. A larger tree keeps its first nodes. The
    cut doesn't depend on the tokens, so the output keeps its distribution.
    parents: None for a chain. Raises ValueError for a deeper draft and for invalid parents.
    """

    __slots__ = ("draft", "parents", "size", "tokens")

    def __init__(self, draft: Draft, depth: int, room: int) -> None:
        parents: list[int] = draft.parents.tolist()
        chain = parents == list(range(-1, len(parents) - 1))
        deepest = len(parents) if chain else _depth(parents)
        if deepest > depth:
            raise ValueError(
                f"a draft must be at most max_tokens[b] = {depth} tokens deep, got {deepest}; make "
                "the proposer stop there"
            )
        if len(parents) > room:
            q = None if draft.q is None else draft.q[:room]
            draft, parents = Draft(draft.tokens[:room], draft.parents[:room], q), parents[:room]
        self.draft = draft
        self.size = len(parents)
        self.tokens: list[int] = draft.tokens.tolist()
        if len(self.tokens) != self.size:
            raise ValueError(
                f"a draft needs a parent for each token, got {len(self.tokens)} tokens and "
                f"{self.size} parents"
            )
        self.parents = None if chain else parents

    def verify(
        self, logits: Tensor, best: Sequence[int], row: Request, verifier: Verifier
    ) -> Accepted:
        """Return the verdict on the draft.

        logits: [N + 1, V], after the row's last token and after each drafted one. best: the most
        likely token at each of them, or -1; see `likeliest`.
        Raises what the verifier raises, and ValueError for a path that it can't accept.
        """
        sampling = row.sampling
        plain = sampling.temperature == 0 and sampling.repetition_penalty == 1
        if verifier is greedy_match and plain and min(best) >= 0:
            return self._match(best)
        p = tree_probabilities(logits, self.draft, row.context, sampling)
        verdict = verifier(p, self.draft, row.generator)
        self.check_path(verdict.path)
        return verdict

    def _match(self, best: Sequence[int]) -> Accepted:
        """Return what `greedy_match` decides, without the target's p."""
        parents = range(-1, self.size - 1) if self.parents is None else self.parents
        path: list[int] = []
        node = -1
        for child in range(self.size):  # a child comes after its parent
            if parents[child] == node and self.tokens[child] == best[node + 1]:
                node = child
                path.append(child)
        return Accepted(tuple(path), best[node + 1])

    def settle(self, verdict: Accepted, row: Request, ends: frozenset[int]) -> Settled:
        """Add the accepted tokens and the next one to the row, up to where its output ends."""
        block = [*(self.tokens[node] for node in verdict.path), int(verdict.next_token)]
        taken = row.take(block, ends)
        path = verdict.path[: taken - 1]
        slots = [0, *(node + 1 for node in path)]
        return Settled(block[:taken], slots, Accepted(path, block[taken - 1], verdict.draws))

    def check_path(self, path: Sequence[int]) -> None:
        """Raise ValueError unless each node is a child of the one before it."""
        if self.parents is None:
            sound = len(path) <= self.size and all(i == node for i, node in enumerate(path))
        else:
            before = (-1, *path)
            sound = all(
                0 <= node < self.size and self.parents[node] == parent
                for parent, node in zip(before, path, strict=False)
            )
        if not sound:
            raise ValueError(
                f"a verifier's path must go from parent to child, got {tuple(path)}; accept no "
                "token after a rejected one"
            )


def likeliest(logits: Tensor) -> list[Any]:
    """Return the token of the largest of logits [..., V], or -1 where that isn't finite.

    All rows are read from the device at once.
    """
    largest, best = logits.max(-1)
    tokens: list[Any] = torch.where(largest.isfinite(), best, -1).tolist()
    return tokens


def _depth(parents: Sequence[int]) -> int:
    depths = [0]
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            rule = "draft.parents must be -1 or a node before the child"
            raise ValueError(f"{rule}, got {parent} at node {node}")
        depths.append(depths[parent + 1] + 1)
    return max(depths)
