"""Where Adam's epsilon decides the step: small gradients, and dtypes that cannot hold it.

Laws (`predict_…`, `smallest_gradient`, `equivalent_eps`) stand beside the runs that test them, on
hand-made gradients. The arithmetic that is tested is `rules.adamw` in the dtype of its tensors,
the naive form; `labcore.optim.AdamW` computes in float32 whatever the parameter's dtype.
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
    "NaiveAdamW",
    "equivalent_eps",
    "measured_attenuation",
    "predict_attenuation",
    "predict_ceiling",
    "predict_resting_moment",
    "pulse",
    "rounded_eps",
    "second_moment_path",
    "smallest_gradient",
    "update_sizes",
    "weight_after",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

SETTINGS = ("lr", "eps", "weight_decay", "eps_mode", "eps_root")

R = TypeVar("R", float, Tensor)


def _checked_eps(eps: float, eps_mode: str, eps_root: float) -> dict[str, Any]:
    """The three settings of epsilon as keyword arguments of `rules.adamw`."""
    non_negative("eps", eps)
    non_negative("eps_root", eps_root)
    one_of("eps_mode", eps_mode, rules.EPS_MODES)
    if eps_root and eps_mode != "outside":
        raise ValueError(
            f"eps_root belongs to eps_mode='outside', got eps_mode={eps_mode!r}; leave it at 0"
        )
    return {"eps": eps, "eps_mode": eps_mode, "eps_root": eps_root}


def _finfo(dtype: torch.dtype) -> torch.finfo:
    return torch.finfo(one_of("dtype", dtype, DTYPES))


def predict_attenuation(
    rms: R, eps: float, *, eps_mode: str = "outside", eps_root: float = 0.0
) -> R:
    """The size of an update in units of lr, by arithmetic, for gradients of root mean square `rms`.

    r/(√(r² + eps_root) + eps) outside, r/√(r² + eps) inside, π/4 for atan2, 0 where r is 0 and
    NaN where that makes 0/0. Exact for a constant gradient in real arithmetic, where m̂ = r and
    √v̂ = r; under noise m̂ is smaller, and this is about the ratio to the update at eps = 0.

    rms: a float or a Tensor [any shape], at least 0; the answer has its type, a Tensor is fp64.
    eps: in units of the gradient, "inside" in units of its square; eps_root: of its square.
    Source: Wortsman et al., arXiv 2309.14322.
    """
    _checked_eps(eps, eps_mode, eps_root)
    r = torch.as_tensor(rms, dtype=torch.float64)
    if bool((r < 0).any()):
        raise ValueError(f"rms must be at least 0, got {r.min().item()}; pass the size alone")
    if eps_mode == "atan2":
        size = torch.atan2(r, r)
    else:
        inside, outside = (eps, 0.0) if eps_mode == "inside" else (eps_root, eps)
        # hypot: the square of a gradient of 1e-170 would underflow even in float64.
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
    """Root mean square of the update over that at eps = 0, in fp64, under noisy gradients.

    The gradients of 2000 weights are signal + standard normal noise, so eps is in units of the
    noise; both runs see the same ones. The last third of `steps` counts. "atan2" has no eps: its
    ratio says how much shorter than Adam's its steps are.
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
    """|update| of the last of `steps` steps in units of lr, [N] fp64, measured in `dtype`.

    gradients: [N] floating point, each held constant and rounded to `dtype` first. Everything runs
    in `dtype`, state too, so a NaN or an infinity in the answer is what the weight would get. The
    weight itself is left out: how much of an update it can hold, `weight_after` shows.
    """
    settings = _checked_eps(eps, eps_mode, eps_root)
    _finfo(dtype)
    grad = floating("gradients", gradients).to(dtype)
    zero = torch.zeros_like(grad)
    state: rules.State = {}
    for _ in range(positive_int("steps", steps)):
        moved, state = rules.adamw(zero, grad, state, lr=1.0, weight_decay=0.0, **settings)
    return moved.double().abs()


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
    """The weight, from 1.0, after `steps` steps under a constant `gradient`, stored in `dtype`.

    optimizer(parameters, lr=, eps=, weight_decay=0, **settings) -> torch.optim.Optimizer; None is
    `NaiveAdamW`. settings: eps_mode, eps_root, foreach, fused, master_weights … as it takes them.
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
    """Gradients [loud + quiet], fp64: `loud` steps of `size`, then `quiet` steps of 0."""
    positive_int("loud", loud)
    positive_int("quiet", quiet)
    return torch.cat([torch.full((loud,), size), torch.zeros(quiet)]).double()


def second_moment_path(dtype: torch.dtype, gradients: Tensor, *, beta2: float = 0.999) -> Tensor:
    """exp_avg_sq in `dtype`, [steps + 1, …] fp64, from 0 and under `gradients` [steps, …].

    `pulse()` shows what sticks: float32 climbs to 0.39 and decays to 0.24; in bfloat16 a decay of
    a thousandth is less than half a spacing, so that the moment never falls again.
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


