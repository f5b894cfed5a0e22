"""Epsilon, number formats and shapes on the language model of `labcore.studies.language`.

A run has the settings that tuning found for AdamW at its batch size, and one thing changed: eps,
the format in which weights and state are kept, or the model's shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from labcore.checks import non_negative, one_of, positive_int
from labcore.models import Llama, LlamaConfig, windows
from labcore.studies.adamw_epsilon.gradient_batches import GradientSizes, layers, measure
from labcore.studies.language import bench
from labcore.studies.language.results import best

__all__ = [
    "BATCH",
    "EPSILONS",
    "FORMATS",
    "SHAPES",
    "SHAPE_BATCH",
    "Trained",
    "gradients",
    "second_moments",
    "shape_config",
    "train_eps",
    "train_shape",
]

BATCH = 8_192
EPSILONS = (1e-15, 1e-8, 1e-5, 1e-3)
FORMATS = ("fp32", "bf16")
SHAPES = ((64, 5), (128, 5), (256, 5), (128, 2), (128, 10))
"""Widths at one depth, and depths at one width; the bench's model is the second."""
SHAPE_BATCH = 2_048  # with BATCH, a short run would have too few steps


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trained:
    """A run with its model and its optimizer as they are after the last step."""

    run: bench.LanguageRun
    model: Llama
    optimizer: torch.optim.Optimizer


def _train(
    model: Llama,
    batch: int,
    seed: int,
    *,
    tokens: int,
    max_files: int | None,
    scale: float = 1.0,
    rounded: bool = False,
    options: Mapping[str, Any],
) -> Trained:
    """Train with AdamW's tuned setting at `batch` and more options.

    scale: a factor for the learning rate. rounded: whether to round the weights after each step.
    """
    setting, made = best(batch, "AdamW"), []

    def make(model: Llama) -> torch.optim.Optimizer:
        rate = {"lr": scale * setting.lr, "decay": setting.decay}
        optimizer = bench.OPTIMIZERS["AdamW"](model, **rate, **options)
        if rounded:
            optimizer.register_step_post_hook(_round_weights)
        made.append(optimizer)
        return optimizer

    run = bench.train_language(
        make, batch=batch, seed=seed, tokens=tokens, model=model, max_files=max_files
    )
    return Trained(run=run, model=model, optimizer=made[0])


@torch.no_grad()
def _round_weights(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Round every weight to bfloat16, and keep it in a tensor of float32."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.copy_(parameter.bfloat16())


def train_eps(
    eps: float,
    seed: int,
    *,
    form: str = "fp32",
    tokens: int = bench.TOKENS,
    max_files: int | None = None,
) -> Trained:
    """Train the bench's model with another eps, in batches of BATCH tokens.

    form: "fp32", or "bf16". With "bf16", the weights are rounded to bfloat16 before the first step
    and after each, and both moments are kept in bfloat16. The forward and backward pass and the
    arithmetic of the update stay in float32, because a pass in bfloat16 takes about nine times as
    long on a CPU without bfloat16 instructions. So the gradients are not rounded.
    """
    non_negative("eps", eps)
    low, model = one_of("form", form, FORMATS) == "bf16", bench.language_model(seed)
    if low:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
    options = {"eps": eps, **({"state_dtype": torch.bfloat16} if low else {})}
    return _train(
        model, BATCH, seed, tokens=tokens, max_files=max_files, rounded=low, options=options
    )


def shape_config(width: int, depth: int) -> LlamaConfig:
    """Return the bench's model with another width, a multiple of 64, and another depth.

    Heads stay 32 wide, the inner width of the MLP stays 2.75 times the width, and the weights start
    with a standard deviation of 1/√width.
    """
    if positive_int("width", width) % 64:
        raise ValueError(f"width must be a multiple of 64, got {width}")
    return replace(
        bench.CONFIG,
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=positive_int("depth", depth),
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        initializer_range=width**-0.5,
    )


def train_shape(
    width: int, depth: int, seed: int, *, tokens: int, max_files: int | None = None
) -> Trained:
    """Train a model of this shape with AdamW and eps 1e-8, in batches of SHAPE_BATCH tokens.

    The learning rate is the tuned one times 128/width and does not depend on the depth. That is how
    Adam's best rate for matrices scales with the width (Yang et al., 2022, arXiv 2203.03466), and
    what `gradient_scale.learning_rate` found on small models.
    """
    model = bench.language_model(seed, shape_config(width, depth))
    rate = bench.CONFIG.hidden_size / width
    return _train(
        model,
        SHAPE_BATCH,
        seed,
        tokens=tokens,
        max_files=max_files,
        scale=rate,
        options={"eps": 1e-8},
    )


def gradients(
    model: Llama,
    seed: int,
    *,
    tokens: int,
    batches: Sequence[int],
    max_files: int | None = None,
) -> GradientSizes:
    """Measure the gradients over `tokens` tokens of the training text, for several batch sizes.

    batches: tokens per batch, multiples of 2,048. The windows are not those of the training.
    """
    piece = bench.ROWS * bench.LENGTH
    take = windows(
        bench.text("report", max_files=max_files), batch=bench.ROWS, length=bench.LENGTH, seed=seed
    )
    rows = torch.stack([take(10**6 + n)[0] for n in range(tokens // piece)])
    return measure(model, rows, joined=[batch // piece for batch in batches])


def second_moments(trained: Trained) -> dict[str, Tensor]:
    """Return Adam's √v̂ by layer, fp64 [weights of the layer], after the last step."""
    roots = {}
    for name, parameters in layers(trained.model).items():
        found = []
        for parameter in parameters:
            state = trained.optimizer.state[parameter]
            correction = 1 - trained.optimizer.param_groups[0]["betas"][1] ** float(state["step"])
            found.append((state["exp_avg_sq"].double() / correction).sqrt().flatten())
        roots[name] = torch.cat(found)
    return roots
