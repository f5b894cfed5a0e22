"""The articles' claims, each in parts, with verdicts that code computes.

`claims.toml` states the claims. `python -m labcore.claims` (`make claims`) judges each claim by its
records and writes the verdicts to the same file. A chapter runs a short form of the measurement
live and shows its verdict next to the record's.
"""

from __future__ import annotations

import json
import math
import sys
import tomllib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, get_args

from labcore import records
from labcore.checks import one_of
from labcore.device import strict_claims

__all__ = [
    "FILE",
    "Claim",
    "ClaimContradictedError",
    "Measured",
    "Part",
    "Rule",
    "Verdict",
    "claim",
    "judge_records",
    "load",
    "overall",
    "write",
]

FILE = Path(__file__).resolve().parent / "claims.toml"

Verdict = Literal[
    "holds",
    "holds in part",
    "does not hold",
    "below the noise here",
    "not testable here",
    "true by construction",
]
UNTESTED: dict[str, Verdict] = {
    "not_testable": "not testable here",
    "by_construction": "true by construction",
}
"""Keys of a part that no record decides; each holds the reason."""

Scale = Literal["linear", "log", "probability"]


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
        ratios, where 2 and 1/2 are equally far from 1. "probability" cuts the interval to what a
        probability can be, 0 to 1, which can't lose the true value. Otherwise, a single sample has
        an infinite interval.
        Raises ValueError if there are no samples, or if a sample is not above 0 with "log" or not
        from 0 to 1 with "probability".
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
        if scale == "probability":
            if not 0 <= min(samples) <= max(samples) <= 1:
                raise ValueError(
                    'samples must be from 0 to 1 for scale "probability", got '
                    f'{min(samples)} to {max(samples)}; use scale "linear"'
                )
            found = cls.of(samples)
            low, high = max(found.low, 0.0), min(found.high, 1.0)
            return cls(mean=found.mean, low=low, high=high, n=found.n)
        mean, n = fmean(samples), len(samples)
        if n == 1:
            return cls(mean=mean, low=-math.inf, high=math.inf, n=1)
        from scipy.special import stdtrit  # here, because it takes a fifth of a second to import

        half = float(stdtrit(n - 1, 0.975)) * stdev(samples) / math.sqrt(n)
        return cls(mean=mean, low=mean - half, high=mean + half, n=n)

    @classmethod
    def recorded(cls, record: records.Record, *, scale: Scale = "linear") -> Measured:
        """Return a record's number. A record of an exact number has "exact" in its details."""
        if record.details.get("exact") is True:
            return cls.exactly(record.p50)
        return cls.of(record.samples, scale=scale)

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
class Part:
    """A part of a claim: a record's case and quantity with a rule, or a reason why it has none.

    name: the part in words. scale: of the samples' mean and interval, as in `Measured.of`.
    untested: "not testable here" or "true by construction", and reason says why; "" if a record
    decides.
    """

    name: str
    case: str = ""
    quantity: str = ""
    rule: Rule | None = None
    scale: Scale = "linear"
    untested: Verdict | Literal[""] = ""
    reason: str = ""

    def measured(self, record: records.Record) -> Measured:
        """Return a record's number on this part's scale."""
        return Measured.recorded(record, scale=self.scale)

    def judge(self, measured: Measured | None) -> Verdict:
        """Return the verdict on this part alone."""
        if self.untested:
            return self.untested
        if self.rule is None or measured is None:
            raise ValueError(f"part {self.name!r} must have a rule and a number to be judged")
        return self.rule.judge(measured)


