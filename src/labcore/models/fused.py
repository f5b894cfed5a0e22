"""The same Llama for fast CPU decoding of a few rows, with fused matrices and a sliced KV cache.

Letters: B rows, T tokens of a forward, R = B * T, C hidden_size, H attention heads, Hkv key and
value heads, G = H / Hkv, D head_dim, V vocab_size, N nodes of a tree.

Several things make a step fast. There is one product for q, k and v, and one for gate and up.
Weights are packed in fp16 if that's lossless. Rotary embedding is one complex product. Keys and
values are appended with one copy per layer and attended to as views.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from labcore.models.cache import tree_mask
from labcore.models.fused_cache import FusedCache, StoredLayer
from labcore.models.fused_layer import FusedLayer, Norm, Turns
from labcore.models.llama import Llama, LlamaOutput
from labcore.models.packed import PackedMatrix, packing_works

__all__ = ["FusedLlama"]

_FEW = 3  # more tokens are read by a forward
TABLE = 1 << 24  # 64 MB


class FusedLlama:
    """A `Llama` as a fast CPU decoder for few rows, with the same logits up to fp32 rounding.

    model: an fp32 model on the CPU. Its weights are copied, so later changes to it have no effect.
    packed: whether forwards use fp16 weights. This needs FBGEMM, and weights that fp16 represents
    without loss, such as those of a bf16 checkpoint. Activations and sums are always fp32.
    Raises TypeError for another dtype, and ValueError for another device.
    """

    @torch.inference_mode()
    def __init__(self, model: Llama) -> None:
        for name, parameter in model.named_parameters():
            if parameter.device.type != "cpu":
                raise ValueError(
                    f"a FusedLlama runs on the CPU, got {name} on {parameter.device}; move the "
                    "model with .cpu() or decode with the Llama itself"
                )
            if parameter.dtype != torch.float32:
                raise TypeError(
                    f"a FusedLlama computes in torch.float32, got {name} in {parameter.dtype}; "
                    "convert the model with .float()"
                )
        self.config = config = model.config
        self.vocab_size, self.eos_token_ids = config.vocab_size, config.eos_token_ids
        self.device = torch.device("cpu")
        self._embedding = model.embed_tokens.weight.clone()
        blocks: list[Any] = list(model.layers)
        self._layers = [
            FusedLayer(
                config, one.self_attn, one.mlp, one.input_layernorm, one.post_attention_layernorm
            )
            for one in blocks
        ]
        self._head = PackedMatrix((model.lm_head or model.embed_tokens).weight)
        self._last = Norm(model.norm, config)
        self._turns = Turns(config)
        self._first: Tensor | None = None  # what `greedy` looks up
        width = (config.num_attention_heads + 2 * config.kv_heads) * config.head_size
        self._small = config.vocab_size * width <= TABLE
        matrices = [m for layer in self._layers for m in layer.matrices()] + [self._head]
        self.packed = packing_works() and all(matrix.fits() for matrix in matrices)
        if self.packed:
            for matrix in matrices:
                matrix.pack()

    def new_cache(self, batch: int, capacity: int) -> FusedCache:
        """Create an empty KV cache for `batch` rows of at most `capacity` tokens."""
        return FusedCache(self.config, batch=batch, capacity=capacity)

    @torch.inference_mode()
    def __call__(
        self,
        tokens: Tensor,
        *,
        counts: Tensor | None = None,
        cache: FusedCache,
        tree: Tensor | None = None,
    ) -> LlamaOutput:
        """Return logits fp32 [B, T, V] and hidden [B, T, C], like a `Llama` with a cache.

        tokens: integers [B, T], right-padded. Results at padding are finite but meaningless.
        counts: integers [B], the valid tokens of each row, 0 for an idle row; None means T, or a
        tree's nodes.
        tree: parents, int32 [B, T]. -1 is a child of the prefix and -2 is padding.
        Raises ValueError or TypeError for invalid arguments or a full row.
        """
        batch, width = _checked(tokens, counts, cache, tree)
        if counts is not None:
            valid = counts.tolist()
        else:
            valid = [width] * batch if tree is None else (tree != -2).sum(1).tolist()
        if min(valid) < 0 or max(valid) > width:
            raise ValueError(f"counts must be between 0 and {width} tokens, got {valid}")
        starts = cache.begin(valid)
        step = _Step(self, starts, valid, width, cache.capacity, tree)
        stored = cache.layers
        out = self._rows(
            tokens.reshape(-1), step.turns, lambda layer, qkv: step.attend(qkv, stored[layer])
        )
        cache.advance(starts, valid)
        return LlamaOutput(
            logits=out.logits.view(batch, width, -1), hidden=out.hidden.view(batch, width, -1)
        )

    @torch.inference_mode()
    def rows(
        self,
        tokens: Tensor,
        positions: Tensor,
        reach: int,
        attend: Callable[[int, Tensor], Tensor],
        logits_at: Tensor | None = None,
    ) -> LlamaOutput:
        """Return logits fp32 [R, V] and hidden [R, C] of R tokens, with the caller's attention.

        tokens, positions: integers [R]; positions are below `reach`. attend: called with each
        layer's index and rotated qkv [R, (H + 2 Hkv) D], queries ordered [G, Hkv, D]; returns
        [R, H D]. Inside a head, numbers are ordered otherwise than in a `Llama`, so keys that one
        form stored are not for the other. logits_at: integers [N], the rows whose logits and hidden
        are returned; None means all.
        """
        turns = self._turns.up_to(reach).index_select(0, positions)
        return self._rows(tokens, turns, attend, logits_at)

    def _rows(
        self,
        tokens: Tensor,
        turns: Tensor,
        attend: Callable[[int, Tensor], Tensor],
        logits_at: Tensor | None = None,
    ) -> LlamaOutput:
        x = F.embedding(tokens, self._embedding)  # [R, C]
        for index, layer in enumerate(self._layers):
            layer(x, turns, functools.partial(attend, index))
        if logits_at is not None:
            x = x.index_select(0, logits_at)
        hidden = self._last(x)
        logits = self._head(hidden * (1 / self._head.scale))
        return LlamaOutput(logits=logits, hidden=hidden)

    @torch.inference_mode()
    def greedy(
        self, tokens: Sequence[int], count: int, cache: FusedCache, least: float = 0.0
    ) -> list[int]:
        """Read tokens, then say at most `count`: each is the likeliest after those before it.

        All in one call, and with fewer operations than forwards take. Before the rotation, a
        token's queries, keys and values in the first layer depend on nothing else, so they are
        looked up in a table [V, (H + 2 Hkv) D], if that has at most TABLE numbers.
        cache: of one row; afterwards it holds the tokens and what was said, without the last one.
        least: generation ends after a token of a smaller probability, after an end-of-sequence
        token, and before a token whose logits aren't finite.
        Raises ValueError for no tokens, a count below 1, a cache of several rows or a full row.
        """
        if not tokens or count < 1 or len(cache.lengths) != 1:
            raise ValueError(
                "greedy needs a token, a count of at least 1 and a cache of one row, got "
                f"{len(tokens)} tokens, a count of {count} and {len(cache.lengths)} rows"
            )
        if len(tokens) > _FEW:
            self(torch.tensor([tokens[:-1]]), cache=cache)
            tokens = tokens[-1:]
        (start,) = cache.begin([len(tokens) + count - 1])
        reach = start + len(tokens) + count - 1
        step, said = _Single(self, self._turns.up_to(reach), cache), list[int]()
        for place, token in enumerate(tokens[:-1], start):
            self._through(step, token, place)
        token = tokens[-1]
        for place in range(start + len(tokens) - 1, reach):
            token, sure = self._likeliest(self._through(step, token, place), least)
            if token < 0:
                break
            said.append(token)
            if not sure or token in self.eos_token_ids:
                break
        cache.advance([start], [len(tokens) + len(said) - 1])
        return said

    def _through(self, step: _Single, token: int, place: int) -> Tensor:
        """Read a token of a single row at a place; return x [1, C] before the last norm."""
        x = self._embedding[token : token + 1].clone()
        for index, layer in enumerate(self._layers):
            if index or not self._small:
                qkv = layer.qkv(layer.before_attention(x)).view(torch.complex64)[0]
            else:
                qkv = self._looked_up(token)
            layer.out.add_to(x, step.attend(qkv, index, place))
            if layer.out_bias is not None:
                x.add_(layer.out_bias)
            gate, up = layer.gate_up(layer.before_mlp(x)).chunk(2, dim=1)
            layer.down.add_to(x, F.silu(gate).mul_(up))
        return x

    def _likeliest(self, x: Tensor, least: float) -> tuple[int, bool]:
        """Return the argmax after x [1, C], and whether its probability is at least `least`.

        The token is -1 if the largest logit isn't finite.
        """
        if not least:  # no argmax depends on the norm's length
            largest, token = self._head(x.mul_(self._last.gain)).max(-1)
            return int(token) if math.isfinite(float(largest)) else -1, True
        logits = self._head(self._last(x)).mul_(1 / self._head.scale)
        chance, token = logits.softmax(-1).max(-1)
        return int(token) if math.isfinite(float(chance)) else -1, float(chance) >= least

    def _looked_up(self, token: int) -> Tensor:
        """Return the first layer's qkv of a token: [(H + 2 Hkv) D / 2], complex."""
        if self._first is None:
            layer = self._layers[0]
            every = layer.before_attention(self._embedding)
            self._first = layer.qkv(every).view(torch.complex64)
        return self._first[token]


