"""An AdamW step whose weights and gradients are fp16."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.matching import difference
from labcore.exercises.mistakes import Mistake

__all__ = ["HALF_STEP", "half_step"]


def half_step(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    loss_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """AdamW on fp16 `weight` and scaled fp16 `grad`: new fp16 weight, new fp32 moments."""
    beta1, beta2 = betas
    g = grad.float() / loss_scale  # to fp32 first: in fp16 the quotient may underflow
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    mean = exp_avg / (1 - beta1**step)
    root = (exp_avg_sq / (1 - beta2**step)).sqrt()
    new = weight.float() * (1 - lr * weight_decay) - lr * mean / (root + eps)
    return new.half(), exp_avg, exp_avg_sq


def _half_cases(seed: int) -> list[dict[str, Any]]:
    """First steps from zero moments and later steps of a run; some gradients are zero.

    The last case is a first step that takes most weights almost to zero. A rounding to fp16
    before the subtraction is then large compared with the result.
    """
    generator = torch.Generator().manual_seed(seed)

    def size(shape: tuple[int, ...], low: float, high: float) -> Tensor:
        return 10 ** (low + (high - low) * torch.rand(shape, generator=generator))

    cases = []
    for shape, step in (((9,), 1), ((3, 5), 2), ((), 40), ((31,), 1000), ((17,), 1)):
        last = shape == (17,)
        sign = torch.where(torch.rand(shape, generator=generator) < 0.5, -1.0, 1.0)
        grad = (sign * size(shape, -7, 0)).half()
        # Gradient and mean share a sign: with opposite signs they would cancel and lose digits.
        mean = sign * size(shape, -9, -4) * (step > 1)
        square = mean * mean * size(shape, 0, 0.6)
        if shape:
            row = grad if grad.ndim == 1 else grad[0]
            row[:3] = torch.copysign(torch.tensor([0.0, 2.0**-24, 1e-6]), row[:3]).half()
            first = (0,) * len(shape)
            mean[first] = square[first] = 0.0  # a weight that never had a gradient
        weight = (-sign * (0.5 + 0.5 * torch.rand(shape, generator=generator))).half()
        lr, decay = (0.3, 0.1) if last else (0.02, 0.1)
        if last:
            left = size(shape, -1.8, -1)  # as a share of a move by lr
            weight = (sign * lr * (1 + left) / (1 - lr * decay)).half()
            grad[3:] = (sign * size(shape, -1, 0))[3:].half()
        cases.append(
            {
                "weight": weight,
                "grad": grad,
                "exp_avg": mean,
                "exp_avg_sq": square,
                "step": step,
                "lr": lr,
                "betas": (0.9, 0.999),
                "eps": 1e-8,
                "weight_decay": decay,
            }
        )
    return cases


def _same_by_dtype(
    answers: Sequence[Any], wanted: Sequence[Any], cases: Sequence[Mapping[str, Any]]
) -> str | None:
    """Compare weights to one fp16 spacing, moments to fp32 rounding.

    Nothing is random, so there are no false alarms. Two fp32 results that differ in their last
    digits may round to neighboring fp16 numbers, with a relative difference of at most 2⁻¹⁰. Five
    fp32 operations without cancellation have a relative error of at most 5 · 2⁻²⁴; 2⁻¹⁸ leaves
    room for constants rounded beforehand.
    """
    for at, (came, right, case) in enumerate(zip(answers, wanted, cases, strict=True), 1):
        text = _step_difference(came, right, case)
        if text is not None:
            return f"in case {at} of {len(cases)}, {text}"
    return None


def _step_difference(came: Any, right: tuple[Tensor, ...], case: Mapping[str, Any]) -> str | None:
    if not isinstance(came, list | tuple) or len(came) != len(right):
        return difference(came, right, rtol=0.0, atol=0.0, case=case)
    tolerances = {"weight": 2**-10, "exp_avg": 2**-18, "exp_avg_sq": 2**-18}
    for (name, rtol), one, wanted in zip(tolerances.items(), came, right, strict=True):
        text = difference(one, wanted, rtol=rtol, atol=0.0, name=f"the returned {name}", case=case)
        if text is not None:
            return text
    return None


_IN_HALF = (
    ("grad.float()", "grad"),
    ("* exp_avg +", "* exp_avg.half() +"),
    ("* exp_avg_sq +", "* exp_avg_sq.half() +"),
    ("weight.float()", "weight"),
)

HALF_STEP = Exercise(
    id="adamw_epsilon.half_step",
    points=5,
    beyond=2,
    reference=half_step,
    mistakes=[
        Mistake(
            "fp16 quotient",
            ("grad.float() / loss_scale", "(grad / loss_scale).float()"),
            "Small gradients are lost or coarse before your moments see them: the quotient by "
            "`loss_scale` is formed in fp16, whose smallest number is 6e-8. The scale was there "
            "to keep them above it.",
        ),
        Mistake(
            "fp16 square",
            ("grad.float()", "grad"),
            "Your second moment sees none of these gradients. A Python number does not widen a "
            "tensor, so the gradient stays fp16, and so does its square: 1e-4 squared is 0 there. "
            "Look at the dtype of each intermediate result.",
        ),
        Mistake(
            "moments cast",
            ("mean / (root + eps)", "(mean.half() / (root.half() + eps)).float()"),
            "The division is done in fp16. There eps = 1e-8 is 0 and a small √v̂ is 0 too, so "
            "that a weight without a gradient gets 0/0. Keep fp32 until the new weight is there.",
        ),
        Mistake(
            "raised eps",
            ("root + eps", "root + max(eps, 1e-6)"),
            "Your step is finite, but its eps is 1e-6 and not the one that was asked for: "
            "gradients below that barely move their weights. Nothing overflows at 1e-8 if the "
            "arithmetic can hold it.",
        ),
        Mistake(
            "no correction",
            [(" / (1 - beta1**step)", ""), (" / (1 - beta2**step)", "")],
            "Your moments are right, your update uses them as they are. They started at zero: at "
            "step 1 the mean is a tenth of the gradient and √v about a thirtieth of it.",
        ),
        Mistake(
            "scale left in",
            (" / loss_scale", ""),
            "Your moments are `loss_scale` times too large (the second one by its square). The "
            "quotient hides that where eps does not count, and eps then counts too little.",
        ),
        Mistake(
            "low state",
            ("(), exp_avg, exp_avg_sq", "(), exp_avg.half(), exp_avg_sq.half()"),
            "The moments come back in fp16. The second one holds squares: those of gradients "
            "below 2e-4 are 0 there, whatever they were computed in.",
        ),
        Mistake(
            "eps lost",
            ("root + eps", "root"),
            "Nothing is added to √v̂, or an eps that was rounded to 0 in fp16: a weight without a "
            "gradient gets 0/0, and the smallest gradients move theirs as far as any.",
        ),
        Mistake(
            "eps inside the root",
            [("step)).sqrt()", "step) + eps).sqrt()"), ("root + eps", "root")],
            "Your eps is added to v̂ before the root is taken. There 1e-8 is a floor of 1e-4 "
            "under the gradient; the task wants √v̂ + eps.",
        ),
        Mistake(
            "eps of Keras",
            ("root + eps", "root + eps / (1 - beta2**step) ** 0.5"),
            "Your eps is added to √v before the bias correction, as Keras does it. At step 1 that "
            "is some thirty times the eps of torch, which stands beside √v̂.",
        ),
        Mistake(
            "decay in the gradient",
            [
                ("/ loss_scale", "/ loss_scale + weight_decay * weight.float()"),
                (" * (1 - lr * weight_decay)", ""),
            ],
            "The decay reaches the weight through gradient and moments. There it is divided by "
            "√v̂ like all else; in AdamW it acts on the weight alone.",
        ),
        Mistake(
            "decay without the rate",
            ("lr * weight_decay", "weight_decay"),
            "Each step shrinks the weight by weight_decay itself. In AdamW that is a decay per "
            "unit of learning rate.",
        ),
        Mistake(
            "decay forgotten",
            (" * (1 - lr * weight_decay)", ""),
            "The weight does not decay. One factor is missing.",
        ),
        Mistake(
            "decay after the step",
            [
                (" * (1 - lr * weight_decay)", ""),
                ("new.half()", "(new * (1 - lr * weight_decay)).half()"),
            ],
            "The decay also shrinks the update of this step. The rule lets the weight decay first "
            "and then subtracts.",
        ),
        Mistake(
            "only the square in fp16",
            ("g * g", "(g.half() * g.half()).float()"),
            "Your first moment is right. The square of the gradient without its scale was formed "
            "in fp16, where that of anything below 2e-4 is 0.",
        ),
        Mistake(
            "scaled square in fp16",
            ("g * g", "(grad * grad).float() / loss_scale**2"),
            "Your first moment is right. The square of the scaled gradient was formed in fp16, "
            "which loses that of small gradients; dividing by the scale comes too late.",
        ),
        Mistake(
            "scale left in v",
            ("g * g", "grad.float() ** 2"),
            "Your first moment is right, the second is too large by the square of `loss_scale`: "
            "the square, too, is that of the gradient without its scale.",
        ),
        Mistake(
            "corrected moments returned",
            ("(), exp_avg, exp_avg_sq", "(), mean, exp_avg_sq / (1 - beta2**step)"),
            "You return the moments with their bias correction. The next step would correct them "
            "once more: return m and v, and use m̂ and v̂ for the update only.",
        ),
        Mistake(
            "decay in fp16",
            ("weight.float()", "weight"),
            "The decayed weight is fp16 when the update is subtracted: an fp16 tensor times a "
            "Python number stays fp16. Where weight and update nearly cancel, that rounding is "
            "most of what is left.",
        ),
        Mistake(
            "subtraction in fp16",
            [
                ("weight.float()", "weight"),
                ("lr * mean / (root + eps)", "(lr * mean / (root + eps)).half()"),
            ],
            "Decay and subtraction are done in fp16. Where weight and update nearly cancel, what "
            "both were rounded by is most of what is left; round once, at the end.",
        ),
        Mistake(
            "all in fp16",
            [*_IN_HALF, ("(), exp_avg, exp_avg_sq", "(), exp_avg.float(), exp_avg_sq.float()")],
            "Everything is computed in fp16, the moments too: small gradients and their squares "
            "are 0 there, so is eps, and 0/0 is NaN. Widen what comes in, before anything else.",
        ),
        Mistake(
            "all in fp16, moments too",
            _IN_HALF,
            "Everything is computed and returned in fp16, where 1e-8 and the squares of small "
            "gradients are 0. Only the new weight is fp16; all before it needs fp32.",
        ),
    ],
    cases=_half_cases,
    variant=lambda student: {
        "loss_scale": 2.0 ** random.Random(f"loss scale:{student}").randint(8, 14)
    },
    explanation=(
        "Two fp16 tensors come in and one goes out; all between is fp32. The gradient is widened "
        "before it is divided by the loss scale, since the quotient is what fp16 could not hold. "
        "Its square stays above 1e-38, √v̂ + eps is at least 1e-8 and 0/1e-8 is 0. Only the new "
        "weight is rounded. The moments stay fp32: they are what the next step starts from."
    ),
    hints=(
        "Write down the dtype of every intermediate result in your code. What does fp16 make of "
        "1e-8, and of the square of 1e-4?",
        "Convert the gradient and the weight to fp32 before you compute anything with them, and "
        "round to fp16 once, for the finished weight. Divide the gradient by the loss scale "
        "before it enters m and v, and return m and v without bias correction.",
        "`g = grad.float() / loss_scale` is the gradient for both moments, widened before the "
        "division so that no small quotient is lost. The decay acts on `weight.float()` for the "
        "same reason.",
    ),
    compare=_same_by_dtype,
)
