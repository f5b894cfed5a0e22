"""Every optimizer reaches the minimum of every problem in every dtype."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from labcore.optim import SM3, Adafactor, AdamW, Lion, rules


def parabola(x: Tensor) -> Tensor:
    return ((x - torch.tensor([0.5, -0.25], dtype=x.dtype)) ** 2).sum()


def valley(x: Tensor) -> Tensor:  # curvatures 1 and 50
    return 0.5 * (x[0] - 0.5) ** 2 + 25 * (x[1] + 0.25) ** 2


def rosenbrock(x: Tensor) -> Tensor:
    return (1 - x[0]) ** 2 + 5 * (x[1] - x[0] ** 2) ** 2


PROBLEMS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[float, float]]] = {
    "parabola": (parabola, (0.5, -0.25)),
    "valley": (valley, (0.5, -0.25)),
    "rosenbrock": (rosenbrock, (1.0, 1.0)),
}
STEPS = 600
RULES = {
    "gradient_descent": (rules.gradient_descent, 0.03),
    "momentum": (rules.momentum, 0.01),
    "adagrad": (rules.adagrad, 0.5),
    "rmsprop": (rules.rmsprop, 0.02),
    "adam": (rules.adam, 0.1),
    "adamw": (rules.adamw, 0.1),
    "lion": (rules.lion, 0.02),
}
OPTIMIZERS = {
    "Lion": lambda p: Lion(p, lr=0.02),
    "Lion loop": lambda p: Lion(p, lr=0.02, foreach=False),
    "Lion master": lambda p: Lion(p, lr=0.02, master_weights=True),
    "AdamW": lambda p: AdamW(p, lr=0.1, weight_decay=0.0),
    "AdamW atan2": lambda p: AdamW(p, lr=0.1, weight_decay=0.0, eps_mode="atan2"),
    "AdamW inside": lambda p: AdamW(p, lr=0.1, weight_decay=0.0, eps_mode="inside", eps=1e-12),
    "Adafactor": lambda p: Adafactor(p, lr=0.1),
    "SM3": lambda p: SM3(p, lr=0.5, momentum=0.9),
    "AdamW master": lambda p: AdamW(p, lr=0.1, weight_decay=0.0, master_weights=True),
}


def decayed(lr: float, step: int) -> float:
    return lr * (1 - step / STEPS)  # to nothing, so that a fixed step size can settle


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_rule_reaches_the_minimum(problem: str, name: str, dtype: torch.dtype) -> None:
    loss, minimum = PROBLEMS[problem]
    rule, lr = RULES[name]
    settings = {"weight_decay": 0.0} if name == "adamw" else {}
    param, state = torch.tensor([-0.5, 0.75], dtype=dtype), {}
    for step in range(STEPS):
        grad = torch.func.grad(loss)(param)
        param, state = rule(param, grad, state, lr=decayed(lr, step), **settings)
    assert (param - torch.tensor(minimum, dtype=dtype)).abs().max() < 0.05


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_an_optimizer_reaches_the_minimum(problem: str, name: str, dtype: torch.dtype) -> None:
    loss, minimum = PROBLEMS[problem]
    param = torch.nn.Parameter(torch.tensor([-0.5, 0.75], dtype=dtype))
    optimizer = OPTIMIZERS[name]([param])
    start = optimizer.param_groups[0]["lr"]
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = decayed(start, step)
        optimizer.zero_grad()
        loss(param).backward()
        optimizer.step()
    # bfloat16 keeps 8 bits, and the valley of rosenbrock is flat: its gradient rounds away.
    tolerance = 0.1 if dtype == torch.bfloat16 else 0.05
    assert (param - torch.tensor(minimum, dtype=dtype)).abs().max() < tolerance
