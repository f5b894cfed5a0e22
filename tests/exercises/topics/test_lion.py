"""The references of the lab `lion`, by other ways to the same numbers, and its source notebook."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from labcore.exercises import student_seed
from labcore.exercises.topics.lion import CLINIC, DRIFT, MASKED_STEP, STALL, TRANSFER
from labcore.exercises.topics.lion.patients import BETA_STATE, BETA_UPDATE, DECAY, LR
from labcore.optim import Lion, rules
from tests.exercises.notebook import check_changed_rule


def test_without_a_zone_the_step_is_lions(seed: int) -> None:
    for case in MASKED_STEP.numbered_cases(seed):
        tensors = {name: case[name].double() for name in ("weight", "grad", "momentum")}
        lr, decay, beta1, beta2 = (
            case[name] for name in ("lr", "decay", "beta_update", "beta_state")
        )
        weight, momentum = MASKED_STEP.reference(**{**case, **tensors, "threshold": 0.0})
        right, state = rules.lion(
            tensors["weight"],
            tensors["grad"],
            {"exp_avg": tensors["momentum"]},
            lr=lr, beta1=beta1, beta2=beta2, weight_decay=decay,
        )  # fmt: skip
        torch.testing.assert_close(weight, right, equal_nan=True)
        torch.testing.assert_close(momentum, state["exp_avg"], equal_nan=True)


def test_the_zone_ends_the_drift_and_lets_a_weight_decay_alone() -> None:
    weight, momentum = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    settings = {"lr": 0.01, "decay": 0.0, "beta_update": 0.9, "beta_state": 0.99}
    path = []
    for step in range(400):
        weight, momentum = MASKED_STEP.reference(
            weight, torch.full_like(weight, step == 0), momentum, threshold=1e-3, **settings
        )
        path.append(weight.item())
    walked = math.log(1e-3 / (0.9 * 0.01)) / math.log(0.99)  # steps until the blend is so small
    assert path[-1] == pytest.approx(1 - 0.01 * (1 + math.ceil(walked)))
    assert path[-1] == path[-100]


def test_every_form_of_the_blend_passes_at_every_precision(seed: int) -> None:
    def with_lerp(
        weight: Any, grad: Any, momentum: Any, *, lr: float, decay: float,
        beta_update: float, beta_state: float, threshold: float,
    ) -> Any:  # fmt: skip
        blend = momentum.lerp(grad, 1 - beta_update)
        sign = (blend > threshold).to(weight) - (blend < -threshold).to(weight)
        sign[~blend.isfinite()] = torch.nan
        return weight - lr * (sign + decay * weight), momentum - (1 - beta_state) * (
            momentum - grad
        )

    for number in range(seed, seed + 20):
        answers = [with_lerp(**case) for case in MASKED_STEP.numbered_cases(number)]
        assert MASKED_STEP.judge(answers, seed=number).passed


def test_transferred_settings_shrink_the_weights_alike(seed: int) -> None:
    for case in TRANSFER.numbered_cases(seed, student=seed + 1):
        lr, decay = TRANSFER.reference(**case)
        assert lr == pytest.approx(case["lr"] / case["factor"])
        shrink = lr * decay if case["decay_times_lr"] else decay
        assert shrink == pytest.approx(case["lr"] * case["decay"])


def test_the_drift_is_the_optimizers(seed: int) -> None:
    for case in DRIFT.numbered_cases(seed):
        weight = torch.nn.Parameter(case["weight"].clone())
        optimizer = Lion([weight], lr=float(case["rates"][0]), weight_decay=case["decay"])
        optimizer.state[weight]["exp_avg"] = case["momentum"].clone()
        for _ in case["rates"]:
            weight.grad = torch.zeros_like(weight)
            optimizer.step()
        torch.testing.assert_close(weight.detach(), DRIFT.reference(**case))


def test_moves_stay_in_a_bound_that_the_weight_approaches() -> None:
    ones = torch.ones(1, dtype=torch.float64)
    for steps, distance in ((5, 6 * 0.9**5), (500, 0.0)):
        rates = torch.full((steps,), 0.1, dtype=torch.float64)
        end = DRIFT.reference(5 * ones, ones, rates=rates, decay=1.0)
        assert (end + 1).item() == pytest.approx(distance, abs=1e-12)
        moved = DRIFT.reference(0 * ones, ones, rates=rates, decay=1.0)
        assert -1 <= moved.item() < 0


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 7), (torch.float16, 10)])
def test_the_smallest_rate_is_where_the_format_begins_to_move(
    dtype: torch.dtype, bits: int, generator: torch.Generator
) -> None:
    random_ones = (4 * torch.randn(300, generator=generator)).to(dtype)
    weight = torch.cat([random_ones[random_ones.abs() > 0.01], torch.tensor([1, -1, 0.25, -4.0])])
    for towards in (1.0, -1.0):
        direction = torch.full((len(weight),), towards, dtype=torch.float64)
        rate = STALL.reference(weight.double(), direction, bits=bits)
        above = (weight.double() + 1.001 * rate * direction).to(dtype)
        below = (weight.double() + 0.999 * rate * direction).to(dtype)
        assert (above != weight.to(dtype)).all()
        assert (below == weight.to(dtype)).all()


def test_students_have_their_own_numbers(seed: int) -> None:
    numbers = [student_seed("secret", f"{seed} {n}") for n in range(60)]
    factors = {TRANSFER.variant(number)["factor"] for number in numbers}
    assert len(factors) > 10 and all(3 <= factor <= 10 for factor in factors)
    formats = {STALL.variant(number)["bits"] for number in numbers}
    assert len(formats) > 4 and not formats & {9, 10, 11}, "fp16's distance is a mistake of its own"
    assert TRANSFER.variant(numbers[0]) == TRANSFER.variant(numbers[0])


def test_healthy_patient_is_lion_and_a_late_blend_looks_like_it() -> None:
    def optimizer_path(gradients: list[float]) -> list[float]:
        weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = Lion([weight], lr=LR, betas=(BETA_UPDATE, BETA_STATE), weight_decay=DECAY)
        path = [0.0]
        for grad in gradients:
            weight.grad = torch.full_like(weight, grad)
            optimizer.step()
            path.append(weight.item())
        return path

    def late(weight: float, grad: float, momentum: float) -> tuple[float, float]:
        momentum = BETA_STATE * momentum + (1 - BETA_STATE) * grad
        blend = BETA_UPDATE * momentum + (1 - BETA_UPDATE) * grad
        return (1 - LR * DECAY) * weight - LR * math.copysign(blend != 0, blend), momentum

    healthy = CLINIC.patients()["healthy"]
    turned = optimizer_path([1.0] * 100 + [-1.0] * 100)
    assert list(healthy["gradient 1, then -1"]) == pytest.approx(turned)
    for panel, curve in CLINIC.observe(late).items():
        apart = max(abs(a - b) for a, b in zip(curve, healthy[panel], strict=True))
        span = max(healthy[panel]) - min(healthy[panel])
        assert apart < 0.03 * span, "the explanation says that no panel finds it"


# The notebook ------------------------------------------------------------------------------------


def test_the_changed_rule_is_not_in_labcore(seed: int) -> None:
    check_changed_rule("lion", "drift-test", "drift_end", DRIFT, "first rate", seed)