class _Step:
    """The data that all layers of one forward share: where tokens go and what they see."""

    def __init__(
        self,
        model: FusedLlama,
        starts: list[int],
        counts: list[int],
        width: int,
        capacity: int,
        tree: Tensor | None,
    ) -> None:
        config, batch = model.config, len(starts)
        self.kv, self.size = config.kv_heads, config.head_size
        self.group = config.num_attention_heads // self.kv
        self.batch, self.width = batch, width
        self.split = config.num_attention_heads * self.size
        self.reach = max(1, *(s + c for s, c in zip(starts, counts, strict=True)))
        self.first, self.count = starts[0], counts[0]
        # With no tokens before these, attention is plain causal attention.
        self.fresh = tree is None and width > 1 and not any(starts)
        self.index = None if batch == 1 else _Index(starts, counts, width, capacity)
        self.mask: Tensor | None = None
        turns = model._turns.up_to(max(starts) + width)
        related = None if tree is None else tree_mask(tree)
        if related is None and batch == 1:
            self.turns = turns[self.first : self.first + width]
        else:
            before = torch.tensor(starts)[:, None]
            after = torch.arange(width) if related is None else related.sum(-1) - 1
            self.turns = turns[(before + after).view(-1)]
        if self.fresh or (tree is None and width == 1 and len(set(starts)) == 1):
            return
        if related is not None and batch == 1 and self.count == width:
            mask = torch.zeros(1, width, self.reach)
            mask[:, :, self.first :].masked_fill_(~related, -math.inf)
        else:
            seen = self._seen(torch.tensor(starts)[:, None, None], tree, related)
            mask = torch.zeros(seen.shape).masked_fill_(~seen, -math.inf)
        self.mask = mask.repeat_interleave(self.group, 1)[:, None]  # [B, 1, T * G, reach]

    def _seen(self, starts: Tensor, tree: Tensor | None, related: Tensor | None) -> Tensor:
        """Return which slots each query sees: bool [B, T, reach]. starts: [B, 1, 1]."""
        ahead = torch.arange(self.reach) - starts  # index in this forward, < 0 before it
        if tree is None or related is None:
            return ahead <= torch.arange(self.width)[:, None]
        nodes = ahead.clamp(0, self.width - 1).expand(-1, self.width, -1)
        own = related.gather(2, nodes) & (ahead < self.width)
        return own | (ahead < 0) | (tree == -2)[:, :, None]  # keeps results at padding finite

    def attend(self, qkv: Tensor, stored: StoredLayer) -> Tensor:
        """Store and attend, with rotated qkv [R, (H + 2 Hkv) D]; return [R, H D]."""
        rows, kv, size, split = qkv.shape[0], self.kv, self.size, self.split
        new = qkv[:, split:].view(rows, 2, kv, size).permute(1, 2, 0, 3)  # [2, Hkv, R, D]
        if self.index is not None:
            self.index.write(stored.slots, new)
        elif self.count:
            place = stored.slots.narrow(2, self.first, self.count)
            place.copy_(new if self.count == rows else new[:, :, : self.count])
        queries = qkv[:, :split].view(self.batch, self.width, self.group, kv, size)
        if self.fresh:
            # [2, B, G Hkv, T, D]: each key head is repeated for the query heads of its group.
            wide = new.unflatten(2, (self.batch, self.width)).permute(0, 2, 1, 3, 4)
            k, v = wide[:, :, None].expand(-1, -1, self.group, -1, -1, -1).flatten(2, 3)
            q = queries.flatten(2, 3).transpose(1, 2)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            q = queries.permute(0, 3, 1, 2, 4).reshape(self.batch, kv, -1, size)
            k = stored.keys.narrow(2, 0, self.reach)
            v = stored.values.narrow(2, 0, self.reach)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        return mixed.transpose(1, 2).reshape(rows, split)


