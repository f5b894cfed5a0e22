"""The articles' claims, each with its evidence and a verdict that code computes.

`claims.toml` states the claims. `python -m labcore.claims` (`make claims`) judges each claim by its
records and writes the verdicts to the same file. A chapter runs a short form of the measurement
live and shows its verdict next to the record's.
"""

from __future__ import annotations

import json
import math
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, get_args

from scipy.special import stdtrit

from labcore import records
from labcore.checks import one_of
from labcore.device import strict_claims

__all__ = [
    "FILE",
    "Claim",
    "ClaimContradictedError",
    "Evidence",
    "Measured",
    "Rule",
    "Verdict",
    "claim",
    "judge_records",
    "load",
    "write",
]

FILE = Path(__file__).resolve().parent / "claims.toml"

Verdict = Literal[
    "holds", "holds in part", "does not hold", "below the noise here", "not testable here"
]

Scale = Literal["linear", "log"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A measured number with its interval: low <= mean <= high, from n samples.

    A number known exactly has low == mean == high.
    """

    mean: float
    low: float
    high: float
    n: int

    def __post_init__(self) -> None:
        if not self.low <= self.mean <= self.high:
            raise ValueError(
                f"Measured must have low <= mean <= high, got {self.low}, {self.mean}, {self.high}"
            )

    @classmethod
    def exactly(cls, value: float) -> Measured:
        """Wrap a number known exactly."""
        return cls(mean=value, low=value, high=value, n=1)

    @classmethod
    def of(cls, samples: Sequence[float], *, scale: Scale = "linear") -> Measured:
        """Compute the mean of independent samples and its 95% confidence interval (Student's t).

        scale: "log" computes both from the logarithms, which gives the geometric mean. Use it for
        ratios, where 2 and 1/2 are equally far from 1. A single sample has an infinite interval.
        Raises ValueError if there are no samples, or if a sample is not above 0 with "log".
        """
        if not samples:
            raise ValueError("Measured.of needs at least one sample, got none")
        if one_of("scale", scale, get_args(Scale)) == "log":
            if min(samples) <= 0:
                raise ValueError(
                    f'samples must be above 0 for scale "log", got {min(samples)}; '
                    'use scale "linear"'
                )
            found = cls.of([math.log(one) for one in samples])
            mean, low, high = (
                math.exp(one) if one < 700 else math.inf
                for one in (found.mean, found.low, found.high)
            )
            return cls(mean=mean, low=low, high=high, n=found.n)
        mean, n = fmean(samples), len(samples)
        if n == 1:
            return cls(mean=mean, low=-math.inf, high=math.inf, n=1)
        half = float(stdtrit(n - 1, 0.975)) * stdev(samples) / math.sqrt(n)
        return cls(mean=mean, low=mean - half, high=mean + half, n=n)

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.mean:.4g}"
        width = self.high - self.low
        # A mean of 1e-15 is zero plus rounding error.
        mean = 0.0 if math.isfinite(width) and abs(self.mean) < 1e-9 * width else self.mean
        return f"{mean:.4g} [{self.low:.4g}, {self.high:.4g}] (n = {self.n})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """The condition for a claim to hold: the number is at least, or at most, this bound."""

    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError(
                "a rule must have exactly one of at_least and at_most, "
                f"got at_least={self.at_least}, at_most={self.at_most}"
            )

    def judge(self, measured: Measured) -> Verdict:
        """Return the verdict: "below the noise here" if the interval crosses the bound."""
        if self.at_most is not None:
            sure, never = measured.high <= self.at_most, measured.low > self.at_most
        else:
            bound = float(self.at_least)  # type: ignore[arg-type]
            sure, never = measured.low >= bound, measured.high < bound
        return "holds" if sure else "does not hold" if never else "below the noise here"

    def __str__(self) -> str:
        if self.at_most is not None:
            return f"at most {self.at_most:g}"
        return f"at least {self.at_least:g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Where a claim's number comes from: a record's case and quantity, and the rule to apply.

    scale: the scale of the samples' mean and interval, as in `Measured.of`.
    """

    case: str
    quantity: str
    rule: Rule
    scale: Scale = "linear"

    def measured(self, record: records.Record) -> Measured:
        """Return a record's number. A record of an exact number has "exact" in its details."""
        if record.details.get("exact"):
            return Measured.exactly(record.p50)
        return Measured.of(record.samples, scale=self.scale)


class ClaimContradictedError(AssertionError):
    """A live measurement's whole interval contradicts the record's verdict."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A claim of an article.

    id: "<slug>.<name>". statement: the claim in our words. quantity: what is measured, in words.
    evidence: the records that decide. It is empty if the claim cannot be tested here, and `note`
    then says why. verdict, measured, hardware: what `make claims` wrote.
    """

    id: str
    slug: str
    statement: str
    quantity: str
    evidence: tuple[Evidence, ...]
    note: str = ""
    verdict: Verdict | None = None
    measured: str = ""
    hardware: str = ""

    @property
    def rule(self) -> Rule:
        """The rule of the first piece of evidence, which judges live measurements."""
        if not self.evidence:
            raise ValueError(f"claim {self.id} has no evidence and thus no rule; pass rule=")
        return self.evidence[0].rule

    def judge(self, measured: Measured, rule: Rule | None = None) -> Verdict:
        """Judge a number measured live, by `rule` or by the rule of the first evidence.

        With LABCORE_STRICT_CLAIMS=1, raises ClaimContradictedError if the number's whole interval
        contradicts the recorded verdict. Without it, never raises, so readers see no error.
        """
        verdict = (rule or self.rule).judge(measured)
        recorded = self.verdict if rule else self._recorded()
        opposite = {("holds", "does not hold"), ("does not hold", "holds")}
        if strict_claims() and (recorded, verdict) in opposite:
            raise ClaimContradictedError(
                f"{self.id}: the record's verdict is {recorded!r} ({self.measured}), but this run "
                f"measured {measured}, so the claim {verdict} here by the rule {rule or self.rule}"
            )
        return verdict

    def _recorded(self) -> Verdict | None:
        """The verdict on the first evidence alone; the claim as a whole may hold in part."""
        first = self.evidence[0]
        try:
            record = records.find(self.slug, first.case, first.quantity)
        except KeyError:
            return self.verdict
        return first.rule.judge(first.measured(record))


def _rule(raw: Mapping[str, Any]) -> Rule:
    return Rule(at_least=raw.get("at_least"), at_most=raw.get("at_most"))


def _claim(id: str, raw: Mapping[str, Any]) -> Claim:
    evidence = tuple(
        Evidence(
            case=item["case"],
            quantity=item["quantity"],
            rule=_rule(item),
            scale=one_of("scale", item.get("scale", "linear"), get_args(Scale)),
        )
        for item in raw.get("evidence", ())
    )
    if not evidence and not raw.get("note"):
        raise ValueError(f"claim {id} must have evidence, or a note that says why it has none")
    return Claim(
        id=id,
        slug=id.split(".")[0],
        statement=raw["statement"],
        quantity=raw["quantity"],
        evidence=evidence,
        note=raw.get("note", ""),
        verdict=raw.get("verdict"),
        measured=raw.get("measured", ""),
        hardware=raw.get("hardware", ""),
    )


def load(file: Path = FILE) -> dict[str, Claim]:
    """Load all claims by id, in the file's order. Raises ValueError if the file is damaged."""
    try:
        raw = tomllib.loads(file.read_text(encoding="utf-8"))
        return {
            f"{slug}.{name}": _claim(f"{slug}.{name}", body)
            for slug, claims in raw.items()
            for name, body in claims.items()
        }
    except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is damaged ({error!r}); restore it with git checkout") from error


def claim(id: str) -> Claim:
    """Return the claim with this id. For an unknown id, raises ValueError with the nearest one."""
    claims = load()
    return claims[one_of("claim", id, claims)]


def judge_records(claim: Claim) -> tuple[Verdict, str, str]:
    """Return a claim's verdict, measured numbers and hardware, from its records alone.

    If pieces of evidence disagree, the verdict is "holds in part" if any of them holds, and
    otherwise "does not hold" if any of them does not hold. A claim without evidence is
    "not testable here".
    """
    if not claim.evidence:
        return "not testable here", "", ""
    found = [(item, records.find(claim.slug, item.case, item.quantity)) for item in claim.evidence]
    measured = [item.measured(record) for item, record in found]
    verdicts = {item.rule.judge(m) for (item, _), m in zip(found, measured, strict=True)}
    if len(verdicts) == 1:
        verdict = verdicts.pop()
    elif "holds" in verdicts:
        verdict = "holds in part"
    else:
        verdict = "does not hold" if "does not hold" in verdicts else "below the noise here"
    text = "; ".join(f"{m} {r.unit}".strip() for m, (_, r) in zip(measured, found, strict=True))
    return verdict, text, ", ".join(sorted({r.hardware["name"] for _, r in found}))


_WRITTEN = ("verdict", "measured", "hardware")


def write(file: Path = FILE) -> dict[str, Claim]:
    """Judge every claim by its records, write the verdicts into `file`, and return the claims.

    The file's statements, rules and comments do not change.
    """
    lines = [
        line
        for line in file.read_text(encoding="utf-8").splitlines()
        if line.split("=")[0].strip() not in _WRITTEN
    ]
    out: list[str] = []
    claims = load(file)
    for line in lines:
        out.append(line)
        id = line.strip().strip("[]")
        if line.startswith("[") and id in claims:
            values = dict(zip(_WRITTEN, judge_records(claims[id]), strict=True))
            out += [f"{key} = {json.dumps(values[key], ensure_ascii=False)}" for key in _WRITTEN]
    file.write_text("\n".join(out).rstrip() + "\n", encoding="utf-8")
    return load(file)


def _main() -> int:
    """Judge all claims, write the verdicts, and print one line per claim."""
    for item in write().values():
        sys.stdout.write(f"{item.verdict}: {item.id}  {item.measured}\n")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
