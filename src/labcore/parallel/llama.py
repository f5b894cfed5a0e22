"""A Llama divided among N ranks: heads, intermediate features and vocabulary in equal parts.

Each rank holds whole attention heads with their keys and values, part of the MLP's intermediate
features and part of the vocabulary. A layer's forward has two all-reduces, one after the output
projection and one after the down projection. Its backward also has two, one before the query, key
and value projections and one before gate and up. Under sequence parallelism each all-reduce becomes
an all-gather and a reduce-scatter, and the tensors between layers are divided by tokens.

Letters: N ranks, B rows, T tokens, C hidden_size, H heads, Hkv key and value heads, D head_dim,
F intermediate_size, V vocab_size.
Sources: Shoeybi et al., 2019, arXiv 1909.08053; Korthikanti et al., 2022, arXiv 2205.05198.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from labcore.models.cache import DenseCache
from labcore.models.checkpoint import read_config, read_state, shapes_of
from labcore.models.config import LlamaConfig
from labcore.models.llama import AttentionFunction, Llama, causal_attention
from labcore.parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    SequenceParallelNorm,
    check_kind,
)
from labcore.parallel.regions import (
    copy_to_ranks,
    divisors,
    gather_from_ranks,
    gather_sequence,
    part,
    rank_and_size,
)
from labcore.parallel.vocabulary import (
    VocabParallelEmbedding,
    VocabParallelHead,
    vocab_parallel_logits,
)

__all__ = [
    "ParallelLlama",
    "gathered_state",
    "load_parallel",
    "local_cache",
    "local_config",
    "parallelize",
]

# Blocks of a layer: name, column-parallel layers, and the row-parallel layer after them.
_BLOCKS = (
    ("self_attn", ("q_proj", "k_proj", "v_proj"), "o_proj"),
    ("mlp", ("gate_proj", "up_proj"), "down_proj"),
)
_NORMS = ("input_layernorm", "post_attention_layernorm")


class ParallelLlama(Llama):
    """A Llama of which this rank holds a part, made by `parallelize` or `load_parallel`.

    group: None is the default process group. sequence_parallel: between layers each rank holds
    T / N tokens. gather_logits: logits are [B, T, V]; False leaves them [B, T, V / N], for
    `vocab_parallel_cross_entropy`. config is that of the whole model.
    Every rank calls forward and backward in the same way and computes the loss from the same
    logits. Each parameter's gradient is then this rank's part of the whole gradient. `state_dict`
    has this rank's tensors; `gathered_state` has the whole ones, for saving.
    """

    group: dist.ProcessGroup | None
    sequence_parallel: bool
    gather_logits: bool

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of hidden [..., C], or [..., V / N] with gather_logits=False."""
        return vocab_parallel_logits(
            hidden,
            (self.lm_head or self.embed_tokens).weight,
            self.group,
            gather_output=self.gather_logits,
        )

    def _check(self, tokens: Tensor, **others: Any) -> None:
        super()._check(tokens, **others)
        ranks = rank_and_size(self.group)[1]
        if self.sequence_parallel and tokens.shape[1] % ranks:
            raise ValueError(
                f"T must be a multiple of the {ranks} ranks under sequence parallelism, got "
                f"tokens of shape {tuple(tokens.shape)}; pad the rows, or parallelize without "
                "sequence_parallel"
            )


