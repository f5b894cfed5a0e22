"""What a guesser costs beside a backbone: weights held and read, and what its training holds.

Letters: C hidden_size, V vocabulary, K heads. Everything is by formula, from a configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from labcore.checks import one_of, positive_int
from labcore.decoding.medusa.heads import PROJECTIONS
from labcore.models import LlamaConfig

__all__ = [
    "FROZEN_BYTES",
    "TRAINED_BYTES",
    "WAYS",
    "Guesser",
    "Training",
    "guessers",
    "head_parameters",
    "parameters",
    "training_cost",
]

FROZEN_BYTES, TRAINED_BYTES = 2, 16
"""Bytes of a frozen weight in 16 bits, and of a trained one in mixed precision: weight and gradient
in 16 bits, a copy of the weight and AdamW's two moments in fp32."""
WAYS = ("backbone and heads", "heads on the frozen backbone", "heads on stored states")


def _layer(config: LlamaConfig) -> int:
    """Return the parameters of a decoder layer, without biases."""
    width, size = config.hidden_size, config.head_dim or 0
    attention = 2 * width * size * (config.num_attention_heads + config.kv_heads)
    return attention + 3 * width * config.intermediate_size + 2 * width


def parameters(config: LlamaConfig) -> int:
    """Return the parameters of a Llama without biases."""
    table = config.vocab_size * config.hidden_size
    tables = table if config.tie_word_embeddings else 2 * table
    return config.num_hidden_layers * _layer(config) + config.hidden_size + tables


def head_parameters(
    config: LlamaConfig, heads: int, *, projection: str = "full", rank: int = 64
) -> int:
    """Return the parameters of K heads of one residual block. Arguments as in `MedusaHeads`."""
    width, vocab = config.hidden_size, config.vocab_size
    own = {"full": vocab * width, "low_rank": rank * (vocab + width), "tied": 0}
    block = width * width + width
    return positive_int("heads", heads) * (
        block + own[one_of("projection", projection, PROJECTIONS)]
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Guesser:
    """held: bytes of weights beside the backbone's. read: bytes of weights that a step reads."""

    held: int
    read: int


def guessers(config: LlamaConfig, ahead: int = 4, *, draft: LlamaConfig) -> Mapping[str, Guesser]:
    """Return what it takes to guess `ahead` tokens per step, in 16 bits, by kind of guesser.

    draft: a second model's configuration. A second model and an EAGLE layer run once for each
    token; heads run once per step. The EAGLE layer is a decoder layer and a matrix [2C, C], and
    reads the backbone's own projection; heads of kind "tied" read it too, once. Caches and
    activations are left out.
    Source of the layer: Li et al., EAGLE, 2024, arXiv 2401.15077.
    """
    positive_int("ahead", ahead)
    own = FROZEN_BYTES * config.vocab_size * config.hidden_size
    model = FROZEN_BYTES * (parameters(draft) - draft.vocab_size * draft.hidden_size)
    eagle = FROZEN_BYTES * (_layer(config) + 2 * config.hidden_size**2)
    full, tied = (
        FROZEN_BYTES * head_parameters(config, ahead, projection=kind) for kind in ("full", "tied")
    )
    return {
        "a second model": Guesser(held=FROZEN_BYTES * parameters(draft), read=ahead * model),
        "an EAGLE layer": Guesser(held=eagle, read=ahead * (eagle + own)),
        "heads": Guesser(held=full, read=full),
        "heads that share the projection": Guesser(held=tied, read=tied + own),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What training holds and computes.

    weights, gradients, moments: bytes, without activations; moments include fp32 copies of weights.
    flops: floating-point operations per token and reading. stored: bytes per token on disk.
    """

    weights: int
    gradients: int
    moments: int
    flops: float
    stored: int = 0


def training_cost(
    config: LlamaConfig, heads: int, way: str, *, projection: str = "full", readings: int = 1
) -> Training:
    """Return what one of WAYS of training K heads takes, in mixed precision.

    readings: how often each text is read; stored states are computed once for all of them. A weight
    costs 2 FLOPs per token forward and 4 backward. Attention's scores are left out. A frozen
    projection that heads share costs 2 backward, because only its input needs a gradient.
    """
    one_of("way", way, WAYS)
    positive_int("readings", readings)
    table = config.vocab_size * config.hidden_size
    body = parameters(config) - (1 if config.tie_word_embeddings else 2) * table
    added = head_parameters(config, heads, projection=projection)
    shared = 0 if projection == "full" else heads * table
    guessing = 6.0 * added + (6 if way == WAYS[0] else 4) * shared
    if way == WAYS[0]:
        trained = parameters(config) + added
        return Training(
            weights=2 * trained,
            gradients=2 * trained,
            moments=12 * trained,
            flops=6.0 * (body + table) + guessing,
        )
    frozen = parameters(config) if way == WAYS[1] else (table if shared else 0)
    once = 1 if way == WAYS[1] else readings
    return Training(
        weights=FROZEN_BYTES * (frozen + added),
        gradients=2 * added,
        moments=12 * added,
        flops=2.0 * body / once + guessing,
        stored=0 if way == WAYS[1] else FROZEN_BYTES * config.hidden_size,
    )