def predict_resting_moment(start: float, *, dtype: torch.dtype, beta2: float = 0.999) -> float:
    """Where exp_avg_sq comes to rest when the gradients vanish, from the spacing of `dtype`.

    A step takes (1 − beta2) v off v, which rounds to nothing at or below half the spacing of the
    numbers at v: v rests at the first number of at most spacing / (2 (1 − beta2)). In the binade
    [2^e, 2^(e+1)) the spacing is finfo.eps · 2^e, and among the subnormal numbers it is constant.

    start: v when the gradients vanish, a number of `dtype`, at least 0.
    """
    info = _finfo(dtype)
    non_negative("start", start)
    share = _forgotten(beta2, dtype)
    if share == 0:
        return start
    resting = 0.5 / share  # the largest v that rests, in spacings
    # At exactly 1 the half rounds to the even neighbor, which is 0.
    spacings = math.floor(resting) if resting > 1 else 0
    binade = 2.0 ** (math.frexp(start)[1] - 1)
    if binade <= info.smallest_normal or resting * info.eps < 1:
        return min(start, spacings * info.smallest_normal * info.eps)
    if start == binade and resting * info.eps < 2:
        binade /= 2  # below a power of two the numbers lie twice as close
    return min(start, spacings * info.eps * binade)


def predict_ceiling(gradient: float, *, dtype: torch.dtype, beta2: float = 0.999) -> float:
    """Where exp_avg_sq stops to climb under a constant gradient, in a dtype in which it sticks.

    With the decay rounded away, a step adds c = (1 − beta2) g² and nothing else, until c is at most
    half a spacing: the first power of two of at least 2 c / finfo.eps, between 0.26 g² and 0.51 g²
    for bfloat16 and beta2 = 0.999. The right value is g².

    Errors: ValueError where (1 − beta2) > finfo.eps / 4: there the moment decays and settles near
    g².
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
    """1 − beta2 as the arithmetic sees it: torch multiplies by a scalar of at least float32."""
    precision = torch.float64 if dtype == torch.float64 else torch.float32
    return 1 - torch.tensor(fraction("beta2", beta2), dtype=precision).item()


def rounded_eps(eps: float, dtype: torch.dtype) -> float:
    """What is left of eps where nothing else stands in the denominator: eps rounded to `dtype`."""
    _finfo(dtype)
    return torch.tensor(non_negative("eps", eps), dtype=dtype).item()


def smallest_gradient(dtype: torch.dtype, beta2: float = 0.999) -> float:
    """The gradient at and below which exp_avg_sq of the first step is 0 in `dtype`.

    (1 − beta2) g² rounds to 0 up to half the smallest subnormal number. Under it the update is
    m̂/eps, or infinite where eps is lost too. Naive arithmetic rounds (1 − beta2) g on its way, so
    in float16 the measured value lies up to 1 % off.
    """
    info = _finfo(dtype)
    fraction("beta2", beta2)
    return math.sqrt(info.smallest_normal * info.eps) * math.sqrt(0.5 / (1 - beta2))


def equivalent_eps(eps_hat: float, *, step: int, beta2: float = 0.999) -> float:
    """torch's eps that at `step` (from 1) does what Kingma and Ba's "epsilon hat" does.

    Section 2 of arXiv 1412.6980 folds the bias correction into the learning rate and adds eps_hat
    to √v, as TensorFlow and Keras do; torch adds eps to √v̂ = √v / √(1 − beta2^t). The two agree
    for eps = eps_hat / √(1 − beta2^t): 32 times larger on the first step, the same in the end.
    """
    non_negative("eps_hat", eps_hat)
    positive_int("step", step)
    return eps_hat / math.sqrt(1 - fraction("beta2", beta2) ** step)


class NaiveAdamW(torch.optim.Optimizer):
    """`rules.adamw` in each parameter's own dtype, state too.

    torch's loop and foreach paths do the same up to a few roundings. Kept to show the trap: float16
    makes NaN of a zero gradient, a bfloat16 weight or moment stalls. Train with
    labcore.optim.AdamW, and with state_dtype=torch.float32 where the weights are in low precision.

    Args: lr, betas, eps, weight_decay as in torch.optim.AdamW; eps_mode and eps_root as in
    `rules.adamw`. Errors: ValueError for a setting out of its range.
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
        """One update of every parameter that has a gradient."""
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