def parallelize(
    llama: Llama,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    sequence_parallel: bool = False,
    gather_logits: bool = True,
) -> ParallelLlama:
    """Divide a Llama among the ranks of a group, in place; call it on every rank.

    llama: the same on every rank. Make optimizers and caches afterwards.
    group: a process group, a one-dimensional DeviceMesh, or None for the default group.
    sequence_parallel: also divide the tensors between layers by tokens; N must then divide T.
    gather_logits: False leaves each rank the logits of its part of the vocabulary.
    Returns the same object, now a ParallelLlama: forward(tokens) returns on every rank what it
    returned before. Raises ValueError for sizes that N doesn't divide, TypeError for a subclass of
    Llama or for replaced layers, before anything is changed.
    """
    if isinstance(llama, ParallelLlama):
        raise ValueError("llama must be whole, got one that is already divided; divide a new model")
    if type(llama) is not Llama:
        raise TypeError(
            f"llama must be a labcore.models.Llama, not a subclass, got {type(llama).__name__}"
        )
    ours = _group(group)
    _check_sizes(llama.config, rank_and_size(ours)[1])
    _check_layers(llama)
    llama.embed_tokens = VocabParallelEmbedding.of(  # type: ignore[assignment]
        llama.embed_tokens, ours, sequence_parallel=sequence_parallel
    )
    enter = partial(gather_sequence if sequence_parallel else copy_to_ranks, group=ours)
    for layer in llama.layers:
        for block_name, columns, row in _BLOCKS:
            block = layer.get_submodule(block_name)
            for name in columns:
                whole = getattr(block, name)
                setattr(block, name, ColumnParallelLinear.of(whole, ours, input_is_copied=True))
            whole = getattr(block, row)
            last = RowParallelLinear.of(whole, ours, sequence_parallel=sequence_parallel)
            setattr(block, row, last)
            _enter(block, enter)
        for name in _NORMS if sequence_parallel else ():
            setattr(layer, name, SequenceParallelNorm.of(getattr(layer, name), ours))
    if sequence_parallel:
        llama.norm = SequenceParallelNorm.of(llama.norm, ours)
        _leave(llama.norm, ours)
    if llama.lm_head is not None:
        head = VocabParallelHead.of(llama.lm_head, ours, gather_output=gather_logits)
        llama.lm_head = head  # type: ignore[assignment]
    # Change the class in place, so every reference to the object sees the divided model.
    llama.__class__ = ParallelLlama
    divided = cast(ParallelLlama, llama)
    divided.group, divided.sequence_parallel = ours, sequence_parallel
    divided.gather_logits = gather_logits
    return divided


def _group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        raise ValueError(
            f"a mesh must have one dimension, got {group.ndim}; pass mesh['name'] for one of them"
        )
    return group.get_group()


def _check_sizes(config: LlamaConfig, ranks: int) -> None:
    """Raise ValueError with the sizes that N doesn't divide and the N that divide all of them."""
    sizes = {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.kv_heads,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
    }
    wrong = [f"{name}={size}" for name, size in sizes.items() if size % ranks]
    if wrong:
        fitting = ", ".join(map(str, divisors(math.gcd(*sizes.values()))))
        raise ValueError(
            f"the number of ranks must divide the model's {', '.join(sizes)}, got {ranks} ranks "
            f"for {', '.join(wrong)}; this model can be divided among {fitting} "
            "ranks"
        )


def _check_layers(llama: Llama) -> None:
    """Raise TypeError with the name of a layer that isn't as `Llama` makes it."""
    modules = dict(llama.named_modules())
    check_kind("embed_tokens", modules["embed_tokens"], nn.Embedding)
    names = [
        f"layers.{layer}.{block}.{name}"
        for layer in range(len(llama.layers))
        for block, columns, row in _BLOCKS
        for name in (*columns, row)
    ]
    for name in names if llama.lm_head is None else [*names, "lm_head"]:
        check_kind(name, modules.get(name), nn.Linear)


