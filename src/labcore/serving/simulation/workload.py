"""Requests for measuring a server: arrival times, lengths, shared prefixes.

Arrivals are seconds from the start, in order. Lengths are in tokens. Everything is drawn from a
seed and is the same on every machine. A Poisson process is the usual model of arrivals if a log has
no times (Kwon et al., 2023, arXiv 2309.06180, section 6.1).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import accumulate, pairwise

from labcore.checks import non_negative, positive, positive_int
from labcore.decoding import SamplingConfig
from labcore.serving.engine.request import Request

__all__ = ["Workload", "bursts", "fixed", "lognormal", "long_tail", "poisson", "recorded"]


def poisson(rate: float, n: int, seed: int) -> tuple[float, ...]:
    """Return the arrival times of n requests that arrive independently, `rate` per second.

    The gaps are exponential with mean 1 / rate; the first request arrives after such a gap.
    """
    positive("rate", rate, "pass requests a second")
    positive_int("n", n)
    dice = random.Random(seed)
    return tuple(accumulate(dice.expovariate(rate) for _ in range(n)))


def bursts(
    rate: float, n: int, seed: int, *, size: int = 8, within: float = 0.0
) -> tuple[float, ...]:
    """Return the arrival times of n requests in bursts of `size`, `rate` requests per second.

    The bursts are a Poisson process with rate / size bursts per second. A burst's requests arrive
    uniformly at random within `within` seconds, by default all at once. The last burst may be
    smaller.
    """
    positive_int("size", size)
    non_negative("within", within, "pass seconds")
    positive("rate", rate, "pass requests a second")
    starts = poisson(rate / size, -(-positive_int("n", n) // size), seed)
    dice = random.Random(f"within a burst {seed}")
    times = [starts[number // size] + within * dice.random() for number in range(n)]
    return tuple(sorted(times))


def recorded(times: Sequence[float], *, speed: float = 1.0) -> tuple[float, ...]:
    """Return the arrival times of a log, starting at 0; speed 2 replays it in half the time.

    times: in order, on any clock. Raises ValueError if there are none, or they aren't finite and
    in order.
    """
    positive("speed", speed)
    if not times:
        raise ValueError("times must hold at least one arrival, got none; pass seconds")
    if not all(map(math.isfinite, times)):
        raise ValueError("times must be finite, got infinity or NaN; pass seconds")
    late = next((i for i, (one, two) in enumerate(pairwise(times), 1) if two < one), None)
    if late is not None:
        raise ValueError(
            f"times must be in order, got {times[late]} after {times[late - 1]}; sort them first"
        )
    return tuple((time - times[0]) / speed for time in times)


def fixed(tokens: int, n: int) -> tuple[int, ...]:
    """Return n equal lengths."""
    return (positive_int("tokens", tokens),) * positive_int("n", n)


def lognormal(
    median: float, n: int, seed: int, *, sigma: float = 1.0, least: int = 1, most: int = 4096
) -> tuple[int, ...]:
    """Return n lengths from a lognormal distribution with the given median.

    sigma: standard deviation of the logarithm. Lengths are rounded to whole tokens and clamped to
    least..most.
    """
    positive("median", median)
    non_negative("sigma", sigma)
    _check_bounds(least, most)
    dice = random.Random(seed)
    drawn = (
        round(min(dice.lognormvariate(math.log(median), sigma), float(most)))
        for _ in range(positive_int("n", n))
    )
    return tuple(min(max(length, least), most) for length in drawn)


def long_tail(
    least: int, n: int, seed: int, *, tail: float = 1.0, most: int = 4096
) -> tuple[int, ...]:
    """Return n lengths from a truncated Pareto distribution: P(length > x) falls about as x**-tail.

    Most lengths are near `least`, a few are many times longer. A smaller `tail` is heavier. At
    tail 1 the mean is least * ln(most / least) / (1 - least / most), apart from rounding.
    """
    positive("tail", tail)
    _check_bounds(least, most)
    dice = random.Random(seed)
    inside = 1 - (least / most) ** tail  # the probability mass kept by the truncation

    def one() -> int:
        return round(least * (1 - dice.random() * inside) ** (-1 / tail))

    return tuple(min(one(), most) for _ in range(positive_int("n", n)))


def _check_bounds(least: int, most: int) -> None:
    positive_int("least", least)
    if positive_int("most", most) < least:
        raise ValueError(f"most must be at least least = {least}, got {most}; swap the two")


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests with given lengths at given times; the output lengths are imposed.

    arrivals: seconds, in order, one per request. prompts, outputs: lengths in tokens. max_tokens:
    what every request asks for, which hides its length from the scheduler; None: each asks for
    exactly its output length. prefix: number of tokens that a prompt shares with the others of its
    group; a prompt has at least one unshared token. groups: number of groups. sharing: the
    probability that a prompt begins with its group's prefix, 0 to 1. vocabulary: prompt tokens are
    drawn from 0..vocabulary - 1. priorities: one per request, smaller first, or none. patience:
    seconds from arrival to deadline, None for no deadline.
    Raises ValueError or TypeError that names the field.
    """

    arrivals: tuple[float, ...]
    prompts: tuple[int, ...]
    outputs: tuple[int, ...]
    _: KW_ONLY
    max_tokens: int | None = None
    prefix: int = 0
    groups: int = 1
    sharing: float = 1.0
    vocabulary: int = 1024
    seed: int = 0
    priorities: tuple[int, ...] = ()
    patience: float | None = None

    def __post_init__(self) -> None:
        sizes = {"prompts": self.prompts, "outputs": self.outputs}
        if self.priorities:
            sizes["priorities"] = self.priorities
        for name, values in sizes.items():
            if len(values) != len(self.arrivals):
                raise ValueError(
                    f"{name} must have one entry for each of {len(self.arrivals)} arrivals, "
                    f"got {len(values)}"
                )
        for name in ("prompts", "outputs"):
            for length in sizes[name]:
                positive_int(name, length, "pass tokens")
        for time in self.arrivals:
            non_negative("arrivals", time, "pass seconds")
        if any(two < one for one, two in pairwise(self.arrivals)):
            raise ValueError("arrivals must be in order, got a decrease; sort them first")
        positive_int("groups", self.groups)
        positive_int("vocabulary", self.vocabulary)
        if self.prefix:
            positive_int("prefix", self.prefix, "pass tokens, or 0 for none")
        if not 0 <= self.sharing <= 1:
            raise ValueError(
                f"sharing must be between 0 and 1, got {self.sharing}; pass a fraction of the "
                "prompts"
            )
        if self.patience is not None:
            positive("patience", self.patience, "pass seconds")
        if self.max_tokens is not None and self.max_tokens < max(self.outputs, default=0):
            raise ValueError(
                f"max_tokens must be at least the longest output, {max(self.outputs)}, "
                f"got {self.max_tokens}; raise it or cut the outputs"
            )

    def __len__(self) -> int:
        return len(self.arrivals)

    @staticmethod
    def id(number: int) -> str:
        """Return the id of the request with this index: r0, r1, ..."""
        return f"r{number}"

    @property
    def lengths(self) -> dict[str, int]:
        """The imposed output length of each request, in tokens, by id."""
        return {self.id(number): length for number, length in enumerate(self.outputs)}

    def group(self, number: int) -> int:
        """Return the group whose prefix the request with this index shares."""
        return random.Random(f"group {self.seed} {number}").randrange(self.groups)

    def shares(self, number: int) -> bool:
        """Return whether the request with this index begins with its group's prefix.

        A request that does at one `sharing` also does at every larger one.
        """
        return random.Random(f"sharing {self.seed} {number}").random() < self.sharing

    def requests(self) -> list[Request]:
        """Return the requests in order of arrival, with greedy sampling and their own seeds."""
        tokens = range(self.vocabulary)
        shared = [
            random.Random(f"prefix {self.seed} {group}").choices(tokens, k=self.prefix)
            for group in range(self.groups)
        ]
        made = []
        for number, (arrival, prompt, output) in enumerate(
            zip(self.arrivals, self.prompts, self.outputs, strict=True)
        ):
            most_shared = prompt - 1 if self.shares(number) else 0
            head = shared[self.group(number)][:most_shared]
            own = random.Random(f"prompt {self.seed} {number}").choices(
                tokens, k=prompt - len(head)
            )
            most = output if self.max_tokens is None else self.max_tokens
            made.append(
                Request(
                    id=self.id(number),
                    prompt=(*head, *own),
                    sampling=SamplingConfig(max_tokens=most, seed=self.seed + number),
                    priority=self.priorities[number] if self.priorities else 0,
                    deadline=None if self.patience is None else arrival + self.patience,
                    arrival=arrival,
                )
            )
        return made
