"""Where Adam's epsilon determines the step: small gradients, and dtypes that can't represent it.

The module has formulas (`predict_…`, `smallest_gradient`, `equivalent_eps`) and runs on handmade
gradients that test them. The tested arithmetic is the naive one, `rules.adamw` in the dtype of its
tensors. `labcore.optim.AdamW` computes in float32 whatever the parameter's dtype.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from labcore.checks import floating, fraction, non_negative, one_of, positive_int
from labcore.optim import rules
from labcore.studies.digits_runs import update_rms
from labcore.studies.lion.traps import weight_path

__all__ = [
    "DTYPES",
    "OUTCOMES",
    "NaiveAdamW",
    "equivalent_eps",
    "measured_attenuation",
    "outcomes",
    "predict_attenuation",
    "predict_ceiling",
    "pulse",
    "rounded_eps",
    "second_moment_path",
    "smallest_gradient",
    "update_sizes",
    "weight_after",
]

OUTCOMES = ("right", "not finite", "too long", "too short")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

SETTINGS = ("lr", "eps", "weight_decay", "eps_mode", "eps_root")

R = TypeVar("R", float, Tensor)


def _checked_eps(eps: float, eps_mode: str, eps_root: float) -> dict[str, Any]:
    """Check the three epsilon settings; return them as keyword arguments of `rules.adamw`."""
    non_negative("eps", eps)
    non_negative("eps_root", eps_root)
    one_of("eps_mode", eps_mode, rules.EPS_MODES)
    if eps_root and eps_mode != "outside":
        raise ValueError(
            f"eps_root needs eps_mode='outside', got eps_mode={eps_mode!r}; leave eps_root at 0"
        )
    return {"eps": eps, "eps_mode": eps_mode, "eps_root": eps_root}


def _finfo(dtype: torch.dtype) -> torch.finfo:
    return torch.finfo(one_of("dtype", dtype, DTYPES))


def predict_attenuation(
    rms: R, eps: float, *, eps_mode: str = "outside", eps_root: float = 0.0
) -> R:
    """Predict the size of an update in units of lr, for gradients with root mean square `rms`.

    With r = rms, this is r/(√(r² + eps_root) + eps) for "outside", r/√(r² + eps) for "inside" and
    π/4 for "atan2". It's 0 for r = 0, or NaN if that gives 0/0. The formula is exact in real
    arithmetic for a constant gradient, where m̂ = r and √v̂ = r. Noise makes m̂ smaller; then the
    formula approximates the ratio to the update at eps = 0.

    rms: a float, or a Tensor of any shape, at least 0. The result has the same type; a Tensor
    result is fp64.
    eps: in units of the gradient, or of its square for "inside".
    eps_root: in units of the squared gradient.
    Source: Wortsman et al., arXiv 2309.14322.
    """
    _checked_eps(eps, eps_mode, eps_root)
    r = torch.as_tensor(rms, dtype=torch.float64)
    if bool((r < 0).any()):
        raise ValueError(f"rms must be at least 0, got {r.min().item()}; pass the absolute value")
    if eps_mode == "atan2":
        size = torch.atan2(r, r)
    else:
        inside, outside = (eps, 0.0) if eps_mode == "inside" else (eps_root, eps)
        # hypot, because the square of a gradient of 1e-170 would underflow even in float64.
        size = r / (torch.hypot(r, torch.full_like(r, math.sqrt(inside))) + outside)
    return size if isinstance(rms, Tensor) else size.item()


def measured_attenuation(
    eps: float,
    *,
    signal: float = 0.0,
    eps_mode: str = "outside",
    eps_root: float = 0.0,
    steps: int = 150,
    seed: int = 0,
) -> float:
    """Measure the RMS of the update over that at eps = 0, in fp64, under noisy gradients.

    The gradients of 2000 weights are signal + standard normal noise, so eps is in units of the
    noise. Both runs get the same gradients, and the last third of `steps` counts. "atan2" has no
    eps; its ratio is the size of its steps relative to Adam's.
    """
    settings = _checked_eps(eps, eps_mode, eps_root)

    def size(**choice: Any) -> float:
        make = functools.partial(NaiveAdamW, lr=1.0, weight_decay=0.0, **choice)
        return update_rms(make, signal, steps=steps, seed=seed)

    return size(**settings) / size(eps=0.0)


def update_sizes(
    gradients: Tensor,
    *,
    eps: float,
    dtype: torch.dtype,
    eps_mode: str = "outside",
    eps_root: float = 0.0,
    steps: int = 1,
) -> Tensor:
    """Measure |update| in the last of `steps` steps, in units of lr: [N] fp64.

    gradients: [N] floating point, rounded to `dtype` and then held constant.
    Everything including the state is computed in `dtype`, so a NaN or infinity in the result is
    what the weight would get. The weight isn't updated; `weight_after` shows how much of an update
    it can represent.
    """
    settings = _checked_eps(eps, eps_mode, eps_root)
    _finfo(dtype)
    grad = floating("gradients", gradients).to(dtype)
    zero = torch.zeros_like(grad)
    state: rules.State = {}
    for _ in range(positive_int("steps", steps)):
        moved, state = rules.adamw(zero, grad, state, lr=1.0, weight_decay=0.0, **settings)
    return moved.double().abs()


def outcomes(gradients: Tensor, *, eps: float, dtype: torch.dtype) -> dict[str, float]:
    """Return the shares of `gradients` by the outcome of AdamW's first update in `dtype`.

    gradients: [N] floating point, N > 0. An update is right if it's within a factor of ten of the
    one in exact arithmetic, |g|/(|g| + eps). For a gradient of 0, that is 0, so only 0 is right.
    """
    sizes = update_sizes(gradients, eps=eps, dtype=dtype)
    exact = predict_attenuation(gradients.double().abs(), eps).nan_to_num(0.0)
    finite, long, short = sizes.isfinite(), sizes > 10 * exact, sizes < exact / 10
    masks = (finite & ~long & ~short, ~finite, finite & long, finite & short)
    return {name: mask.double().mean().item() for name, mask in zip(OUTCOMES, masks, strict=True)}


def weight_after(
    gradient: float,
    *,
    dtype: torch.dtype,
    eps: float = 1e-8,
    steps: int = 1,
    lr: float = 1e-3,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    **settings: Any,
) -> float:
    """Return the weight after `steps` steps from 1.0 under a constant `gradient`, in `dtype`.

    optimizer: called as optimizer(parameters, lr=, eps=, weight_decay=0, **settings); None means
    `NaiveAdamW`.
    settings: arguments that the optimizer takes: eps_mode, eps_root, foreach, fused,
    master_weights, ….
    """
    _finfo(dtype)
    make = functools.partial(optimizer or NaiveAdamW, lr=lr, eps=eps, weight_decay=0.0, **settings)
    path = weight_path(
        make,
        lambda _, weights: torch.full_like(weights, gradient),
        start=torch.ones(1, dtype=dtype),
        steps=positive_int("steps", steps),
    )
    return path[-1, 0].item()


def pulse(loud: int = 500, quiet: int = 500, size: float = 1.0) -> Tensor:
    """Return gradients [loud + quiet], fp64: `loud` steps of `size`, then `quiet` steps of 0."""
    positive_int("loud", loud)
    positive_int("quiet", quiet)
    return torch.cat([torch.full((loud,), size), torch.zeros(quiet)]).double()


def second_moment_path(dtype: torch.dtype, gradients: Tensor, *, beta2: float = 0.999) -> Tensor:
    """Return exp_avg_sq in `dtype`, [steps + 1, …] fp64, from 0 under `gradients` [steps, …].

    `pulse()` shows when it sticks. In float32, it climbs to 0.39 and decays to 0.24. In bfloat16, a
    decay of a thousandth is less than half a spacing, so the moment never falls again.
    """
    _finfo(dtype)
    grads = floating("gradients", gradients).to(dtype)
    zero = torch.zeros_like(grads[0])
    state: rules.State = {}
    path = [zero]
    for grad in grads:
        _, state = rules.adamw(zero, grad, state, lr=0.0, beta2=beta2)
        path.append(state["exp_avg_sq"])
    return torch.stack(path).double()


def predict_ceiling(gradient: float, *, dtype: torch.dtype, beta2: float = 0.999) -> float:
    """Predict where exp_avg_sq stops climbing under a constant gradient if it sticks in `dtype`.

    The decay rounds to 0, so a step only adds c = (1 − beta2) g², until c is at most half a
    spacing. That's at the first power of two of at least 2 c / finfo.eps, which is between 0.26 g²
    and 0.51 g² for bfloat16 and beta2 = 0.999. The correct value is g².

    Raises ValueError if (1 − beta2) > finfo.eps / 4, where the moment decays and settles near g².
    """
    info = _finfo(dtype)
    share = _forgotten(beta2, dtype)
    if share > info.eps / 4:
        raise ValueError(
            f"1 - beta2 must be at most {info.eps / 4:.3g} for a moment to stick in {dtype}, got "
            f"beta2={beta2}; it decays there and settles near the squared gradient"
        )
    grad = torch.tensor(gradient, dtype=dtype)
    added = ((1 - beta2) * grad * grad).item()
    return 2.0 ** math.ceil(math.log2(2 * added / info.eps)) if added else 0.0


def _forgotten(beta2: float, dtype: torch.dtype) -> float:
    """Return 1 − beta2 as used in the arithmetic; PyTorch's scalar factors are at least float32."""
    precision = torch.float64 if dtype == torch.float64 else torch.float32
    return 1 - torch.tensor(fraction("beta2", beta2), dtype=precision).item()


