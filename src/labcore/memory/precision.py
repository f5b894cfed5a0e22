"""Mixed precision: which numbers take 16 bits, what that saves, and what it loses.

Pure 16-bit training halves weights, gradients, moments and activations. torch.autocast keeps the
weights, gradients and moments in float32 and computes products in 16 bits, so it only saves
activations. bfloat16 has float32's range and 8 bits of precision. float16 has 11 bits but rounds
gradients below 3e-8 to zero, which is why a GradScaler scales the loss.
Source: Micikevicius et al., 2017, arXiv 1710.03740.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode

from labcore.checks import floating, one_of, positive
from labcore.memory.model import batches, fresh, held_out_loss
from labcore.memory.trials import Trial, adamw, trial
from labcore.models.llama import Llama, LlamaOutput
from labcore.models.training import next_token_loss

__all__ = [
    "RECIPES",
    "Lost",
    "PrecisionRecipe",
    "PrecisionTrial",
    "computed_dtypes",
    "lost",
    "precise_loss",
    "precise_step",
    "product_gradients",
    "try_precision",
]

HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionRecipe:
    """The dtypes in which training stores and computes its numbers.

    weights: of parameters, gradients and moments. products: the dtype in which torch.autocast
    computes products; None turns autocast off. scaled: whether a GradScaler scales the loss.
    Raises ValueError for combinations that torch doesn't support.
    """

    weights: torch.dtype = torch.float32
    products: torch.dtype | None = None
    scaled: bool = False

    def __post_init__(self) -> None:
        one_of("weights", self.weights, (torch.float32, *HALVES))
        one_of("products", self.products, (None, *HALVES))
        if self.products is not None and self.weights != torch.float32:
            raise ValueError(
                f"autocast is for float32 weights, got {self.weights}; leave out products, or keep "
                "the weights in float32"
            )
        if self.scaled and self.weights == torch.float16:
            raise ValueError(
                "a GradScaler cannot unscale float16 gradients; keep the weights in float32 and "
                "pass products=torch.float16"
            )

    @property
    def estimated_as(self) -> str:
        """The recipe's `dtype` argument for `estimate`."""
        return "mixed" if self.products is not None else str(self.weights).removeprefix("torch.")


RECIPES = {
    "float32": PrecisionRecipe(),
    "autocast to bfloat16": PrecisionRecipe(products=torch.bfloat16),
    "autocast to float16": PrecisionRecipe(products=torch.float16),
    "autocast to float16, scaled": PrecisionRecipe(products=torch.float16, scaled=True),
    "bfloat16": PrecisionRecipe(weights=torch.bfloat16),
    "float16": PrecisionRecipe(weights=torch.float16),
}


def precise_loss(model: Llama, tokens: Tensor, recipe: PrecisionRecipe) -> Tensor:
    """Return the mean next-token loss in nats, fp32; tokens: integers [B, T]. No backward."""
    cast = torch.autocast(
        tokens.device.type, dtype=recipe.products, enabled=recipe.products is not None
    )
    with cast:
        total, count = next_token_loss(model, tokens)
    return total / count


def precise_step(
    model: Llama,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    recipe: PrecisionRecipe,
    scaler: GradScaler,
) -> float:
    """Run one training step and return the loss before it.

    scaler: GradScaler(device, enabled=recipe.scaled), which does nothing if it isn't enabled. The
    backward runs outside autocast: each product's gradient has the dtype of its forward.
    """
    optimizer.zero_grad()
    loss = precise_loss(model, tokens, recipe)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


class _Results(TorchDispatchMode):
    """Records the dtypes that each operation returns, after autocast has chosen them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.found.setdefault(func.overloadpacket.__name__, set()).add(tensor.dtype)
        return out


def computed_dtypes(run: Callable[[], object]) -> dict[str, tuple[str, ...]]:
    """Return the dtypes of each operation's results during `run()`: {"mm": ("bfloat16",), …}.

    Under autocast this shows which operations stay in float32; the lists of CPU and GPU differ.
    """
    with _Results() as results:
        run()
    return {
        name: tuple(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        for name, dtypes in sorted(results.found.items())
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """Shares of the nonzero elements that a dtype rounds to zero, and to infinity."""

    to_zero: float
    to_infinity: float


def lost(x: Tensor, dtype: torch.dtype, *, scale: float = 1.0) -> Lost:
    """Return what x · scale loses when it's rounded to `dtype`.

    x: any shape, floating point; zero and non-finite elements don't count.
    Raises ValueError if no element is left.
    """
    wide = floating("x", x).double()
    wide = wide[torch.isfinite(wide) & (wide != 0)] * positive("scale", scale)
    if wide.numel() == 0:
        raise ValueError("x must hold a finite number other than 0, got none")
    rounded = wide.to(dtype)
    return Lost(
        to_zero=(rounded == 0).double().mean().item(),
        to_infinity=torch.isinf(rounded).double().mean().item(),
    )


def product_gradients(model: Llama, tokens: Tensor) -> Tensor:
    """Return the gradients of the mean loss by the outputs of all weight products: fp32 [N].

    Autocast's backward holds these in 16 bits. tokens: integers [B, T]. Clears the model's
    parameter gradients.
    """
    found: list[Tensor] = []

    def listen(_module: nn.Module, _inputs: object, out: Tensor | LlamaOutput) -> None:
        result = out.logits if isinstance(out, LlamaOutput) else out
        result.register_hook(lambda gradient: found.append(gradient.detach().float().flatten()))

    # The head isn't called as a module; its output is the model's.
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    hooks = [module.register_forward_hook(listen) for module in (model, *linear)]
    try:
        precise_loss(model, tokens, RECIPES["float32"]).backward()
    finally:
        for hook in hooks:
            hook.remove()
    model.zero_grad(set_to_none=True)
    return torch.cat(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionTrial:
    """The result of `try_precision`.

    trial: bytes, seconds, loss. scale: the GradScaler's at the end. skipped: steps that it skipped
    because of an overflow.
    """

    trial: Trial
    scale: float
    skipped: int


def try_precision(
    seed: int, recipe: PrecisionRecipe, *, steps: int, batch: int = 8, length: int = 256
) -> PrecisionTrial:
    """Train the chapter's model with a recipe, which is also used for the held-out loss.

    A CPU without 16-bit units computes bfloat16 and float16 products slowly, so the seconds hold
    only for that CPU. Pure float16 has AdamW's epsilon trap, and its loss may be NaN.
    """
    model = fresh(seed, dtype=recipe.weights)
    optimizer, draw = adamw(model), batches(seed, batch=batch, length=length)
    device = next(model.parameters()).device.type
    scaler = GradScaler(device, enabled=recipe.scaled)
    scales = [scaler.get_scale()]

    def step(n: int) -> None:
        precise_step(model, optimizer, draw(n)[0], recipe, scaler)
        scales.append(scaler.get_scale())

    def loss() -> float:
        cast = torch.autocast(device, dtype=recipe.products, enabled=recipe.products is not None)
        with cast:
            return held_out_loss(model)

    found = trial(model, optimizer, step, steps=steps, loss=loss)
    skipped = sum(after < before for before, after in itertools.pairwise(scales))
    return PrecisionTrial(trial=found, scale=scales[-1], skipped=skipped)
