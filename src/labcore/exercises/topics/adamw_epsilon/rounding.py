"""Rounding by chance, judged by its distribution."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.matching import difference
from labcore.exercises.mistakes import Mistake

__all__ = ["ROUND_BY_CHANCE", "round_by_chance"]

BITS = (3, 4, 5, 9, 10)  # a student gets one; bfloat16's 7 and its neighbors would hide a mistake
COPIES = 8192  # of each number
ALIKE = (
    ".\nAll copies of each number came out alike, as if one coin were thrown for the whole tensor; "
    "each element needs a coin of its own"
)
SHARE = 0.06  # how far the share of one outcome may be from the reference's, see _same_law


def round_by_chance(x: Tensor, bits: int, seed: int) -> Tensor:
    """Round x [any shape, fp32] up or down to `bits` fraction bits; the results' mean is x."""
    generator = torch.Generator().manual_seed(seed)
    drop = 23 - bits
    noise = torch.randint(0, 1 << drop, x.shape, dtype=torch.int32, generator=generator)
    # The bits hold the magnitude: a carry out of the dropped bits moves away from zero.
    rounded = ((x.contiguous().view(torch.int32) + noise) & -(1 << drop)).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded, x)


def _grid(
    x: Tensor,
    bits: int,
    seed: int,
    rounding: Callable[[Tensor, Tensor], Tensor] = lambda y, u: (y + u).floor(),
) -> Tensor:
    """Round x / spacing to a whole number with random numbers u in [0, 1), by `rounding`(y, u)."""
    u = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed))
    spacing = torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 1 - bits)
    return torch.where(torch.isfinite(x), rounding(x / spacing, u) * spacing, x)


def _one_coin(x: Tensor, bits: int, seed: int) -> Tensor:
    """The reference with the same random bits for all elements."""
    drop = 23 - bits
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 1 << drop, (1,), dtype=torch.int32, generator=generator)
    rounded = ((x.contiguous().view(torch.int32) + noise) & -(1 << drop)).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded, x)


def _one_spacing(x: Tensor, bits: int, seed: int) -> Tensor:
    """Round to multiples of 2**-bits, whatever the size of x."""
    u = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return ((x.double() * 2**bits + u).floor() / 2**bits).float()


def _copies(seed: int) -> list[dict[str, Any]]:
    """Cases of x [16, 8192], with one number per row; the third repeats the seed of the first.

    1 + j/3, 1 + j/5 and 1 + j/7 lie between two numbers of every binary format, at least a seventh
    of the spacing from each. Where one of them is nearer to the lower neighbor, its
    mirror image, such as 2 − j/3, is nearer to the upper one. With each of BITS, one coin for all
    elements rounds some of the numbers differently with the two seeds.
    """
    chance = random.Random(seed)
    rows = [0.0, -1.5, math.inf, -math.inf]
    for parts in (3, 5, 7):
        share = chance.randrange(1, parts) / parts
        for number in (1 + share, 2 - share, -1 - share, share - 2):
            rows.append(number * 2.0 ** chance.randint(-12, 12))
    numbers = torch.tensor(rows)
    x = numbers[:, None].expand(-1, COPIES)
    first = second = 0
    while any(
        torch.equal(_one_coin(numbers, bits, first), _one_coin(numbers, bits, second))
        for bits in BITS
    ):
        first, second = chance.sample(range(2**31), 2)
    return [{"x": x.clone(), "seed": coins} for coins in (first, second, first)]


