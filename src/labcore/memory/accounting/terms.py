"""What one layer keeps for its backward, term by term: a GPT's by the paper, and our Llama's."""

from __future__ import annotations

from typing import Any

from labcore.checks import positive_int
from labcore.memory.accounting.prediction import Settings
from labcore.models.config import LlamaConfig

__all__ = ["gpt_terms", "layer_terms"]


def gpt_terms(*, batch: int, length: int, hidden: int, heads: int) -> dict[str, int]:
    """Return the bytes that one GPT layer keeps in 16 bits, with dropout, by what they are.

    With s = length, b = batch, h = hidden and a = heads, the sum is sbh (34 + 5as/h): two bytes per
    element, and one per element of a dropout's mask. It leaves out the norms' means and variances,
    and a causal mask. FlashAttention keeps none of the three terms with s².
    Raises ValueError for sizes that are not positive.
    Source: Korthikanti et al., 2022, arXiv 2205.05198, section 4.1.
    """
    sizes = {"batch": batch, "length": length, "hidden": hidden, "heads": heads}
    for name, size in sizes.items():
        positive_int(name, size)
    sbh, scores = batch * length * hidden, batch * heads * length * length
    return {
        "inputs of the two norms": 4 * sbh,
        "input of queries, keys and values": 2 * sbh,
        "queries and keys": 4 * sbh,
        "values": 2 * sbh,
        "softmax of the scores": 2 * scores,
        "mask of the scores' dropout": scores,
        "scores after dropout": 2 * scores,
        "input of the projection": 2 * sbh,
        "mask of attention's dropout": sbh,
        "input of the MLP": 2 * sbh,
        "input of GeLU": 8 * sbh,
        "input of the second product": 8 * sbh,
        "mask of the MLP's dropout": sbh,
    }


def layer_terms(config: LlamaConfig, **settings: Any) -> dict[str, int]:
    """Return the bytes that one layer of `Llama(config)` keeps for its backward, by what they are.

    `estimate` counts their sum for each layer that isn't checkpointed. Terms of zero bytes are left
    out. settings: those of `Settings`; batch and length are required. Raises as `estimate` does.
    """
    part = Settings(**settings).ends(config)[0]
    return {name: size for name, size in part.terms.items() if size}
