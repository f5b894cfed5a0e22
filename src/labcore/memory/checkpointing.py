"""Activation checkpointing: keep only the inputs of segments of layers and recompute the rest.

The backward of a segment reruns its forward with the same random numbers, so gradients are the same
to the bit. With N layers in segments of k, the backward holds N/k inputs and the activations of k
layers. That is smallest near k = √N if a layer keeps no more bytes than its input; the more a layer
keeps, the shorter the best segments.
Sources: Chen et al., 2016, arXiv 1604.06174; selective: Korthikanti et al., 2022, arXiv 2205.05198.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from labcore.checks import fraction, non_negative, positive, positive_int
from labcore.memory.accounting.meter import Meter
from labcore.memory.accounting.prediction import estimate
from labcore.memory.model import batches, fresh
from labcore.memory.trials import Trial, adamw, trial
from labcore.models.config import LlamaConfig
from labcore.models.training import next_token_loss

__all__ = [
    "BlocksRun",
    "CheckpointedLayers",
    "DropoutBlocks",
    "best_every",
    "run_blocks",
    "set_checkpointing",
    "stretch_bytes",
    "stretch_length",
    "try_checkpointing",
]

How = int | str | None

aten = torch.ops.aten
# Expensive to compute and cheap to keep. None may draw random numbers: a kept result isn't drawn
# again, so the operations recomputed after it would get its numbers.
KEPT = {
    aten.mm.default,
    aten.addmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}


def stretch_length(how: int | str, layers: int) -> int:
    """Return the number of layers in a segment that is recomputed as one.

    how: that number itself; "sqrt", √layers rounded to a whole number; "selective", 1.
    """
    positive_int("layers", layers)
    if isinstance(how, str):
        if how not in ("sqrt", "selective"):
            raise ValueError(
                "checkpointing must be None, a number of layers, 'sqrt' or 'selective', "
                f"got {how!r}"
            )
        return 1 if how == "selective" else round(math.sqrt(layers))
    return positive_int("checkpointing", how, "or None, 'sqrt' or 'selective'")


class CheckpointedLayers(nn.ModuleList):
    """A checkpointing ModuleList, for a model whose forward is `for layer in layers: x = …`.

    Indices and parameter names are those of a plain ModuleList. Iterating yields the segments
    instead: functions with the layers' arguments, the residual stream x first, that recompute in
    the backward.
    """

    def __init__(self, layers: Iterable[nn.Module], how: int | str) -> None:
        super().__init__(layers)
        self.how = how

    def __iter__(self) -> Iterator[Any]:
        layers = list(self.children())
        every = stretch_length(self.how, len(layers))
        options = SELECTIVE if self.how == "selective" else {}
        for first in range(0, len(layers), every):
            run = functools.partial(_run, layers[first : first + every])
            yield functools.partial(checkpoint, run, use_reentrant=False, **options)


def _run(layers: list[nn.Module], x: Tensor, *others: object) -> Tensor:
    for layer in layers:
        x = layer(x, *others)
    return x


def _policy(_context: object, operation: object, *_: object, **__: object) -> CheckpointPolicy:
    keep = operation in KEPT
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _selective() -> Any:
    return create_selective_checkpoint_contexts(_policy)


SELECTIVE: dict[str, Any] = {"context_fn": _selective}
if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters:
    # torch 2.15 requires a choice. Earlier releases behave like False.
    SELECTIVE["respect_saved_tensors_hooks"] = False


def set_checkpointing(model: nn.Module, how: How) -> None:
    """Set what the backward of `model.layers` recomputes; weights and their names don't change.

    how: k, every k layers as one segment, with the remainder at the end; "sqrt", segments of about
    √N layers; "selective", each layer except its products and attention, whose results are kept;
    None, nothing.
    Raises ValueError or TypeError for anything else, and TypeError if `model.layers` isn't a
    ModuleList. Without gradients nothing is recomputed.
    """
    layers = model.layers
    if not isinstance(layers, nn.ModuleList):
        raise TypeError(
            f"model.layers must be a ModuleList, got {type(layers).__name__}; make it one"
        )
    plain = list(layers.children())  # iterating would yield checkpointed segments
    if how is not None:
        stretch_length(how, len(plain))
    model.layers = nn.ModuleList(plain) if how is None else CheckpointedLayers(plain, how)


def stretch_bytes(layers: int, every: int, *, layer: int, boundary: int) -> int:
    """Return the peak bytes of a checkpointed backward, which it holds at its start.

    layer: bytes that autograd keeps of one layer, its input included; boundary: that input's bytes.
    """
    positive_int("layers", layers)
    positive("layer", layer)
    non_negative("boundary", boundary)
    stretches = -(-layers // positive_int("every", every))
    last = layers - (stretches - 1) * every
    longest = max(every * layer - boundary, last * layer) if stretches > 1 else last * layer
    return (stretches - 1) * boundary + longest


def best_every(config: LlamaConfig, *, batch: int, length: int, **options: Any) -> int:
    """Return the layers per segment with which a step of `Llama(config)` holds the fewest bytes.

    options: those of `estimate`, except checkpointing.
    """

    def held(every: int) -> int:
        return estimate(config, batch=batch, length=length, checkpointing=every, **options).total

    return min(range(1, config.num_hidden_layers + 1), key=held)


class DropoutBlocks(nn.Module):
    """x + dropout(relu(linear(x))), `depth` times: x [N, width] to [N, width], float32."""

    def __init__(
        self, depth: int, width: int, *, dropout: float = 0.1, generator: torch.Generator
    ) -> None:
        super().__init__()
        fraction("dropout", dropout)
        self.layers = nn.ModuleList(
            _Block(positive_int("width", width), dropout, generator)
            for _ in range(positive_int("depth", depth))
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, width]; returns the same shape."""
        for layer in self.layers:
            x = layer(x)
        return x


class _Block(nn.Module):
    def __init__(self, width: int, dropout: float, generator: torch.Generator) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, width), nn.Dropout(dropout)
        with torch.no_grad():
            self.linear.weight.normal_(0, width**-0.5, generator=generator)
            self.linear.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.relu(self.linear(x)))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlocksRun:
    """activations: their peak bytes; gradients: those of all parameters, in order."""

    activations: int
    gradients: tuple[Tensor, ...]


def run_blocks(
    how: How, seed: int, *, depth: int = 64, width: int = 64, rows: int = 64, dropout: float = 0.1
) -> BlocksRun:
    """Run one forward and backward of DropoutBlocks; weights, input and dropout come from `seed`.

    Seeds torch's global generator, from which dropout draws, and restores it.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(positive_int("rows", rows), width, generator=generator)
    with torch.random.fork_rng(devices=[]):
        model = DropoutBlocks(depth, width, dropout=dropout, generator=generator)
        set_checkpointing(model, how)
        torch.manual_seed(seed)
        with Meter(model) as meter:
            model(x).square().mean().backward()
    gradients = tuple(p.grad for p in model.parameters() if p.grad is not None)
    return BlocksRun(activations=meter.most.activations, gradients=gradients)


def try_checkpointing(
    seed: int, how: How, *, steps: int, batch: int = 8, length: int = 256
) -> Trial:
    """Train the chapter's model with `set_checkpointing(model, how)`; its loss doesn't change."""
    model = fresh(seed)
    set_checkpointing(model, how)
    optimizer, draw = adamw(model), batches(seed, batch=batch, length=length)

    def step(n: int) -> None:
        optimizer.zero_grad()
        loss, count = next_token_loss(model, *draw(n))
        (loss / count).backward()
        optimizer.step()

    return trial(model, optimizer, step, steps=steps)
