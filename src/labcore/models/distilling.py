"""Distill a draft model: it learns its target's distribution on the target's own words.

The target's own words are beginnings out of its corpus as it continues them itself. Medusa's heads
learn from them too, because such text is what they will have to guess.
Letters: B rows, T tokens, R = B * T, C hidden_size, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm

from labcore.checks import positive, positive_int
from labcore.models.fused import FusedLlama
from labcore.models.llama import Llama
from labcore.models.states import HiddenStates, rows_of_step

__all__ = ["Distillation", "OwnWords", "greedy_agreement", "own_part", "own_words"]

_AT_ONCE = 64  # rows that are continued together
_READ = 32  # rows whose states are computed together


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnWords:
    """What to continue: `rows` beginnings of `prompt` tokens, up to `width` tokens in all.

    Rows are continued alternately greedily and at `temperature`. kept: the last rows, which are for
    choosing settings and never trained on.
    """

    rows: int = 3_456
    prompt: int = 64
    width: int = 261
    temperature: float = 0.7
    seed: int = 3
    kept: int = 256

    def __post_init__(self) -> None:
        for name in ("rows", "prompt", "width"):
            positive_int(name, getattr(self, name))
        positive("temperature", self.temperature)
        if self.width <= self.prompt:
            raise ValueError(
                f"width must exceed the {self.prompt} tokens of a prompt, got {self.width}"
            )
        if not 0 <= self.kept < self.rows:
            raise ValueError(f"kept must be 0 to {self.rows - 1} of the rows, got {self.kept}")


@torch.inference_mode()
def own_words(
    model: Llama, corpus: Tensor, path: Path, recipe: OwnWords, *, progress: bool = True
) -> Tensor:
    """Return beginnings out of a corpus as the model continues them: int64 [rows, width].

    model: fp32 on the CPU. corpus: integers [N]. path: the file that has the texts, or will.
    """
    if path.is_file():
        return load_file(path)["tokens"].long()
    generator = torch.Generator().manual_seed(recipe.seed)
    starts = torch.randint(len(corpus) - recipe.prompt, (recipe.rows, 1), generator=generator)
    beginnings = corpus[starts + torch.arange(recipe.prompt)]
    fast = FusedLlama(model)
    greedy = torch.arange(_AT_ONCE)[:, None] % 2 == 0
    every = []
    for rows in tqdm(beginnings.split(_AT_ONCE), disable=not progress, unit="batch"):
        text, cache = rows, fast.new_cache(len(rows), recipe.width)
        last = rows
        while text.shape[1] < recipe.width:
            logits = fast(last, cache=cache).logits[:, -1]
            warm = (logits / recipe.temperature).softmax(-1)
            drawn = torch.multinomial(warm, 1, generator=generator)
            last = torch.where(greedy[: len(rows)], logits.argmax(-1, keepdim=True), drawn)
            text = torch.cat((text, last), 1)
        every.append(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    found = torch.cat(every)
    save_file({"tokens": found.int()}, path)
    return found


def own_part(kept: HiddenStates, turn: int, recipe: OwnWords) -> HiddenStates:
    """Return what the model itself wrote, with its states: without prompts, of every other row.

    turn: 0 for the greedy rows, 1 for those at the recipe's temperature.
    """
    index, first = torch.arange(turn, len(kept), 2), recipe.prompt - 1
    states = torch.cat([kept.rows(rows)[0] for rows in index.split(_READ)])
    return HiddenStates(kept.tokens[index, first:], states[:, first:], kept.ahead)


class Distillation:
    """Batches of a teacher's texts for `train`, and the loss against its distribution there.

    sources: the teacher's states, with at least one token ahead, each with the number of rows of a
    batch. Batches come from the sources in turn, and their rows depend on seed and n alone.
    head: the teacher's matrix from hidden states to logits, [V, C].
    The loss is the cross entropy of the student's distribution against the teacher's whole
    distribution at temperature 1, their KL divergence plus the teacher's entropy.
    Source: Hinton, Vinyals and Dean, 2015, arXiv 1503.02531; for drafts: Zhou et al., DistillSpec,
    2023, arXiv 2310.08461.
    """

    def __init__(
        self,
        sources: Sequence[tuple[HiddenStates, int]],
        head: Tensor,
        *,
        seed: int,
        compiled: bool = False,
    ) -> None:
        self._sources, self._head = sources, head.detach().to(torch.bfloat16)
        self._seed = seed
        self._waiting: deque[Tensor] = deque()  # hidden states of batches that have no loss yet
        self._entropy = torch.compile(_cross_entropy) if compiled else _cross_entropy

    def batches(self, n: int) -> tuple[Tensor, None]:
        """Return batch number n: tokens int64 [B, T + 1]. Its loss must follow, in this order."""
        turn, source = divmod(n, len(self._sources))
        states, batch = self._sources[source]
        hidden, tokens = states.rows(rows_of_step(turn, batch, len(states), self._seed))
        self._waiting.append(hidden)
        return tokens[:, : hidden.shape[1] + 1], None

    def loss(self, model: Llama, tokens: Tensor, counts: Tensor | None) -> tuple[Tensor, int]:
        """Return the sum of the cross entropies in nats and their number; see `train`."""
        if counts is not None:
            raise ValueError("counts must be None for rows of a teacher's states, got a tensor")
        hidden = self._waiting.popleft()
        logits = model(tokens[:, :-1]).logits.flatten(0, 1)
        return self._entropy(logits, hidden.flatten(0, 1), self._head), len(logits)


def _cross_entropy(logits: Tensor, hidden: Tensor, head: Tensor) -> Tensor:
    """Sum the cross entropies of logits [R, V] against the softmax of head @ hidden, [R, C]."""
    told = F.linear(hidden, head).float().softmax(-1)
    return F.cross_entropy(logits.float(), told, reduction="sum")


@torch.inference_mode()
def greedy_agreement(
    target: Llama, draft: Llama, prompts: Sequence[Sequence[int]], *, tokens: int = 64
) -> float:
    """Return the share of a target's greedy tokens that are the draft's first choice there.

    This is the acceptance of greedy drafts, at each place given that all before it were accepted.
    target, draft: fp32 on the CPU. prompts: rows of tokens, each continued by `tokens` tokens, or
    up to an end-of-sequence token. Raises ValueError without a prompt.
    """
    if not prompts:
        raise ValueError("prompts must hold at least one row, got none")
    fast, agreed, total = FusedLlama(target), 0, 0
    for prompt in prompts:
        said = fast.greedy(prompt, tokens, fast.new_cache(1, len(prompt) + tokens))
        logits = draft(torch.tensor([[*prompt, *said[:-1]]])).logits[0, len(prompt) - 1 :]
        agreed += int((logits.argmax(-1) == torch.tensor(said)).sum())
        total += len(said)
    return agreed / total
