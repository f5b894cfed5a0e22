"""Update rules as pure functions: the reference for `labcore.optim`.

Every rule has the form `(param, grad, state, *, hyperparameters) -> (param, state)`. `param` and
`grad` are real tensors with the same shape and floating dtype, which may be float64. `state` is a
dict of tensors of that shape and a `step` count, and is `{}` before the first step. Nothing changes
in place. A hyperparameter is a float or a one-element tensor. The arithmetic is in the dtype of the
tensors, so a rule on float16 tensors shows what naive float16 arithmetic does.
"""

from typing import Any, TypeAlias

import torch
from torch import Tensor

from labcore import checks

__all__ = [
    "adagrad",
    "adam",
    "adamw",
    "gradient_descent",
    "lion",
    "momentum",
    "rmsprop",
    "sign_or_nan",
]

State: TypeAlias = dict[str, Any]
Scalar: TypeAlias = float | Tensor
EPS_MODES = ("outside", "inside", "atan2")


def gradient_descent(
    param: Tensor, grad: Tensor, state: State, *, lr: Scalar
) -> tuple[Tensor, State]:
    """Step against the gradient: `p ← p − lr g`.

    Args: lr, the learning rate, in units of param² per loss. The state stays empty.
    Source: Cauchy, Comptes rendus 25 (1847); Robbins and Monro (1951) for noisy gradients.
    """
    return param - lr * grad, dict(state)


def momentum(
    param: Tensor, grad: Tensor, state: State, *, lr: Scalar, beta: Scalar = 0.9
) -> tuple[Tensor, State]:
    """Heavy ball: a velocity accumulates past gradients, `b ← beta b + g`, `p ← p − lr b`.

    Args: lr; beta, the fraction of the velocity that a step keeps. State: `velocity`.
    Source: Polyak, "Some methods of speeding up the convergence of iteration methods" (1964).
    """
    velocity = beta * _moment(state, "velocity", param) + grad
    return param - lr * velocity, {"velocity": velocity}


def adagrad(
    param: Tensor, grad: Tensor, state: State, *, lr: Scalar, eps: float = 1e-10
) -> tuple[Tensor, State]:
    """Use one learning rate per weight: `s ← s + g²`, `p ← p − lr g / (√s + eps)`.

    Args: lr, in units of param; eps, in units of the gradient. State: `sum`, which never decreases.
    Source: Duchi, Hazan and Singer, "Adaptive subgradient methods", JMLR 12 (2011).
    """
    total = _moment(state, "sum", param) + grad * grad
    return param - lr * grad / (total.sqrt() + eps), {"sum": total}


def rmsprop(
    param: Tensor,
    grad: Tensor,
    state: State,
    *,
    lr: Scalar,
    beta: Scalar = 0.99,
    eps: float = 1e-8,
) -> tuple[Tensor, State]:
    """AdaGrad that forgets: `v ← beta v + (1 − beta) g²`, `p ← p − lr g / (√v + eps)`.

    Args: lr; beta, the decay rate of the squared gradient; eps, in units of the gradient. State:
    `exp_avg_sq`.
    Source: Tieleman and Hinton, Coursera lecture 6.5 (2012).
    """
    second = beta * _moment(state, "exp_avg_sq", param) + (1 - beta) * grad * grad
    return param - lr * grad / (second.sqrt() + eps), {"exp_avg_sq": second}


def adam(
    param: Tensor,
    grad: Tensor,
    state: State,
    *,
    lr: Scalar,
    beta1: Scalar = 0.9,
    beta2: Scalar = 0.999,
    eps: float = 1e-8,
) -> tuple[Tensor, State]:
    """Momentum divided by RMSProp's root, both corrected for starting at zero.

    `m ← beta1 m + (1 − beta1) g`, `v ← beta2 v + (1 − beta2) g²`,
    `p ← p − lr m̂ / (√v̂ + eps)` with `m̂ = m / (1 − beta1^t)`, `v̂ = v / (1 − beta2^t)`.

    Args: lr, in units of param; beta1, beta2; eps, in units of the gradient.
    State: `step`, `exp_avg`, `exp_avg_sq`. Source: Kingma and Ba, arXiv 1412.6980.
    """
    return adamw(param, grad, state, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=0.0)


