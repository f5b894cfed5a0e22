"""The recipes of the shipped models: configurations, data and training."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor

from labcore.checks import positive, positive_int
from labcore.data import python_sources, python_text
from labcore.models.config import LlamaConfig
from labcore.models.distilling import OwnWords
from labcore.models.tokenizer import Tokenizer
from labcore.models.training import Batches, windows

__all__ = [
    "END_OF_TEXT",
    "END_OF_TEXT_ID",
    "RECIPES",
    "VOCABULARY",
    "DistillRecipe",
    "ModelRecipe",
    "corpus",
    "learn_tokenizer",
    "tokens_of",
]

VOCABULARY = 2048
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillRecipe:
    """A training on the target's own words, toward the target's whole distribution at each token.

    steps: optimizer steps, each with `batch` rows of `words`. rate, warmup: as in `ModelRecipe`,
    with the same decay and clipping.
    long_steps: steps after them, at `long_rate`, each with half as many rows of `words` and with
    `long_batch` rows of `long_length` tokens of the corpus. They keep the positions that own words
    don't reach.
    """

    words: OwnWords = field(default_factory=OwnWords)
    steps: int = 1_600
    batch: int = 16
    rate: float = 2e-3
    warmup: int = 50
    long_steps: int = 400
    long_batch: int = 2
    long_length: int = 1024
    long_rate: float = 1e-3
    seed: int = 4

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "warmup", "long_steps", "long_batch", "long_length"):
            positive_int(name, getattr(self, name))
        for name in ("rate", "long_rate"):
            positive(name, getattr(self, name))
        if self.batch < 2:
            raise ValueError(
                f"batch must be at least 2, because the long steps halve it, got {self.batch}"
            )

    def schedule(self, step: int) -> float:
        """Return the factor of the learning rate at a step, counted from 0."""
        return _warm_cosine(step, self.steps, self.warmup)

    def long_schedule(self, step: int) -> float:
        """Return the factor of `long_rate` at one of the last steps, counted from 0."""
        return _warm_cosine(step, self.long_steps, self.warmup)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRecipe:
    """The configuration of a shipped model and its training.

    steps: optimizer steps, each with `batch` rows of `length` predicted tokens.
    long_steps: the last steps, with the same number of tokens in rows of `long_length`, which train
    the model on positions up to that length.
    rate: AdamW's peak learning rate, reached after `warmup` steps and followed by a cosine decay to
    a tenth.
    decay: AdamW's weight decay. clip: largest global norm of the gradients.
    distilled: a second training, on the shipped target's distribution; None means no other.
    """

    config: LlamaConfig
    steps: int
    rate: float
    batch: int = 16
    length: int = 256
    long_steps: int
    long_length: int = 1024
    warmup: int = 150
    decay: float = 0.1
    clip: float = 1.0
    seed: int
    distilled: DistillRecipe | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "length", "long_length", "warmup"):
            positive_int(name, getattr(self, name))
        if (self.batch * self.length) % self.long_length:
            raise ValueError(
                f"batch * length must be a multiple of long_length, got {self.batch} * "
                f"{self.length} and {self.long_length}"
            )
        if not 0 <= self.long_steps <= self.steps:
            raise ValueError(
                f"long_steps must be 0 to the {self.steps} steps, got {self.long_steps}"
            )

    @property
    def tokens(self) -> int:
        """Predicted tokens in the whole training."""
        return self.steps * self.batch * self.length

    def schedule(self, step: int) -> float:
        """Return the factor of the learning rate at a step, counted from 0."""
        return _warm_cosine(step, self.steps, self.warmup)

    def batches(self, tokens: Sequence[int] | Tensor) -> Batches:
        """Return a function from batch number n to the batch; tokens: integers [N]."""
        rows = self.batch * self.length // self.long_length
        short = windows(tokens, batch=self.batch, length=self.length, seed=self.seed)
        long = windows(tokens, batch=rows, length=self.long_length, seed=self.seed)
        first_long = self.steps - self.long_steps
        return lambda n: short(n) if n < first_long else long(n)


def _warm_cosine(step: int, steps: int, warmup: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(steps - warmup, 1)
    return 0.55 + 0.45 * math.cos(math.pi * min(done, 1.0))


def _shape(**told: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_ids=(END_OF_TEXT_ID,),
        **told,  # type: ignore[arg-type]
    )


RECIPES = {
    "target": ModelRecipe(
        config=_shape(
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=4,
        ),
        steps=4_884,
        long_steps=732,
        rate=2e-3,
        seed=1,
    ),
    "draft": ModelRecipe(
        config=_shape(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        ),
        steps=4_884,
        long_steps=732,
        rate=4e-3,
        seed=2,
        distilled=DistillRecipe(),
    ),
}


def corpus() -> list[str]:
    """Return the training corpus: the standard library's sources, and its documentation."""
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = [
        (library / name).read_text(encoding="utf-8", errors="replace")
        for name in python_sources("train").files
    ]
    return [*sources, python_text("train").text]


def learn_tokenizer(texts: Sequence[str]) -> tokenizers.Tokenizer:
    """Train a byte-level BPE tokenizer with `VOCABULARY` tokens; decoding is lossless.

    Source: Sennrich et al., 2016, arXiv 1508.07909; bytes as in GPT-2.
    """
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return inner


def tokens_of(texts: Sequence[str], tokenizer: Tokenizer) -> Tensor:
    """Return all texts as one row of tokens, each followed by end of text (id 0): int64 [N]."""
    row: list[int] = []
    for text in texts:
        row += [*tokenizer.encode(text), END_OF_TEXT_ID]
    return torch.tensor(row)
