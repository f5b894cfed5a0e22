"""AdamW, with options for every choice of epsilon and precision that changes its results."""

from collections.abc import Iterable
from math import sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor

from labcore import checks
from labcore.optim import fused, rules
from labcore.optim.chunked import Chunk, Flat
from labcore.optim.elementwise import ElementwiseShell
from labcore.optim.shell import Item, is_plain

__all__ = ["AdamW"]


class AdamW(ElementwiseShell):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101): Adam with decoupled weight decay.

    See `rules.adamw` for the formulas. With its defaults, it matches `torch.optim.AdamW` and loads
    its state dict. State: `step`, `exp_avg`, `exp_avg_sq`; two tensors per parameter.

    Low precision: the update is computed in float32 (float64 for float64 parameters), and the state
    of a float16 parameter is float32. A float16 parameter therefore keeps training with eps=1e-8.
    Float16 arithmetic gives NaN there, as `rules.adamw` on float16 tensors shows, and torch's fused
    AdamW, which stores the state in float16, fails some steps later.

    A bfloat16 weight near 1 does not move if the update is below 2⁻⁹; use stochastic_rounding or
    master_weights. With state_dtype=torch.float16, `exp_avg_sq` underflows to 0 for gradients below
    about 5e-3, and eps then determines the step. Lasting gradients above 256 overflow it, and the
    weight stops moving. In bfloat16, `exp_avg_sq` no longer decays. Use float32 for the state.

    Args:
        params: parameters, named parameters, or parameter groups.
        lr: learning rate, at least 0. A one-element tensor is read at every step.
        betas: (beta1, beta2), each in [0, 1); floats or one-element tensors.
        eps: at least 0, in units of the gradient ("outside") or of its square ("inside").
        weight_decay: decoupled weight decay λ, per unit of lr.
        eps_mode: "outside" is `m̂ / (√(v̂ + eps_root) + eps)`, "inside" is `m̂ / √(v̂ + eps)`, and
            "atan2" is `atan2(m̂, √v̂)`, which ignores eps.
        eps_root: at least 0, in units of the gradient squared; only for "outside".
        state_dtype: torch.float32, bfloat16 or float16; None for the parameter's dtype, but float32
            for a float16 parameter.
        fused: as in `Lion`, but not for "atan2". On a CPU, torch's own compiled form is
            used if parameter, gradient and state share a dtype, eps_mode is "outside", eps_root is
            0, and rounding isn't stochastic.
        maximize, foreach, capturable, master_weights, stochastic_rounding, generator,
            nonfinite: as in `Lion`. capturable also keeps `step` on the device.

    Errors: ValueError and TypeError for settings, RuntimeError for sparse gradients.
    torch's `amsgrad` and `differentiable` are not supported.
    """

    rule = staticmethod(rules.adamw)
    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    counts_steps: ClassVar[bool] = True
    choices: ClassVar[tuple[str, ...]] = ("eps_mode", "eps_root")
    neutral: ClassVar[dict[str, Any]] = {
        **ElementwiseShell.neutral,
        "eps_mode": "outside",
        "eps_root": 0.0,
    }

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        eps_mode: str = "outside",
        eps_root: float = 0.0,
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
            "eps": eps,
            "weight_decay": weight_decay,
            "eps_mode": eps_mode,
            "eps_root": eps_root,
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

    def _check_group(self, group: dict[str, Any]) -> None:
        checks.non_negative("eps", group["eps"])
        checks.non_negative("eps_root", group["eps_root"])
        checks.one_of("eps_mode", group["eps_mode"], rules.EPS_MODES)
        if group["eps_root"] and group["eps_mode"] != "outside":
            raise ValueError(
                "eps_root needs eps_mode='outside', "
                f"got eps_mode={group['eps_mode']!r}; leave eps_root at 0"
            )
        if group["eps_mode"] == "atan2" and group["fused"]:
            raise ValueError("fused does not support eps_mode='atan2'; use foreach=True")
        super()._check_group(group)

    def _state_dtype(self, group: dict[str, Any], param: Tensor) -> torch.dtype:
        if group["state_dtype"] is None and param.dtype == torch.float16:
            return torch.float32  # exp_avg_sq would underflow to 0
        return super()._state_dtype(group, param)

    def _check_loaded(self, saved: dict[str, Any]) -> None:
        if any(group.get("amsgrad") for group in saved["param_groups"]):
            raise ValueError(
                "this AdamW does not support amsgrad, got a state dict saved with "
                "amsgrad=True; load it into torch.optim.AdamW"
            )
        super()._check_loaded(saved)

    def _hyperparameters(self, group: dict[str, Any], *, tensors: bool = False) -> dict[str, Any]:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        if not tensors:
            lr, beta1, beta2 = float(lr), float(beta1), float(beta2)
        same = ("eps", "weight_decay", "eps_mode", "eps_root")
        return {"lr": lr, "beta1": beta1, "beta2": beta2, **{name: group[name] for name in same}}

    def cpu_update(self, group: dict[str, Any]) -> Chunk | None:
        """Return the in-place CPU update of one piece, or None if eps is not outside the root."""
        if group["eps_mode"] != "outside" or group["eps_root"]:
            return None
        hyper = self._hyperparameters(group)
        lr, beta1, beta2, eps = hyper["lr"], hyper["beta1"], hyper["beta2"], hyper["eps"]
        keep = 1 - lr * hyper["weight_decay"]

        def chunk(
            param: Tensor, grad: Tensor, moments: tuple[Tensor, ...], scratch: Tensor, count: float
        ) -> None:
            exp_avg, exp_avg_sq = moments
            # √v̂ + eps = (√v + eps c) / c with c = √(1 − beta2^t) saves one operation per piece.
            scale = sqrt(1 - beta2 ** (count + 1))
            size = lr * scale / (1 - beta1 ** (count + 1))
            exp_avg.lerp_(grad, 1 - beta1)
            exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            torch.sqrt(exp_avg_sq, out=scratch).add_(eps * scale)
            if keep != 1:
                param.mul_(keep)
            param.addcdiv_(exp_avg, scratch, value=-size)

        return chunk

    def _foreach(self, group: dict[str, Any], items: list[Item]) -> bool:
        tensor_betas = any(isinstance(beta, Tensor) for beta in group["betas"])
        if group["eps_mode"] == "atan2" or tensor_betas or not is_plain(items):
            return False
        tensors = group["capturable"]
        hyper = self._hyperparameters(group, tensors=tensors)
        lr, beta1, beta2, eps = hyper["lr"], hyper["beta1"], hyper["beta2"], hyper["eps"]
        params = [param for param, _, _ in items]
        grads: list[Tensor] = [grad for _, grad, _ in items]
        if group["maximize"]:
            grads = list(torch._foreach_neg(grads))
        means = [state["exp_avg"] for _, _, state in items]
        squares = [state["exp_avg_sq"] for _, _, state in items]
        steps = [state["step"] for _, _, state in items]
        torch._foreach_add_(steps, 1)
        counts: list[Any] = steps if tensors else [float(step) for step in steps]
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_add_(
            squares, torch._foreach_mul(torch._foreach_mul(grads, grads), 1 - beta2)
        )
        roots = torch._foreach_div(squares, [1 - beta2**count for count in counts])
        inside = eps if hyper["eps_mode"] == "inside" else hyper["eps_root"]
        if inside:
            torch._foreach_add_(roots, inside)
        torch._foreach_sqrt_(roots)
        if hyper["eps_mode"] == "outside":
            torch._foreach_add_(roots, eps)
        updates = torch._foreach_div(means, [(1 - beta1**count) / -1 for count in counts])
        torch._foreach_div_(updates, roots)
        torch._foreach_mul_(updates, lr)
        if hyper["weight_decay"]:
            torch._foreach_mul_(params, 1 - lr * hyper["weight_decay"])
        torch._foreach_add_(params, updates)
        return True

    def _whole(self, group: dict[str, Any], flats: list[Flat], step: float) -> bool:
        """Update by torch's fused form where it is the same rule, and otherwise as compiled."""
        params, grads, states = zip(*flats, strict=True)
        dtypes = {value.dtype for value in (grads[0], *states[0].values())}
        plain = group["eps_mode"] == "outside" and not group["eps_root"]
        if not plain or group["stochastic_rounding"] or dtypes != {params[0].dtype}:
            return super()._whole(group, flats, step)
        hyper = self._hyperparameters(group)
        torch._fused_adamw_(
            params,
            grads,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [torch.tensor(step + 1, dtype=torch.float32)] * len(params),
            amsgrad=False,
            maximize=group["maximize"],
            **{name: hyper[name] for name in ("lr", "beta1", "beta2", "eps", "weight_decay")},
        )
        torch.autograd.graph.increment_version(params)  # autograd does not see this change
        return True

    def _fused(self, group: dict[str, Any], items: list[Item]) -> None:
        fused.adamw_step(
            items,
            self._tables,
            **self._hyperparameters(group, tensors=group["capturable"]),
            capturable=group["capturable"],
            maximize=group["maximize"],
            stochastic=group["stochastic_rounding"],
            generator=self.generator,
        )
