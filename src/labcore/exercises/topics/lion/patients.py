"""Four broken Lions, to be recognized by the path of one weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from labcore.exercises.clinic import Clinic, Fault

__all__ = ["CLINIC"]

LR, DECAY, BETA_UPDATE, BETA_STATE = 0.01, 0.1, 0.9, 0.99
STEPS = 200
_Rule = Callable[[float, float, float], tuple[float, float]]


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)


def _lion(weight: float, grad: float, momentum: float) -> tuple[float, float]:
    blend = BETA_UPDATE * momentum + (1 - BETA_UPDATE) * grad
    momentum = BETA_STATE * momentum + (1 - BETA_STATE) * grad
    return (1 - LR * DECAY) * weight - LR * _sign(blend), momentum


def _decay_inside(weight: float, grad: float, momentum: float) -> tuple[float, float]:
    grad = grad + DECAY * weight
    blend = BETA_UPDATE * momentum + (1 - BETA_UPDATE) * grad
    momentum = BETA_STATE * momentum + (1 - BETA_STATE) * grad
    return weight - LR * _sign(blend), momentum


def _decay_without_rate(weight: float, grad: float, momentum: float) -> tuple[float, float]:
    blend = BETA_UPDATE * momentum + (1 - BETA_UPDATE) * grad
    momentum = BETA_STATE * momentum + (1 - BETA_STATE) * grad
    return (1 - DECAY) * weight - LR * _sign(blend), momentum


def _betas_swapped(weight: float, grad: float, momentum: float) -> tuple[float, float]:
    blend = BETA_STATE * momentum + (1 - BETA_STATE) * grad
    momentum = BETA_UPDATE * momentum + (1 - BETA_UPDATE) * grad
    return (1 - LR * DECAY) * weight - LR * _sign(blend), momentum


def _momentum_alone(weight: float, grad: float, momentum: float) -> tuple[float, float]:
    momentum = BETA_STATE * momentum + (1 - BETA_STATE) * grad
    return (1 - LR * DECAY) * weight - LR * _sign(momentum), momentum


def _path(rule: _Rule, gradients: Sequence[float], start: float) -> list[float]:
    weight, momentum = start, 0.0
    path = [weight]
    for grad in gradients:
        weight, momentum = rule(weight, grad, momentum)
        path.append(weight)
    return path


def _curves(rule: _Rule) -> dict[str, list[float]]:
    every_tenth = [-8.0 if step % 10 == 9 else 1.0 for step in range(STEPS)]
    return {
        "no gradient": _path(rule, [0.0] * STEPS, 1.0),
        "gradient 1, then -1": _path(rule, [1.0] * (STEPS // 2) + [-1.0] * (STEPS // 2), 0.0),
        "gradient 1, every tenth -8": _path(rule, every_tenth, 0.0),
    }


CLINIC = Clinic(
    id="lion.clinic",
    points=4,
    healthy=lambda: _lion,
    faults={
        "decay added to the gradient": Fault(
            make=lambda: _decay_inside,
            symptom="without a gradient the weight falls on a straight line, by the learning rate "
            "a step, and does not come to rest at zero: the decay alone decides a sign, which has "
            "no size.",
        ),
        "decay without the learning rate": Fault(
            make=lambda: _decay_without_rate,
            symptom="without a gradient the weight is gone within some forty steps, and under "
            "gradients it comes no further from zero than lr / decay: each step takes a share of "
            "decay in place of lr * decay.",
        ),
        "betas swapped": Fault(
            make=lambda: _betas_swapped,
            symptom="when the gradient turns, the weight turns within about ten steps, for the "
            "memory is ten times shorter; after a single large gradient it goes the wrong way for "
            "several steps, since what is stored has taken in so much of it.",
        ),
        "sign of the momentum alone": Fault(
            make=lambda: _momentum_alone,
            symptom="when the gradient turns, the weight turns later than the healthy one, and "
            "single large gradients leave no trace in its path: the sign looks at the stored "
            "momentum, in which the present gradient counts a hundredth in place of a tenth.",
        ),
    },
    observe=_curves,
    axis=range(STEPS + 1),
    explanation="Each panel asks one question: what does the decay do alone, how long is the "
    "memory, how much does the present gradient count. A momentum that is updated before the "
    "blend would be found by none of them: its blend is 0.891 m + 0.109 g in place of "
    "0.9 m + 0.1 g, and only a test against the formula shows that.",
)