def _same_law(
    answers: Sequence[Any], wanted: Sequence[Any], cases: Sequence[Mapping[str, Any]]
) -> str | None:
    """Compare the shares of the outcomes in each row, and whether equal seeds repeat results.

    By Hoeffding's inequality the shares of one outcome in two samples of n fair draws differ by
    more than t with probability at most 2 exp(−n t²). With n = 8192 copies, t = 0.06 and 3 cases
    of 16 rows with up to two outcomes, a right function with draws independent of the reference's
    is refused at most once in 10¹⁰ checks. A share that is wrong by 0.12 passes as rarely.
    """
    for came, right, case in zip(answers, wanted, cases, strict=True):
        form = difference(came, right, rtol=0.0, atol=math.inf)  # shape, dtype, what is finite
        if form is not None:
            return form
        for x, row, expected in zip(case["x"][:, 0].tolist(), came, right, strict=True):
            if (text := _outcomes(row, expected)) is not None:
                alike = bool((came == came[:, :1]).all())
                return (
                    f"of {COPIES} copies of {x:.8g} at {case['bits']} bits, {text}{ALIKE * alike}"
                )
    again = [torch.equal(came, answers[0]) for came in answers]
    if again == [torch.equal(right, wanted[0]) for right in wanted]:
        return None
    if not again[2]:
        return "one call after the other with the same seed gave two different results"
    return "two different seeds rounded the same elements up and the same ones down"


def _outcomes(row: Tensor, expected: Tensor) -> str | None:
    """How the outcomes in `row` [N] and `expected` [N] differ in share, or None."""
    possible = set(expected.unique().tolist())
    for outcome in sorted(possible | set(row.unique().tolist())):
        share = (row == outcome).double().mean().item()
        right = (expected == outcome).double().mean().item()
        # x + noise, rounded to fp32, goes one neighbor too far with a probability of up to 2⁻¹⁴.
        if abs(share - right) > (SHARE if outcome in possible else 2**-9):
            return f"{share:.1%} became {outcome:.8g}; right is about {right:.0%}"
    return None


