"""Epsilon as a setting: the largest that costs little, and its value in another library."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["CONVERTED_EPS", "LARGEST_EPS", "largest_eps", "torch_eps"]

# About ten float64 operations lead to a result. The error is largest in 1 - beta2 ** step at
# beta2 = 0.999: 10 · 2⁻⁵³ / 0.001 is 1e-12.
SCALAR_RTOL = 1e-9

# A student's own numbers are drawn from these.
LOST = (0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.15, 0.25)
BETAS = (0.95, 0.98, 0.99, 0.995, 0.999)
TOKENS = (8.0, 32.0, 100.0, 256.0, 1000.0, 4096.0)


def largest_eps(rms: Tensor, lost: float) -> tuple[float, float]:
    """The largest eps outside and inside the root at which no group loses more than `lost`."""
    smallest = rms.min().item()  # the group with the smallest gradient loses most
    kept = 1 - lost
    outside = smallest * (1 / kept - 1)
    inside = smallest**2 * (1 / kept**2 - 1)
    return outside, inside


def _rms_cases(seed: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [torch.rand(groups, generator=generator, dtype=torch.float64) for groups in (3, 1, 7)]
    return [{"rms": 10 ** (-10 + 9 * size)} for size in sizes]


LARGEST_EPS = Exercise(
    id="adamw_epsilon.largest_eps",
    points=2,
    reference=largest_eps,
    mistakes=[
        Mistake(
            "one eps for both",
            ("return outside, inside", "return outside, outside"),
            "Your two numbers are equal, but the two forms do not mean the same by eps. Outside "
            "it is added to √v̂, inside to v̂: in which units is each?",
        ),
        Mistake(
            "inside is the square of outside",
            ("return outside, inside", "return outside, outside**2"),
            "Inside the root you return the square of the number outside. The units are right, "
            "the number is not: √(r² + e²) is less than r + e. Solve r/√(r² + eps) = kept for eps.",
        ),
        Mistake(
            "RMS not squared",
            ("smallest**2", "smallest"),
            "Your eps inside the root grows with the RMS itself. It is added to v̂, which holds "
            "squares: make all gradients ten times as large and see what eps must do.",
        ),
        Mistake(
            "root forgotten",
            ("kept**2", "kept"),
            "Your eps inside solves r²/(r² + eps) = kept. The update divides by the root of that "
            "denominator: put your eps into r/√(r² + eps) and look what is kept.",
        ),
        Mistake(
            "kept and lost exchanged",
            ("1 - lost", "lost"),
            "At your eps the update keeps the share `lost` and loses the rest. Try a `lost` close "
            "to 0: should eps then be large or small?",
        ),
        Mistake(
            "largest group",
            ("rms.min()", "rms.max()"),
            "Your eps serves the group with the largest gradients. The bound must hold in every "
            "group: in which of them does a given eps take away most?",
        ),
        Mistake(
            "first order only",
            ("return outside, inside", "return smallest * lost, 2 * smallest**2 * lost"),
            "Your numbers are the first term of a series: eps ≈ r·lost is good for a `lost` near "
            "0, and the error grows with it. Solve the equation as it stands.",
        ),
        Mistake(
            "RMS times lost, twice",
            ("return outside, inside", "return smallest * lost, smallest * lost"),
            "Both of your numbers are the share `lost` of the smallest RMS. Put that into "
            "r/(r + eps): what is lost is lost/(1 + lost). Inside the root eps stands beside r².",
        ),
        Mistake(
            "RMS and its square times lost",
            ("return outside, inside", "return smallest * lost, smallest**2 * lost"),
            "You take the share `lost` of r outside and of r² inside. Neither solves its equation: "
            "put both into the sizes above and look how much of the update is lost.",
        ),
        Mistake(
            "RMS times lost, and its square",
            ("return outside, inside", "return smallest * lost, (smallest * lost) ** 2"),
            "You take r·lost outside and its square inside. An update that keeps r/(r + eps) of "
            "its size loses less than `lost` at r·lost, and the root is another equation.",
        ),
        Mistake(
            "results turned round",
            ("return outside, inside", "return inside, outside"),
            "Both numbers are right and have changed places: the epsilon outside the root comes "
            "first.",
        ),
        Mistake(
            "mean of the groups",
            ("rms.min()", "rms.mean()"),
            "Your eps fits a group with the mean of the RMS values. No group may lose more than "
            "`lost`, also the one with gradients below the mean.",
        ),
        Mistake(
            "one eps a group",
            ("rms.min().item()", "rms"),
            "You return an eps for each group. There is one for all of them: which group's may it "
            "not exceed? Return that as a Python number, x.item().",
        ),
    ],
    cases=_rms_cases,
    variant=lambda student: {"lost": random.Random(f"lost:{student}").choice(LOST)},
    explanation=(
        "Under a constant gradient r both averages settle, m̂ = r and √v̂ = r, so an update keeps "
        "r/(r + eps) of its size outside the root and r/√(r² + eps) inside. Set each equal to "
        "1 − lost and solve for eps. The share kept grows with r, so the group with the smallest "
        "gradient decides. Outside, eps is in units of the gradient; inside, in units of its "
        "square, which is why a value copied from one library to another is not the same setting."
    ),
    hints=(
        "Take two groups, with r = 1 and r = 0.1, and an eps of 0.1 outside the root. Which group "
        "loses the larger share of its update?",
        "For the group that loses most, set r/(r + eps) equal to 1 − `lost` and solve for eps. "
        "Then do the same with r/√(r² + eps), where eps is in units of r².",
        "`inside = smallest**2 * (1 / kept**2 - 1)` solves the equation with the root, where "
        "`kept` is `1 - lost` and `smallest` is the smallest value in `rms`, as a float.",
    ),
    returns=("eps outside", "eps inside"),
    rtol=SCALAR_RTOL,
)


def torch_eps(eps_hat: float, step: int, *, beta2: float, loss_scale: float) -> float:
    """The torch eps that equals Keras's `eps_hat` at `step`, for a loss scaled by `loss_scale`."""
    c2 = 1 - beta2**step  # the bias correction of v
    return loss_scale * eps_hat / math.sqrt(c2)


