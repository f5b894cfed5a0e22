"""The head for fast drafting on a CPU: fused matrices, and a whole round of drafting in one call.

Letters: R pairs of a pass, C hidden_size, H attention heads, Hkv key and value heads, G = H / Hkv,
D head_dim, S slots, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from labcore.decoding.eagle.head import EagleHead
from labcore.decoding.eagle.trees import Costs, Grown
from labcore.models.forms import SharedForms
from labcore.models.fused_layer import FusedLayer, Norm, Turns
from labcore.models.packed import PackedMatrix, packing_works

__all__ = ["FusedEagle", "Memory", "fused_eagle"]


@dataclass(slots=True)
class Memory:
    """What the head has read of one row.

    stored: keys and values [2, Hkv, S, D]; the first `length` slots hold pairs with states of the
    backbone, and a draft overwrites those after them. feature: [1, C], at the last pair; None if
    there is no pair.
    """

    stored: Tensor
    length: int = 0
    feature: Tensor | None = field(default=None, repr=False)


class FusedEagle:
    """An `EagleHead` for drafting on a CPU, with the same features up to fp32 rounding.

    head: fp32 on the CPU, like its backbone; later changes to it have no effect. packed: whether
    products use fp16 weights, which needs FBGEMM and weights that fp16 represents without loss.
    Raises TypeError for another dtype, ValueError for another device.
    """

    @torch.inference_mode()
    def __init__(self, head: EagleHead) -> None:
        for tensor in (head.backbone_projection, *head.parameters()):
            if tensor.device.type != "cpu":
                raise ValueError(
                    f"a FusedEagle runs on the CPU, got {tensor.device}; move backbone and head "
                    "with .cpu()"
                )
            if tensor.dtype != torch.float32:
                raise TypeError(
                    f"a FusedEagle computes in torch.float32, got {tensor.dtype}; convert backbone "
                    "and head with .float()"
                )
        self.config = config = head.config
        self._kv, self._size = config.kv_heads, config.head_size
        self._queries = config.num_attention_heads * config.head_size
        self._embedded = F.linear(head.token_table, head.from_token.weight)
        self._hidden = PackedMatrix(head.from_hidden.weight)
        self._layer = FusedLayer(config, head, head, head.before_attention, head.before_mlp)
        self._head = PackedMatrix(head.backbone_projection)
        self._last = Norm(head.norm, config)
        self._turns = Turns(config)
        matrices = (self._hidden, *self._layer.matrices(), self._head)
        self.packed = packing_works() and all(matrix.fits() for matrix in matrices)
        if self.packed:
            for matrix in matrices:
                matrix.pack()

    def new_memory(self) -> Memory:
        """Return the memory of a row of which nothing was read."""
        return Memory(torch.empty(2, self._kv, 0, self._size))

    @torch.inference_mode()
    def read(self, memory: Memory, hidden: Tensor, tokens: Sequence[int]) -> None:
        """Add pairs: the backbone's states fp32 [R, C], and the token after each of them."""
        start, count = memory.length, len(tokens)
        self._make_room(memory, start + count)
        mask = None
        if count > 1:
            seen = torch.ones(count, start + count, dtype=torch.bool).tril(start)
            mask = _additive(seen, self._queries // (self._kv * self._size))
        turns = self._turns.up_to(start + count)[start:]
        given = torch.tensor(tokens)
        features = self._pass(hidden, given, turns[:count], memory.stored, start, mask)
        memory.length, memory.feature = start + count, features[-1:]

    @torch.inference_mode()
    def draft(self, memory: Memory, costs: Costs, *, depth: int, sharpness: float) -> Grown:
        """Return the candidates that follow a row's last pair, with how sure the head is of each.

        depth: the most levels, at least 1. sharpness: multiplies the logits for the confidences.
        A level's candidates are expanded while `costs` says that another level pays.
        Raises ValueError if nothing was read.
        """
        if memory.feature is None:
            raise ValueError("memory must hold a pair, got an empty one; read the row first")
        sharp = sharpness / self._head.scale
        start, groups = memory.length, self._queries // (self._kv * self._size)
        self._make_room(memory, start + costs.beam * depth)
        turns = self._turns.up_to(start + depth)
        grown, features, ends = Grown(), memory.feature, [-1]
        slots: list[int] = []  # the expanded candidates in the order of their slots
        while True:
            chances = (self._head(features) * sharp).softmax(-1)
            best = chances.topk(costs.ranks, dim=-1)
            grown.add(ends, best.values.tolist(), best.indices.tolist())
            level = len(grown.levels)
            ends = costs.expanded(grown) if level < depth else []
            if not ends:
                return grown
            rows, before = len(ends), len(slots)
            slots += ends
            mask = None
            if len(slots) > level:  # some slot isn't an ancestor
                kin = torch.tensor([[slot in grown.way(node) for slot in slots] for node in ends])
                seen = torch.ones(rows, start + len(slots), dtype=torch.bool)
                seen[:, start:] = kin
                mask = _additive(seen, groups)
            from_rows = [grown.row_of(node) for node in ends]
            features = self._pass(
                features[from_rows] if from_rows != list(range(len(features))) else features,
                torch.tensor([grown.tokens[node] for node in ends]),
                turns[start + level - 1].expand(rows, -1),
                memory.stored,
                start + before,
                mask,
            )

    def _pass(
        self,
        hidden: Tensor,
        tokens: Tensor,
        turns: Tensor,
        stored: Tensor,
        start: int,
        mask: Tensor | None,
    ) -> Tensor:
        """Return features [R, C] of pairs, whose keys and values go to the slots from start on."""
        rows, end = len(tokens), start + len(tokens)

        def attend(qkv: Tensor) -> Tensor:
            new = qkv[:, self._queries :].view(rows, 2, self._kv, self._size).permute(1, 2, 0, 3)
            stored[:, :, start:end] = new
            q = qkv[:, : self._queries].view(rows, -1, self._kv, self._size).permute(2, 0, 1, 3)
            q = q.reshape(1, self._kv, -1, self._size)
            k, v = stored[:, None, :, :end]
            mixed = F.scaled_dot_product_attention(q, k, v, mask)
            return mixed[0].transpose(0, 1).reshape(rows, -1)

        x = F.embedding(tokens, self._embedded)
        x.add_(self._hidden(hidden), alpha=1 / self._hidden.scale)
        self._layer(x, turns, attend)
        return self._last(x)

    def _make_room(self, memory: Memory, slots: int) -> None:
        """Make a longer rectangle if fewer slots are there; what was read stays."""
        if slots > memory.stored.shape[2]:
            longer = memory.stored.new_zeros(2, self._kv, max(2 * slots, 256), self._size)
            longer[:, :, : memory.length] = memory.stored[:, :, : memory.length]
            memory.stored = longer


def _additive(seen: Tensor, groups: int) -> Tensor:
    """Return 0 where seen [R, S] and -inf elsewhere, each row once per query of its group."""
    mask = torch.zeros(seen.shape).masked_fill_(~seen, -math.inf)
    return mask.repeat_interleave(groups, 0)


_FUSED: SharedForms[EagleHead, FusedEagle] = SharedForms(FusedEagle)


def fused_eagle(head: EagleHead) -> FusedEagle:
    """Return the fused form of a head as it is now, shared while its weights stay the same."""
    others = head.backbone_projection, head.backbone_embedding  # often the same
    return _FUSED.of(head, list({one.data_ptr(): one for one in others}.values()))