def adamw(
    param: Tensor,
    grad: Tensor,
    state: State,
    *,
    lr: Scalar,
    beta1: Scalar = 0.9,
    beta2: Scalar = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    eps_mode: str = "outside",
    eps_root: float = 0.0,
) -> tuple[Tensor, State]:
    """Adam with decoupled weight decay: `p ← (1 − lr weight_decay) p − lr u`.

    `eps_mode` selects the update u, with the m̂ and v̂ of `adam`:

    - "outside": `m̂ / (√(v̂ + eps_root) + eps)`, torch's form (optax has eps_root too).
    - "inside": `m̂ / √(v̂ + eps)`. Here eps is in units of the gradient squared, and eps_root must
      be 0.
    - "atan2": `atan2(m̂, √v̂)`, independent of eps and of the gradient's scale. It is π/4 where
      m̂ = √v̂, so a learning rate 4/π times larger gives steps of Adam's size.

    A non-finite gradient makes the weight NaN in every mode.

    Args: lr, in units of param; beta1, beta2; eps; weight_decay, per unit of lr; eps_mode;
    eps_root.
    State: `step`, `exp_avg`, `exp_avg_sq`. Errors: ValueError for an unknown eps_mode.
    Source: Loshchilov and Hutter, arXiv 1711.05101; atan2: Everett et al., arXiv 2407.05872.
    """
    checks.one_of("eps_mode", eps_mode, EPS_MODES)
    step = state.get("step", 0) + 1
    first = beta1 * _moment(state, "exp_avg", param) + (1 - beta1) * grad
    second = beta2 * _moment(state, "exp_avg_sq", param) + (1 - beta2) * grad * grad
    mean, square = first / (1 - beta1**step), second / (1 - beta2**step)
    if eps_mode == "outside":
        # torch adds eps to √v/√(1−beta2^t), which rounds differently from √v̂ in float16.
        root = (square + eps_root).sqrt() if eps_root else second.sqrt() / (1 - beta2**step) ** 0.5
        update = mean / (root + eps)
    elif eps_mode == "inside":
        update = mean / (square + eps).sqrt()
    else:
        # atan2(inf, inf) is π/4. Adding 0·m̂ makes the update NaN for a non-finite gradient.
        update = torch.atan2(mean, square.sqrt()) + 0.0 * mean
    new = param * (1 - lr * weight_decay) - lr * update
    return new, {"step": step, "exp_avg": first, "exp_avg_sq": second}


def lion(
    param: Tensor,
    grad: Tensor,
    state: State,
    *,
    lr: Scalar,
    beta1: Scalar = 0.9,
    beta2: Scalar = 0.99,
    weight_decay: float = 0.0,
) -> tuple[Tensor, State]:
    """Use the sign of an interpolated momentum: apart from decay, every weight moves by lr.

    `u = sign(beta1 m + (1 − beta1) g)`, `p ← (1 − lr weight_decay) p − lr u`,
    `m ← beta2 m + (1 − beta2) g`. The sign of a non-finite value is NaN here (see `sign_or_nan`).

    Args: lr, in units of param, the size of every move; beta1, which blends the update; beta2, the
    decay rate of the momentum; weight_decay, per unit of lr. State: `exp_avg`.
    Source: Chen et al., "Symbolic discovery of optimization algorithms", arXiv 2302.06675.
    """
    exp_avg = _moment(state, "exp_avg", param)
    update = sign_or_nan(exp_avg + (1 - beta1) * (grad - exp_avg))
    new = param * (1 - lr * weight_decay) - lr * update
    return new, {"exp_avg": exp_avg + (1 - beta2) * (grad - exp_avg)}


def sign_or_nan(x: Tensor) -> Tensor:
    """Return the sign of x [any shape], but NaN where x is NaN (torch.sign gives 0) or infinite."""
    return torch.sign(x) + 0.0 * x


def _moment(state: State, name: str, param: Tensor) -> Tensor:
    moment = state.get(name)
    return torch.zeros_like(param) if moment is None else moment
