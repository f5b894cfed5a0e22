"""The bytes of a KV cache, and how many requests fit next to the weights.

Letters: C hidden_size, I intermediate_size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from labcore.checks import one_of, positive_int
from labcore.memory.accounting.shapes import parameter_shapes
from labcore.models.cache import kv_bytes
from labcore.models.config import LlamaConfig

__all__ = ["WEIGHTS", "Room", "kv_bytes", "serving_room"]

# Bits per weight of a layer's matrices, an fp16 scale included: int8 has one per row of many
# weights (left out), int4 one per 128 with a zero point of 4 bits, as AWQ stores them.
WEIGHTS = {"bfloat16": 16.0, "int8": 8.0, "int4": 4 + (16 + 4) / 128}


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

    weights: a key of WEIGHTS, for the layers' matrices; embedding, head and norms have 16 bits.
    devices: tensor parallelism divides weights and heads. kv, page: as in `kv_bytes`.
    batched_tokens: the most tokens of one forward. At its peak, in an MLP, it holds 16-bit numbers
    for each of them: the residual stream, the layer's input and its norm (3 C), and the MLP's
    gate, up and product (3 I).
    A server keeps some memory for other things: CUDA's context, the allocator's fragments, graphs
    and logits. Pass the `card` without that reserve.
    Raises ValueError or TypeError for invalid arguments.
    Source: Lin et al., 2023, arXiv 2306.00978 (AWQ); its checkpoints' groups of 128.
    """
    one_of("weights", weights, WEIGHTS)
    for name, size in (("card", card), ("batched_tokens", batched_tokens)):
        positive_int(name, size)
    request = kv_bytes(config, context, dtype=kv, page=page, devices=devices)
    whole = sum(
        math.ceil(math.prod(shape) * (WEIGHTS[weights] if "proj" in name else 16) / 8)
        for name, shape in parameter_shapes(config).items()
    )
    wide = -(-config.intermediate_size // devices)
    step = 6 * batched_tokens * (config.hidden_size + wide)
    share = -(-whole // devices)
    return Room(weights=share, step=step, cache=max(card - share - step, 0), request=request)