ROUND_BY_CHANCE = Exercise(
    id="adamw_epsilon.round_by_chance",
    points=4,
    reference=round_by_chance,
    mistakes=[
        Mistake(
            "nearest",
            functools.partial(_grid, rounding=lambda y, _: y.round()),
            "Every copy of a number gives the same result, its nearest neighbor. A step below "
            "half the spacing is then lost each time; chance should keep it on average.",
        ),
        Mistake(
            "cut off",
            functools.partial(_grid, rounding=lambda y, _: y.trunc()),
            "Every copy of a number gives the neighbor nearer to zero: the bits are cut off before "
            "chance has a say. Weights would shrink at every step.",
        ),
        Mistake(
            "fair coin",
            functools.partial(
                _grid, rounding=lambda y, u: torch.where(u < 0.5, y.floor(), y.ceil())
            ),
            "Up and down are equally likely, wherever the number lies. The mean is then the middle "
            "between the neighbors, not the number: how near it is to each must count.",
        ),
        Mistake(
            "toward zero on negative numbers",
            functools.partial(_grid, rounding=lambda y, u: (y + u).trunc()),
            "Positive numbers are right, negative ones come out too close to zero. Cutting off "
            "and rounding down are the same above zero; what does each do to −2.3?",
        ),
        Mistake(
            "noise, then nearest",
            functools.partial(_grid, rounding=lambda y, u: (y + u).round()),
            "Your results are half a spacing too high on average. Noise from 0 to 1 already "
            "carries a number past the next one as often as it should; rounding to nearest "
            "afterwards adds another half.",
        ),
        Mistake(
            "one fixed seed",
            lambda x, bits, seed: _grid(x, bits, 0 * seed),
            "Each result alone is right, but every call throws the same coins, whatever `seed` "
            "is. Over the steps of a training run that is no chance: the same weights would be "
            "rounded up every time.",
        ),
        Mistake(
            "chances exchanged",
            functools.partial(
                _grid,
                rounding=lambda y, u: torch.where(u < 1 - (y - y.floor()), y.ceil(), y.floor()),
            ),
            "The two neighbors have changed their chances: a number close to the upper one mostly "
            "becomes the lower one. Which remainder should make going up likely?",
        ),
        Mistake(
            "chances exchanged, exact numbers too",
            functools.partial(_grid, rounding=lambda y, u: y.floor() + (u > y - y.floor())),
            "A number that the format holds goes up by a spacing, and one just above it mostly "
            "too. The comparison with chance stands the wrong way round.",
        ),
        Mistake(
            "fair coin, exact numbers too",
            functools.partial(_grid, rounding=lambda y, u: y.floor() + (u < 0.5)),
            "Every number goes up in half of the draws, also one that the format holds. The "
            "chance must be the remainder, which is 0 there.",
        ),
        Mistake(
            "negative numbers cut off",
            functools.partial(_grid, rounding=lambda y, u: y.trunc() + (u < y - y.trunc())),
            "Positive numbers are right, negative ones are always cut off toward zero: their "
            "remainder is negative, and no chance is below it. Take the neighbor below first.",
        ),
        Mistake(
            "away from the sign",
            functools.partial(_grid, rounding=lambda y, u: y.trunc() + (u < (y - y.trunc()).abs())),
            "Positive numbers are right. A negative one is cut off toward zero and then raised, "
            "where its neighbors are the one cut off and the next one below.",
        ),
        Mistake(
            "one bit too many",
            lambda x, bits, seed: _grid(x, bits + 1, seed),
            "Some of your results lie halfway between two numbers of the format: it has one "
            "fraction bit less. At 1 ≤ |x| < 2 the spacing is 2^−bits.",
        ),
        Mistake(
            "one bit too few",
            lambda x, bits, seed: _grid(x, bits - 1, seed),
            "Your results are twice as far apart as the numbers of the format. The 1 before the "
            "point is not among its `bits` fraction bits.",
        ),
        Mistake(
            "always seven bits",
            lambda x, bits, seed: _grid(x, 7 + 0 * bits, seed),
            "You round to the 7 fraction bits of bfloat16, whatever `bits` is.",
        ),
        Mistake(
            "one spacing",
            _one_spacing,
            "Your results are 2^−bits apart, whatever the size of x. That is the spacing at "
            "1 ≤ |x| < 2: larger numbers of the format stand farther apart, smaller ones closer "
            "together.",
        ),
        Mistake(
            "cast to bfloat16",
            lambda x, bits, seed: x.bfloat16().float() + 0 * (bits + seed),
            "You return the nearest number of bfloat16. Its cast knows neither your `bits` nor "
            "chance.",
        ),
        Mistake(
            "one coin",
            _one_coin,
            "You draw a single random number and use it for every element. Within a call, equal "
            "numbers are then all rounded the same way, and their errors do not average out.",
        ),
        Mistake(
            "seed ignored",
            lambda x, bits, seed: _grid(x, bits, torch.Generator().seed() + 0 * seed),
            "Each result alone is right, but a call with the same `seed` cannot be repeated. Draw "
            "from a generator that starts at `seed`, as a torch.Generator of your own can.",
        ),
    ],
    cases=_copies,
    variant=lambda student: {"bits": random.Random(f"bits:{student}").choice(BITS)},
    explanation=(
        "In memory the numbers of the smaller format are those fp32 numbers whose last "
        "23 − bits bits are zero. Added noise of that many random bits carries into the kept ones "
        "with probability remainder/spacing, which is what makes the mean right; the mask then "
        "clears the rest. Sign and magnitude are stored apart, so negative numbers need no care. "
        "An exact number has remainder 0 and stays, infinity too; a NaN has other bits there, and "
        "a carry could make a number of it. With 7 bits this is bfloat16."
    ),
    hints=(
        "Suppose that the format holds the whole numbers. Which are the two neighbors of 2.3 and "
        "those of −2.3, and how often must each be chosen so that the mean is right?",
        "Divide x by the spacing of the format at its size, so that the numbers of the format "
        "become whole numbers. Add a random number between 0 and 1 to each element, round down "
        "(not toward zero), multiply by the spacing, and put infinities back.",
        "`spacing = torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 1 - bits)` is the "
        "distance between neighboring numbers of the format around each element of `x`.",
    ),
    compare=_same_law,
)
