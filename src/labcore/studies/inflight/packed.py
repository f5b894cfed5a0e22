"""One packed step, as the engine computes it: whose token is where, and what it may read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from labcore.checks import positive_int
from labcore.models import LlamaConfig
from labcore.serving.engine.blocks import BlockPool, blocks_for
from labcore.serving.engine.cache import PagedCache, Segment
from labcore.serving.engine.packed import PackedStep

__all__ = ["Packed", "pack"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """The rows and keys of one step.

    rows: (request, position) of each token that the step reads, in the order of the packed matrix.
    keys: (request, position) of each token that the cache holds after the step, by request.
    mask: for each row, whether the engine's attention reads each key.
    """

    rows: tuple[tuple[int, int], ...]
    keys: tuple[tuple[int, int], ...]
    mask: tuple[tuple[bool, ...], ...]

    @property
    def pairs(self) -> int:
        """How many pairs of a query and a key the step needs: those that the mask lets through."""
        return sum(map(sum, self.mask))

    @property
    def computed(self) -> int:
        """How many pairs the engine computes on a CPU.

        Requests that read equally many tokens share one product, whose keys are padded to the
        longest of them and masked.
        """
        reads, held = (Counter(who for who, _ in places) for places in (self.rows, self.keys))
        groups: dict[int, list[int]] = {}
        for who, width in reads.items():
            groups.setdefault(width, []).append(held[who])
        return sum(width * len(ends) * max(ends) for width, ends in groups.items())


def pack(requests: Sequence[tuple[int, int]], *, block_size: int = 4) -> Packed:
    """Pack one step of `requests`, each (tokens that the cache holds, tokens to read).

    What a row may read isn't computed here; it's measured. All keys are zero, so attention is
    uniform, and the value in slot s is the s-th unit vector. The output of a row is then nonzero
    exactly where it has read. Raises ValueError if no request is given or one reads nothing.
    """
    if not requests:
        raise ValueError("requests must have at least one (held, read) pair, got none; pass one")
    pool = BlockPool(
        sum(blocks_for(held + positive_int("read", read), block_size) for held, read in requests),
        block_size,
    )
    segments = [
        Segment(
            blocks=pool.allocate(blocks_for(held + read, block_size)),
            start=held,
            tokens=[number] * read,
        )
        for number, (held, read) in enumerate(requests)
    ]
    slots = pool.num_blocks * block_size
    size = slots + slots % 2  # a head's size is even
    config = LlamaConfig(
        vocab_size=len(requests), hidden_size=size, intermediate_size=1, num_hidden_layers=1,
        num_attention_heads=1, max_position_embeddings=slots,
    )  # fmt: skip
    cache = PagedCache(
        config, num_blocks=pool.num_blocks, block_size=block_size, rows=1, max_blocks=1
    )
    step = PackedStep(cache, segments)
    units = torch.eye(slots, size)[:, None]  # [slots, Hkv, D]
    cache.store(0, torch.zeros_like(units), units, torch.arange(slots))
    read = step.mix(0, torch.zeros(len(step.tokens), 1, 1, size)).flatten(1) > 0  # [R, D]
    where = [
        (number, at, slot)
        for number, one in enumerate(segments)
        for at, slot in enumerate(cache.slots(one, range(one.end)))
    ]
    return Packed(
        rows=tuple(zip(step.tokens.tolist(), step.positions.tolist(), strict=True)),
        keys=tuple((number, at) for number, at, _ in where),
        mask=tuple(map(tuple, read[:, [slot for *_, slot in where]].tolist())),
    )