def _conversion_cases(seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    steps = (1, 2, chance.randint(10, 50), chance.randint(100, 900), 100_000)
    # 1e-7 is Keras's default.
    values = [1e-7, *(10 ** chance.uniform(-10, -3) for _ in steps[1:])]
    return [{"eps_hat": value, "step": step} for value, step in zip(values, steps, strict=True)]


CONVERTED_EPS = Exercise(
    id="adamw_epsilon.converted_eps",
    points=2,
    reference=torch_eps,
    mistakes=[
        Mistake(
            "factor the wrong way round",
            ("/ math.sqrt(c2)", "* math.sqrt(c2)"),
            "Your correction is upside down, so that eps is smallest at the first step. There √v "
            "is far below √v̂: is eps_hat, added to √v, then a large or a small share of the "
            "denominator?",
        ),
        Mistake(
            "correction without its root",
            ("math.sqrt(c2)", "c2"),
            "You divide by 1 − beta2ᵗ, the correction of v. Epsilon stands beside the root of v: "
            "write √v̂ in terms of √v and look at the factor.",
        ),
        Mistake(
            "no correction",
            (" / math.sqrt(c2)", ""),
            "Your eps is the same at every step. After many steps that is right; at step 1 Keras "
            "adds eps_hat to a √v that is not yet corrected for its start at zero.",
        ),
        Mistake(
            "loss scale left out",
            ("loss_scale * eps_hat", "eps_hat"),
            "Your eps does not know that the gradients are `loss_scale` times as large in torch. "
            "Both moments grow with them; epsilon grows only if you let it.",
        ),
        Mistake(
            "divided by the loss scale",
            ("loss_scale * eps_hat", "eps_hat / loss_scale"),
            "Your eps shrinks as the gradients grow. Replace g by loss_scale·g in "
            "m̂/(√v̂ + eps): which eps leaves the quotient as it was?",
        ),
        Mistake(
            "loss scale squared",
            ("loss_scale * eps_hat", "loss_scale**2 * eps_hat"),
            "Your eps grows with the square of the loss scale, as v does. It is added to √v̂: "
            "how does that grow?",
        ),
        Mistake(
            "unchanged",
            ("loss_scale * eps_hat / math.sqrt(c2)", "eps_hat"),
            "You return eps_hat as it came. It is added to a √v without bias correction, and to "
            "one of smaller gradients: both have to be made good.",
        ),
        Mistake(
            "c₁ as a factor",
            ("/ math.sqrt(c2)", "* (1 - 0.9**step) / math.sqrt(c2)"),
            "Your eps has a factor 1 − beta1ᵗ. In Keras's step c₁ divides m as it does in m̂, so "
            "nothing of it is left for epsilon.",
        ),
        Mistake(
            "divided by c₁",
            ("/ math.sqrt(c2)", "/ (1 - 0.9**step) / math.sqrt(c2)"),
            "You divide by 1 − beta1ᵗ. That is the correction of m, in the numerator; epsilon "
            "stands in the denominator, beside √v.",
        ),
        Mistake(
            "the factor of the rate",
            ("/ math.sqrt(c2)", "* math.sqrt(c2) / (1 - 0.9**step)"),
            "You multiply epsilon by √c₂/c₁, as Keras does with the learning rate. Move √c₂ into "
            "the denominator of the fraction instead, and see what it does to each term there.",
        ),
        Mistake(
            "steps counted from zero",
            ("beta2**step", "beta2 ** (step + 1)"),
            "Your correction belongs to the following step. `step` is 1 at the first update, so "
            "the power of beta2 there is 1.",
        ),
    ],
    cases=_conversion_cases,
    variant=lambda student: {
        "beta2": random.Random(f"beta2:{student}").choice(BETAS),
        "loss_scale": random.Random(f"tokens:{student}").choice(TOKENS),
    },
    explanation=(
        "Keras computes lr·√c₂/c₁ · m/(√v + eps_hat) with c₁ = 1 − beta1ᵗ and c₂ = 1 − beta2ᵗ; "
        "divide the fraction's two lines by √c₂ and it reads lr · m̂/(√v̂ + eps_hat/√c₂). A loss "
        "that is s times as large multiplies m̂ and √v̂ by s, and the quotient stays only if eps is "
        "multiplied as well. At beta2 = 0.999 the factor 1/√c₂ is about 32 at the first step and 1 "
        "after some thousands: the same number means a far larger epsilon while training starts."
    ),
    hints=(
        "At step 1 with a `beta2` of 0.999, how many times as large as √v is √v̂? And what "
        "happens to m̂ and √v̂ if all gradients are twice as large?",
        "Move √c₂ from the numerator of Keras's step into its denominator: √v turns into √v̂ "
        "there, and you can read off what stands beside it. A larger gradient multiplies m̂ and "
        "√v̂ by the same number, so eps has to grow by that number too.",
        "`eps_hat / math.sqrt(1 - beta2**step)` is the eps for torch if the gradients are those "
        "of Keras. It does not include the loss scale yet.",
    ),
    rtol=SCALAR_RTOL,
)