class ClaimContradictedError(AssertionError):
    """A live measurement's whole interval contradicts the record's verdict."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A claim of an article, or of the field.

    id: "<slug>.<name>". statement: the claim in our words. source: "the article", or who else says
    so, with a reference. quantity: what is measured, in words. parts: what decides, part by part.
    note: what a reader should know besides.
    verdict, measured, hardware: what `make claims` wrote.
    """

    id: str
    slug: str
    statement: str
    quantity: str
    parts: tuple[Part, ...]
    source: str = "the article"
    note: str = ""
    verdict: Verdict | None = None
    measured: str = ""
    hardware: str = ""

    def part(self, name: str = "") -> Part:
        """Return the part with this name; "" is the first that a record decides.

        Raises ValueError if there is none.
        """
        tested = {part.name: part for part in self.parts if not part.untested}
        if not tested:
            raise ValueError(f"claim {self.id} must have a part with a rule, got none")
        return (
            tested[one_of(f"part of {self.id}", name, tested)]
            if name
            else next(iter(tested.values()))
        )

    def judge(self, measured: Measured, part: str = "") -> Verdict:
        """Judge a number measured live by the rule of `part`, "" for the first with a rule.

        With LABCORE_STRICT_CLAIMS=1, raises ClaimContradictedError if the number's whole interval
        contradicts the recorded verdict on the part. Without it, readers see no error.
        """
        judged = self.part(part)
        verdict, recorded = judged.judge(measured), self._recorded(judged)
        opposite = {("holds", "does not hold"), ("does not hold", "holds")}
        if strict_claims() and (recorded, verdict) in opposite:
            raise ClaimContradictedError(
                f"{self.id}, {judged.name}: the record's verdict is {recorded!r}, but this run "
                f"measured {measured}, so the part {verdict} here by the rule {judged.rule}"
            )
        return verdict

    def _recorded(self, part: Part) -> Verdict | None:
        try:
            record = records.find(self.slug, part.case, part.quantity)
        except KeyError:
            return self.verdict
        return part.judge(part.measured(record))


def _rule(raw: Mapping[str, Any]) -> Rule:
    return Rule(at_least=raw.get("at_least"), at_most=raw.get("at_most"))


def _part(id: str, raw: Mapping[str, Any]) -> Part:
    why = [key for key in UNTESTED if key in raw]
    if not why:
        return Part(
            name=raw["name"],
            case=raw["case"],
            quantity=raw["quantity"],
            rule=_rule(raw),
            scale=one_of("scale", raw.get("scale", "linear"), get_args(Scale)),
        )
    if len(why) > 1 or not raw[why[0]].strip() or "case" in raw:
        raise ValueError(f"a part of {id} without a record must say why, once, got {raw}")
    return Part(name=raw["name"], untested=UNTESTED[why[0]], reason=raw[why[0]])


def _claim(id: str, raw: Mapping[str, Any]) -> Claim:
    statement, quantity, given = raw["statement"], raw["quantity"], raw.get("parts", ())
    twice = Counter(item.get("quantity") for item in given)
    for item in given:  # a part is named by its quantity, and where two share it by its case too
        case = f"{item['case']}: " if twice[item.get("quantity")] > 1 and "case" in item else ""
        name = f"{case}{item.get('quantity', '')}".replace("/", ": ").replace("_", " ")
        item.setdefault("name", name)
    parts = tuple(_part(id, item) for item in given)
    names = [part.name for part in parts]
    if not parts or len(set(names)) < len(names):
        raise ValueError(f"claim {id} must have parts with a name each, got {names}")
    return Claim(
        id=id,
        slug=id.split(".")[0],
        statement=statement,
        quantity=quantity,
        parts=parts,
        source=raw.get("source", "the article"),
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


def overall(verdicts: Collection[Verdict]) -> Verdict:
    """Return the verdict on a claim from those on its parts.

    Parts that agree give their verdict. Otherwise the claim holds in part if any part holds or is
    true by construction; if none does, it doesn't hold if any part doesn't, and is below the noise
    if any is.
    """
    found = set(verdicts)
    if len(found) == 1:
        return found.pop()
    if found & {"holds", "true by construction"}:
        return "holds in part"
    return "does not hold" if "does not hold" in found else "below the noise here"


def judge_records(claim: Claim) -> tuple[Verdict, str, str]:
    """Return a claim's verdict, measured numbers and hardware, from its records alone."""
    verdicts: list[Verdict] = []
    numbers, machines = [], set()
    for part in claim.parts:
        measured = None
        if not part.untested:
            record = records.find(claim.slug, part.case, part.quantity)
            measured = part.measured(record)
            numbers.append(f"{measured} {record.unit}".strip())
            machines.add(record.hardware["name"])
        verdicts.append(part.judge(measured))
    return overall(verdicts), "; ".join(numbers), ", ".join(sorted(machines))


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