class _Single:
    """The data that the steps of one row share in `greedy`, and its attention."""

    def __init__(self, model: FusedLlama, turns: Tensor, cache: FusedCache) -> None:
        config = model.config
        kv, size = config.kv_heads, config.head_size
        self.turns, self.layers = turns, cache.layers
        self.turned = torch.empty_like(turns[0])
        self.split = config.num_attention_heads * size
        flat = self.turned.view(torch.float32)
        self.queries = flat[: self.split].view(1, -1, kv, size).transpose(1, 2)
        self.new = flat[self.split :].view(2, kv, size)

    def attend(self, qkv: Tensor, layer: int, place: int) -> Tensor:
        """Rotate, store and attend, with complex qkv [(H + 2 Hkv) D / 2]; return [1, H D]."""
        stored = self.layers[layer]
        torch.mul(qkv, self.turns[place], out=self.turned)
        stored.slots.select(2, place).copy_(self.new)
        k = stored.keys.narrow(2, 0, place + 1)
        v = stored.values.narrow(2, 0, place + 1)
        mixed = F.scaled_dot_product_attention(self.queries, k, v)
        return mixed.transpose(1, 2).reshape(1, self.split)


class _Index:
    """Where the tokens of several rows go: slots in [B * S], and the valid rows in [R]."""

    def __init__(self, starts: list[int], counts: list[int], width: int, capacity: int) -> None:
        into: list[int] = []
        taken: list[int] = []
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            into += range(row * capacity + start, row * capacity + start + count)
            taken += range(row * width, row * width + count)
        self.into = torch.tensor(into, dtype=torch.long)
        self.taken = None if min(counts) == width else torch.tensor(taken, dtype=torch.long)

    def write(self, slots: Tensor, new: Tensor) -> None:
        """Write new [2, Hkv, R, D] to slots [2, Hkv, B * S, D]."""
        given = new if self.taken is None else new.index_select(2, self.taken)
        slots.index_copy_(2, self.into, given)


def _checked(
    tokens: Tensor, counts: Tensor | None, cache: FusedCache, tree: Tensor | None
) -> tuple[int, int]:
    """Return B and T. Raises ValueError or TypeError for invalid shapes and dtypes."""
    if tokens.dim() != 2 or tokens.is_floating_point() or tokens.numel() == 0:
        raise ValueError(
            f"tokens must be integers [B, T], both at least 1, got {tokens.dtype} "
            f"{tuple(tokens.shape)}"
        )
    batch, width = tokens.shape
    if not isinstance(cache, FusedCache):
        raise TypeError(
            f"cache must come from FusedLlama.new_cache, got a {type(cache).__name__}; call it"
        )
    if cache.lengths.shape[0] != batch:
        raise ValueError(
            f"cache must have a row for each of the {batch} rows of tokens, "
            f"got {cache.lengths.shape[0]}"
        )
    for name, tensor, shape in (("counts", counts, (batch,)), ("tree", tree, (batch, width))):
        if tensor is not None and tensor.is_floating_point():
            raise TypeError(f"{name} must hold integers, got {tensor.dtype}")
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    return batch, width