def _enter(block: nn.Module, enter: Callable[[Tensor], Tensor]) -> None:
    """Run one collective for all column layers of a block, because they read the same input."""

    def hook(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (enter(inputs[0]), *inputs[1:])

    block.register_forward_pre_hook(hook)


def _leave(norm: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Gather whole hidden states after the last norm.

    The head sums its gradients itself. Any other reader of the hidden states does the same work on
    every rank, so a sum would count its gradient N times.
    """

    def hook(_: nn.Module, __: object, hidden: Tensor) -> Tensor:
        return gather_from_ranks(hidden, group, dim=1)

    norm.register_forward_hook(hook)


def local_config(llama: Llama) -> LlamaConfig:
    """Return the configuration with the heads that this rank holds, all those of a whole Llama."""
    config = llama.config
    keys = cast(Tensor, llama.get_parameter("layers.0.self_attn.k_proj.weight"))
    kv_heads = keys.shape[0] // config.head_size
    return replace(
        config,
        num_attention_heads=config.num_attention_heads * kv_heads // config.kv_heads,
        num_key_value_heads=kv_heads,
        head_dim=config.head_size,
    )


def local_cache(
    llama: Llama,
    *,
    batch: int,
    capacity: int,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> DenseCache:
    """Make a cache for the Hkv / N key and value heads that this rank holds.

    batch: B; capacity: the most tokens per row. dtype, device: None uses the model's.
    For a whole Llama it's the whole cache.
    """
    weight = llama.embed_tokens.weight
    return DenseCache(
        local_config(llama),
        batch=batch,
        capacity=capacity,
        dtype=weight.dtype if dtype is None else dtype,
        device=weight.device if device is None else device,
    )


def _cuts(llama: ParallelLlama) -> dict[str, int | None]:
    """Return the dimension along which each parameter is divided; None if it's whole."""
    return {
        f"{prefix}.{name}": getattr(module, "cuts", {}).get(name)
        for prefix, module in llama.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    }


@torch.no_grad()
def gathered_state(llama: ParallelLlama, *, rank: int | None = None) -> dict[str, Tensor]:
    """Return the whole model's tensors by name, on the CPU, in their dtype; call it on every rank.

    Load them with `Llama(llama.config, device="meta").load_state_dict(…, assign=True)`, on one
    rank, and save that model with `labcore.models.save_pretrained`.
    rank: the only rank of the group that keeps the tensors; the others get an empty dictionary.
    Raises TypeError for a model that isn't divided.
    """
    if not isinstance(llama, ParallelLlama):
        raise TypeError(
            f"llama must be a ParallelLlama, got {type(llama).__name__}; a whole model's tensors "
            "are in its state_dict()"
        )
    cuts, whole = _cuts(llama), {}
    for name, tensor in llama.state_dict().items():
        dim = cuts.get(name)
        found = tensor if dim is None else gather_from_ranks(tensor, llama.group, dim)
        if rank in (None, rank_and_size(llama.group)[0]):
            # Copy whole tensors too, so the result never shares memory with the model.
            whole[name] = found.to("cpu", copy=True)
    return whole


def load_parallel(
    folder: str | Path,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    attention: AttentionFunction = causal_attention,
    sequence_parallel: bool = False,
    gather_logits: bool = True,
) -> ParallelLlama:
    """Return `parallelize(from_pretrained(folder))`, with each rank reading only its own part.

    folder: config.json and safetensors, as for `labcore.models.from_pretrained`.
    dtype: of the weights; None keeps the stored dtype. device: where they go.
    attention: as for `Llama`; it gets this rank's heads.
    group, sequence_parallel, gather_logits: as for `parallelize`.
    Returns the model in evaluation mode. Raises FileNotFoundError for a missing file, ValueError
    for sizes that N doesn't divide and for tensors that are missing, unexpected or of the wrong
    shape.
    """
    config = read_config(folder)
    model = Llama(config, attention=attention, device="meta")
    shapes = shapes_of(model)
    llama = parallelize(
        model, group, sequence_parallel=sequence_parallel, gather_logits=gather_logits
    )
    # A tied checkpoint may also store the head, which is divided like the embedding.
    cuts = {"lm_head.weight": 0, **_cuts(llama)}

    def take(name: str, stored: Any) -> Tensor:
        own = _own_part(stored, tuple(stored.get_shape()), cuts[name], llama.group)
        # Copy: what was read is a view of the file, strided if columns are divided.
        return own.to(device=device, dtype=dtype, copy=True, memory_format=torch.contiguous_format)

    llama.load_state_dict(read_state(folder, config, shapes, take), assign=True)
    return llama.eval()


def _own_part(
    stored: Any, shape: tuple[int, ...], dim: int | None, group: dist.ProcessGroup | None
) -> Tensor:
    """Read this rank's rows or columns from a safetensors slice, or all of it if dim is None."""
    if dim is None:
        return stored[:]
    mine = part("a stored dimension", shape[dim], group)
    return stored[mine] if dim == 0 else stored[:, mine]