def rounded_eps(eps: float, dtype: torch.dtype) -> float:
    """Return eps rounded to `dtype`, which is the denominator if √v̂ is 0."""
    _finfo(dtype)
    return torch.tensor(non_negative("eps", eps), dtype=dtype).item()


def smallest_gradient(dtype: torch.dtype, beta2: float = 0.999) -> float:
    """Return the largest gradient for which exp_avg_sq is 0 in `dtype` after the first step.

    (1 − beta2) g² rounds to 0 up to half the smallest subnormal number. Then the update is m̂/eps,
    or infinite if eps rounds to 0 too. Naive arithmetic also rounds (1 − beta2) g, so in float16
    the measured value differs by up to 1 %.
    """
    info = _finfo(dtype)
    fraction("beta2", beta2)
    return math.sqrt(info.smallest_normal * info.eps) * math.sqrt(0.5 / (1 - beta2))


def equivalent_eps(eps_hat: float, *, step: int, beta2: float = 0.999) -> float:
    """Return PyTorch's eps that is equivalent to Kingma and Ba's "epsilon hat" at `step` (from 1).

    Section 2 of arXiv 1412.6980 folds the bias correction into the learning rate and adds eps_hat
    to √v, as TensorFlow and Keras do. PyTorch adds eps to √v̂ = √v / √(1 − beta2^t). The two agree
    for eps = eps_hat / √(1 − beta2^t), which is 32 times larger in the first step and converges to
    eps_hat.
    """
    non_negative("eps_hat", eps_hat)
    positive_int("step", step)
    return eps_hat / math.sqrt(1 - fraction("beta2", beta2) ** step)


