"""The bytes of a KV cache, and how many requests fit next to the weights.

Letters: C hidden_size, I intermediate_size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from labcore.checks import one_of, positive_int
from labcore.memory.quantize import INT4, INT8, Scheme, quantized_bytes
from labcore.models.cache import kv_bytes
from labcore.models.config import LlamaConfig

__all__ = ["WEIGHTS", "Room", "kv_bytes", "serving_room"]

WEIGHTS: dict[str, Scheme | None] = {"bfloat16": None, "int8": INT8, "int4": INT4}


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What one device holds while it serves, in bytes.

    weights: the device's share. step: activations of one forward. cache: what is left for keys and
    values, 0 if nothing is. request: one request's keys and values.
    """

    weights: int
    step: int
    cache: int
    request: int

    @property
    def requests(self) -> int:
        """How many requests fit at the same time."""
        return self.cache // self.request


def serving_room(
    config: LlamaConfig,
    card: int,
    *,
    context: int,
    kv: str = "bfloat16",
    page: int = 16,
    weights: str = "bfloat16",
    devices: int = 1,
    batched_tokens: int = 2048,
) -> Room:
    """Return how one device of `card` bytes divides its memory, for requests of `context` tokens.

    weights: a key of WEIGHTS, the schemes of `quantize`. devices: tensor parallelism divides
    weights and heads. kv, page: as in `kv_bytes`.
    batched_tokens: the most tokens of one forward. At its peak, in an MLP, it holds 16-bit numbers
    for each of them: the residual stream, the layer's input and its norm (3 C), and the MLP's
    gate, up and product (3 I).
    A server keeps some memory for other things: CUDA's context, the allocator's fragments, graphs
    and logits. Pass the `card` without that reserve.
    Raises ValueError or TypeError for invalid arguments.
    """
    one_of("weights", weights, WEIGHTS)
    for name, size in (("card", card), ("batched_tokens", batched_tokens)):
        positive_int(name, size)
    request = kv_bytes(config, context, dtype=kv, page=page, devices=devices)
    whole = quantized_bytes(config, WEIGHTS[weights], dtype=torch.bfloat16).total
    wide = -(-config.intermediate_size // devices)
    step = 6 * batched_tokens * (config.hidden_size + wide)
    share = -(-whole // devices)
    return Room(weights=share, step=step, cache=max(card - share - step, 0), request=request)
