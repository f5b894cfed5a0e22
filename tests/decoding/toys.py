"""A toy target whose cache holds the tokens themselves, a plain loop, a proposer that knows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from labcore.decoding.contract import Draft, SamplingConfig
from labcore.decoding.draws import Draws
from labcore.decoding.sampling import probabilities
from labcore.models import LlamaOutput


class ToyCache:
    def __init__(self, batch: int, capacity: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(batch)]
        self.read: list[int] = [0] * batch  # lengths before the last forward
        self.capacity = capacity

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([len(row) for row in self.rows], dtype=torch.int32)

    def truncate(self, lengths: Tensor) -> None:
        for row, length in zip(self.rows, lengths.tolist(), strict=True):
            del row[length:]

    def keep(self, row: int, slots: Sequence[int]) -> None:
        start = self.read[row]
        kept = [self.rows[row][start + slot] for slot in torch.as_tensor(slots).tolist()]
        self.rows[row][start:] = kept


class Toy:
    """Logits behind a node are a function of every token before it; padding gives NaN.

    hidden is (tokens read, last token), so that a test sees whose it is.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        vocab_size: int,
        logits_of: Callable[[tuple[int, ...]], Tensor],
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.vocab_size, self.logits_of, self.eos_token_ids = vocab_size, logits_of, eos_token_ids
        self.cache: ToyCache | None = None  # the last one made
        self.forwards: list[list[int]] = []  # counts of each

    @classmethod
    def random(
        cls, vocab_size: int, seed: int, eos: tuple[int, ...] = (), spread: float = 2.0
    ) -> Toy:
        known: dict[tuple[int, ...], Tensor] = {}

        def logits_of(prefix: tuple[int, ...]) -> Tensor:
            if prefix not in known:
                own = torch.Generator().manual_seed(hash((seed, prefix)) % 2**62)
                known[prefix] = spread * torch.randn(vocab_size, generator=own)
            return known[prefix]

        return cls(vocab_size, logits_of, eos)

    @classmethod
    def script(cls, vocab_size: int, said: Sequence[int], eos: tuple[int, ...] = ()) -> Toy:
        """Says said[n] behind n tokens, whatever these are."""
        rows = torch.nn.functional.one_hot(torch.tensor(said), vocab_size).float()
        return cls(vocab_size, lambda prefix: rows[len(prefix)], eos)

    def argmax(self, prefix: Sequence[int]) -> int:
        return int(self.logits_of(tuple(prefix)).argmax())

    def new_cache(self, batch: int, capacity: int) -> ToyCache:
        self.cache = ToyCache(batch, capacity)
        return self.cache

    def __call__(
        self, tokens: Tensor, *, counts: Tensor, cache: ToyCache, tree: Tensor | None = None
    ) -> LlamaOutput:
        assert tokens.dtype == torch.int64 and counts.dtype == torch.int32
        batch, width = tokens.shape
        assert counts.shape == (batch,) and int(counts.max()) == width
        logits = torch.full((batch, width, self.vocab_size), float("nan"))
        hidden = torch.full((batch, width, 2), float("nan"))
        cache.read = [len(row) for row in cache.rows]
        self.forwards.append(counts.tolist())
        for place, (row, count) in enumerate(zip(cache.rows, counts.tolist(), strict=True)):
            nodes = tokens[place, :count].tolist()
            parents = list(range(-1, count - 1))
            if tree is not None:
                assert tree.dtype == torch.int32
                parents = tree[place, :count].tolist()
                assert (tree[place, count:] == -2).all() and parents[:1] in ([-1], [])
            prefix, paths = tuple(row), []
            for node, parent in enumerate(parents):
                paths.append((*(prefix if parent < 0 else paths[parent]), nodes[node]))
                logits[place, node] = self.logits_of(paths[node])
                hidden[place, node] = torch.tensor([len(paths[node]), nodes[node]])
            row += nodes
            assert len(row) <= cache.capacity
        return LlamaOutput(logits=logits, hidden=hidden)


def plain(
    target: Toy, prompt: Sequence[int], sampling: SamplingConfig, tokenizer=None
) -> tuple[list[int], str, str]:
    """Tokens one by one, with nothing but the definition: tokens, why they end, their text."""
    generator = torch.Generator().manual_seed(sampling.seed)
    out: list[int] = []
    while True:
        p = probabilities(target.logits_of((*prompt, *out)), sampling, [*prompt, *out])
        out.append(Draws(generator).token(p) if sampling.temperature else int(p.argmax()))
        if out[-1] in target.eos_token_ids:
            return out, "eos", tokenizer.decode(out) if tokenizer else ""
        text = tokenizer.decode(out).rstrip("\ufffd") if tokenizer else ""
        at = min((text.find(stop) for stop in sampling.stop if stop in text), default=-1)
        if at >= 0:
            kept = 0
            while not tokenizer.decode(out[:kept]).startswith(text[:at]):
                kept += 1
            return out[:kept], "stop", text[:at]
        if len(out) == sampling.max_tokens:
            return out, "length", tokenizer.decode(out) if tokenizer else ""


class Guess:
    """Drafts the target's greedy tokens, some replaced by random ones; what it was given is kept.

    wrong: chance of a random token. children: most of a node; 1 makes chains. lengths: of the
    drafts, in turn; None draws them.
    """

    def __init__(
        self,
        target: Toy,
        generator: torch.Generator,
        *,
        wrong: float = 0.3,
        children: int = 1,
        lengths: Sequence[int] | None = None,
    ) -> None:
        self.target, self.generator = target, generator
        self.wrong, self.children, self.lengths = wrong, children, lengths
        self.proposed: list[list[Draft]] = []
        self.given: list[tuple] = []
        self.committed: list[list] = []

    def _below(self, most: int) -> int:
        return int(torch.randint(most, (), generator=self.generator))

    def _token(self, prefix: Sequence[int]) -> int:
        if float(torch.rand((), generator=self.generator)) < self.wrong:
            return self._below(self.target.vocab_size)
        return self.target.argmax(prefix)

    def _draft(self, context: Sequence[int], limit: int) -> Draft:
        if self.lengths is not None:
            limit = min(limit, self.lengths[len(self.proposed) % len(self.lengths)])
        else:
            limit = min(limit, self._below(6))
        tokens: list[int] = []
        parents: list[int] = []
        level = [(-1, tuple(context))]
        for _ in range(limit):
            below = []
            for node, prefix in level:
                for _ in range(1 if self.children == 1 else self._below(self.children + 1)):
                    tokens.append(self._token(prefix))
                    parents.append(node)
                    below.append((len(tokens) - 1, (*prefix, tokens[-1])))
            level = below[-4:]
        return Draft(
            torch.tensor(tokens, dtype=torch.int64), torch.tensor(parents, dtype=torch.int32)
        )

    def propose(self, contexts, samplings, max_tokens, generators, *, hidden=None) -> list[Draft]:
        copied = None if hidden is None else hidden.tolist()
        self.given.append(([list(row) for row in contexts], list(max_tokens), copied))
        drafts = [self._draft(row, most) for row, most in zip(contexts, max_tokens, strict=True)]
        self.proposed.append(drafts)
        return drafts

    def commit(self, accepted) -> None:
        self.committed.append(list(accepted))