class NaiveAdamW(torch.optim.Optimizer):
    """`rules.adamw` with arithmetic and state in each parameter's dtype.

    PyTorch's loop and foreach implementations do the same up to a few roundings. It exists to show
    the trap: in float16, a zero gradient gives NaN, and in bfloat16, weights and moments stall. For
    training, use labcore.optim.AdamW, with state_dtype=torch.float32 for low-precision weights.

    Args: lr, betas, eps, weight_decay as in torch.optim.AdamW; eps_mode and eps_root as in
    `rules.adamw`. Raises ValueError for a setting out of range.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        eps_mode: str = "outside",
        eps_root: float = 0.0,
    ) -> None:
        defaults = {
            "lr": non_negative("lr", lr),
            "betas": (fraction("betas[0]", betas[0]), fraction("betas[1]", betas[1])),
            "weight_decay": non_negative("weight_decay", weight_decay),
            **_checked_eps(eps, eps_mode, eps_root),
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            (beta1, beta2), settings = group["betas"], {name: group[name] for name in SETTINGS}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                new, self.state[parameter] = rules.adamw(
                    parameter,
                    parameter.grad,
                    self.state[parameter],
                    beta1=beta1,
                    beta2=beta2,
                    **settings,
                )
                parameter.copy_(new)
        return loss
