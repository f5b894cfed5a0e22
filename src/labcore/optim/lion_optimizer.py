"""Lion: the sign of an interpolated momentum, with one moment of state and steps of size lr."""

import functools
from collections.abc import Iterable
from math import isfinite
from typing import Any, ClassVar

import torch
from torch import Tensor

from labcore.optim import fused, rules
from labcore.optim.chunked import Chunk
from labcore.optim.elementwise import ElementwiseShell
from labcore.optim.shell import Item, is_plain

__all__ = ["Lion"]


class Lion(ElementwiseShell):
    """Lion (Chen et al., arXiv 2302.06675): `p ← (1 − lr λ) p − lr sign(beta1 m + (1 − beta1) g)`.

    See `rules.lion` for the rule. Compared with AdamW, choose an lr three to ten times smaller and
    a weight_decay larger by the same factor. State: `exp_avg`, one tensor per parameter.

    Every move has size lr, so a bfloat16 weight near 1 does not move at all if lr < 2⁻⁹. Use
    stochastic_rounding or master_weights there. A complex weight uses the sign of each component.
    After the gradient vanishes, the momentum keeps its sign, and the weight drifts by lr per step.

    Args:
        params: parameters, named parameters, or parameter groups.
        lr: learning rate, at least 0. A one-element tensor is read at every step.
        betas: (beta1, beta2), each in [0, 1); floats or one-element tensors.
        weight_decay: decoupled weight decay λ, per unit of lr.
        maximize: maximize the objective. The gradient itself never changes.
        foreach: None or True uses chunks on a CPU and torch's _foreach operations on a GPU. False
            uses a plain loop.
        fused: True updates each weight in a single compiled pass, in float32. On a GPU, this is one
            Triton launch per device and dtype. On a CPU, it is C++ that `torch.compile` generates:
            a process's first step takes several seconds longer, or less if inductor finds the code
            in its cache on disk. Without a C++ compiler, the optimizer warns and steps as with
            fused=False; so do bfloat16 parameters with stochastic rounding on a CPU, because
            drawing the bits takes most of the time.
        capturable: True never reads lr and betas on the host if they are tensors, for CUDA graphs.
        state_dtype: torch.float32, bfloat16 or float16; None for the parameter's dtype.
        master_weights: keep a float32 copy of bfloat16 and float16 parameters in the state.
        stochastic_rounding: round bfloat16 parameters stochastically, without bias.
        generator: the random generator for rounding, on the parameters' device; None for torch's
            default. The caller must save its state.
        nonfinite: what to do about a NaN or infinite gradient. "propagate" makes the weight NaN,
            "raise" raises RuntimeError before any weight changes, and "skip" skips the parameter's
            step and counts it in `optimizer.skipped`.

    Errors: ValueError and TypeError for settings, RuntimeError for sparse gradients.
    torch's `differentiable` is not supported.
    """

    rule = staticmethod(rules.lion)
    moments: ClassVar[tuple[str, ...]] = ("exp_avg",)
    counts_steps: ClassVar[bool] = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        state_dtype: torch.dtype | None = None,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        generator: torch.Generator | None = None,
        nonfinite: str = "propagate",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
            "state_dtype": state_dtype,
            "master_weights": master_weights,
            "stochastic_rounding": stochastic_rounding,
            "nonfinite": nonfinite,
        }
        super().__init__(params, defaults, generator)

    def _hyperparameters(self, group: dict[str, Any], *, tensors: bool = False) -> dict[str, Any]:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        if not tensors:
            lr, beta1, beta2 = float(lr), float(beta1), float(beta2)
        return {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": group["weight_decay"]}

    def cpu_update(self, group: dict[str, Any]) -> Chunk:
        """Return the in-place CPU update of one piece, which reads the piece only once."""
        hyper = self._hyperparameters(group)
        blend, forget = 1 - hyper["beta1"], 1 - hyper["beta2"]
        descend = functools.partial(
            torch._fused_sgd_,
            lr=hyper["lr"],
            weight_decay=hyper["weight_decay"],
            momentum=0.0,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )

        def chunk(
            param: Tensor, grad: Tensor, moments: tuple[Tensor, ...], scratch: Tensor, _: float
        ) -> None:
            (exp_avg,) = moments
            torch.lerp(exp_avg, grad, blend, out=scratch).sign_()
            exp_avg.lerp_(grad, forget)
            # Gradient descent with decay on the sign is Lion's weight update, in one pass.
            descend([param], [scratch], [])
            # sign(NaN) is 0. The sum of the momentum, which includes the gradient, detects
            # non-finite values; adding 0·m then makes those weights NaN and changes no others.
            if not isfinite(exp_avg.sum().item()):
                param.addcmul_(exp_avg, exp_avg.new_zeros(()))

        return chunk

    def _foreach(self, group: dict[str, Any], items: list[Item]) -> bool:
        params = [param for param, _, _ in items]
        if not is_plain(items) or any(isinstance(beta, Tensor) for beta in group["betas"]):
            return False
        grads: list[Tensor] = [grad for _, grad, _ in items]
        if group["maximize"]:
            grads = list(torch._foreach_neg(grads))
        hyper = self._hyperparameters(group, tensors=group["capturable"])
        lr = hyper["lr"]
        exp_avgs = [state["exp_avg"] for _, _, state in items]
        updates = torch._foreach_lerp(exp_avgs, grads, 1 - hyper["beta1"])
        poison = torch._foreach_mul(updates, 0.0)  # sign would hide NaN and infinity
        torch._foreach_sign_(updates)
        torch._foreach_add_(updates, poison)
        torch._foreach_mul_(updates, -lr)
        torch._foreach_lerp_(exp_avgs, grads, 1 - hyper["beta2"])
        if hyper["weight_decay"]:
            torch._foreach_mul_(params, 1 - lr * hyper["weight_decay"])
        torch._foreach_add_(params, updates)
        return True

    def _fused(self, group: dict[str, Any], items: list[Item]) -> None:
        fused.lion_step(
            items,
            self._tables,
            **self._hyperparameters(group, tensors=group["capturable"]),
            capturable=group["capturable"],
            maximize=group["maximize"],
            stochastic=group["stochastic_rounding"],
            generator=self.generator,
        )
