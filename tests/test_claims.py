import math
import random
import statistics
from dataclasses import replace

import pytest

from labcore import claims, records
from labcore.claims import Claim, Measured, Part, Rule, Verdict, overall


def test_the_interval_of_a_mean_covers_it_as_often_as_it_says(seed):
    """95 % intervals over 4,000 draws: outside 93..97 %, 5.8 deviations, are 3 of 10^8 runs."""
    dice = random.Random(seed)
    for n in (3, 5, 9, 30):
        hits = 0
        for _ in range(4000):
            m = Measured.of([dice.gauss(2.0, 3.0) for _ in range(n)])
            hits += m.low <= 2.0 <= m.high
        assert 0.93 < hits / 4000 < 0.97


def test_on_logarithms_twice_and_half_are_as_far_from_one(seed):
    dice = random.Random(seed)
    ratios = [math.exp(dice.gauss(0, 1)) for _ in range(7)]
    straight, turned = (
        Measured.of(one, scale="log") for one in (ratios, [1 / ratio for ratio in ratios])
    )
    assert straight.mean == pytest.approx(math.prod(ratios) ** (1 / 7))
    assert (straight.low, straight.high) == pytest.approx((1 / turned.high, 1 / turned.low))
    logs = Measured.of([math.log(ratio) for ratio in ratios])
    assert math.log(straight.high) == pytest.approx(logs.high)
    one = Measured.of([3.0], scale="log")
    assert one.mean == pytest.approx(3.0) and (one.low, one.high, one.n) == (0.0, math.inf, 1)
    with pytest.raises(ValueError, match="above 0"):
        Measured.of([1.0, 0.0], scale="log")
    with pytest.raises(ValueError, match="scale"):
        Measured.of([1.0], scale="logarithmic")


def test_the_interval_of_a_probability_stays_one(seed):
    dice = random.Random(seed)
    for n in (1, 2, 5):
        samples = [1 - dice.random() ** 4 for _ in range(n)]
        plain, cut = Measured.of(samples), Measured.of(samples, scale="probability")
        assert (cut.mean, cut.n) == (plain.mean, n)
        assert (cut.low, cut.high) == (max(plain.low, 0), min(plain.high, 1))
    inside = [0.5, 0.5001, 0.4999]
    assert Measured.of(inside, scale="probability") == Measured.of(inside)
    for wrong in (-0.1, 1.1):
        with pytest.raises(ValueError, match="from 0 to 1"):
            Measured.of([0.5, wrong], scale="probability")


def test_one_sample_says_nothing_about_its_spread():
    m = Measured.of([1.0])
    assert (m.low, m.high) == (-math.inf, math.inf)
    assert Rule(at_least=0.0).judge(m) == "below the noise here"


def test_a_wrong_interval_is_refused():
    with pytest.raises(ValueError, match="low <= mean <= high"):
        Measured(mean=1.0, low=2.0, high=3.0, n=2)
    with pytest.raises(ValueError, match="exactly one"):
        Rule()
    with pytest.raises(ValueError, match="exactly one"):
        Rule(at_least=1.0, at_most=2.0)


@pytest.mark.parametrize(
    ("low", "high", "rule", "verdict"),
    [
        (2.0, 2.0, Rule(at_least=2.0), "holds"),
        (1.0, 1.9, Rule(at_least=2.0), "does not hold"),
        (1.9, 2.1, Rule(at_least=2.0), "below the noise here"),
        (0.4, 0.5, Rule(at_most=0.5), "holds"),
        (0.51, 0.6, Rule(at_most=0.5), "does not hold"),
        (0.4, 0.6, Rule(at_most=0.5), "below the noise here"),
    ],
)
def test_a_rule_judges_by_the_whole_interval(low, high, rule, verdict):
    assert rule.judge(Measured(mean=(low + high) / 2, low=low, high=high, n=5)) == verdict


def make_claim(verdict=None, parts=2) -> Claim:
    rules = [Rule(at_least=1.0), Rule(at_most=5.0)][:parts]
    items = tuple(
        Part(name=f"part {k}", case=f"case {k}", quantity="q", rule=rule)
        for k, rule in enumerate(rules)
    )
    untested = Part(name="at scale", untested="not testable here", reason="needs a cluster")
    return Claim(
        id="lion.x", slug="lion", statement="s", quantity="q", parts=items or (untested,),
        verdict=verdict,
    )  # fmt: skip


def test_live_result_raises_only_if_strict_and_wholly_opposite(clean_environment):
    holding = make_claim("holds")
    opposite, unsure = Measured.exactly(0.5), Measured(mean=1.0, low=0.5, high=1.5, n=3)
    assert holding.judge(opposite) == "does not hold"
    clean_environment.setenv("LABCORE_STRICT_CLAIMS", "1")
    assert holding.judge(unsure) == "below the noise here"
    assert holding.judge(Measured.exactly(1.5)) == "holds"
    with pytest.raises(
        claims.ClaimContradictedError, match=r"lion\.x, part 0: the record's verdict"
    ):
        holding.judge(opposite)
    assert make_claim("below the noise here").judge(opposite) == "does not hold"
    assert make_claim("does not hold").judge(opposite) == "does not hold"


def test_every_part_with_a_rule_is_held_to_its_record(clean_environment):
    clean_environment.setenv("LABCORE_STRICT_CLAIMS", "1")
    for id, item in claims.load().items():
        for part in item.parts:
            if part.untested:
                assert part.reason
                continue
            record = records.find(item.slug, part.case, part.quantity)
            recorded, rule = part.judge(part.measured(record)), part.rule
            bound, step = (rule.at_most, 1) if rule.at_least is None else (rule.at_least, -1)
            wrong = {"holds": step, "does not hold": -step}.get(recorded)
            if wrong is not None:
                with pytest.raises(claims.ClaimContradictedError, match=id):
                    item.judge(Measured.exactly(bound + wrong), part.name)
                assert item.judge(Measured.exactly(bound - wrong), part.name) == recorded


def test_a_zero_with_a_rounding_error_is_printed_as_zero():
    assert str(Measured(mean=1.1e-15, low=-0.1, high=0.1, n=10)) == "0 [-0.1, 0.1] (n = 10)"
    assert str(Measured(mean=1e-5, low=-0.1, high=0.1, n=10)).startswith("1e-05 [")
    assert str(Measured.of([1.5])).startswith("1.5 [-inf, inf]")


def test_a_number_is_judged_by_a_part_that_has_a_rule():
    with pytest.raises(ValueError, match=r"lion\.x must have a part with a rule"):
        make_claim(parts=0).judge(Measured.exactly(1.0))
    with pytest.raises(ValueError, match="did you mean 'part 1'"):
        make_claim().judge(Measured.exactly(1.0), "part  1")
    assert make_claim().judge(Measured.exactly(6.0), "part 1") == "does not hold"
    assert make_claim().judge(Measured.exactly(6.0)) == "holds"


@pytest.mark.parametrize(
    ("parts", "verdict"),
    [
        (["holds", "holds"], "holds"),
        (["not testable here"], "not testable here"),
        (["true by construction", "holds"], "holds in part"),
        (["holds", "not testable here"], "holds in part"),
        (["does not hold", "not testable here"], "does not hold"),
        (["below the noise here", "not testable here"], "below the noise here"),
        (["below the noise here", "does not hold"], "does not hold"),
        (["true by construction", "does not hold"], "holds in part"),
    ],
)
def test_parts_decide_the_whole(parts: list[Verdict], verdict: Verdict):
    assert overall(parts) == overall(parts[::-1]) == verdict


class FakeRecord:
    def __init__(self, samples, exact=False):
        self.samples, self.n, self.unit = samples, len(samples), "x"
        self.p50 = statistics.median(samples)
        self.details = {"exact": True} if exact else {}
        self.hardware = {"name": "A"}


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        ([2.0, 2.1, 1.9], [3.0, 3.1, 2.9], "holds"),
        ([2.0, 2.1, 1.9], [9.0, 9.1, 8.9], "holds in part"),
        ([0.1, 0.2, 0.1], [9.0, 9.1, 8.9], "does not hold"),
        ([1.0, 1.2, 0.9], [5.0, 5.1, 4.9], "below the noise here"),
        ([1.0, 1.2, 0.9], [9.0, 9.1, 8.9], "does not hold"),
    ],
)
def test_records_decide_a_claim(monkeypatch, first, second, verdict):
    by_case = {"case 0": FakeRecord(first), "case 1": FakeRecord(second)}
    monkeypatch.setattr(records, "find", lambda slug, case, quantity: by_case[case])
    assert claims.judge_records(make_claim())[0] == verdict


def test_a_part_on_logarithms_is_judged_there(monkeypatch):
    # The mean of these says nothing, their geometric mean lies above 2 with its interval.
    scattered = FakeRecord([20.0, 41.0, 74.0, 818.0])
    monkeypatch.setattr(records, "find", lambda *key: scattered)
    one = Part(name="z", case="x", quantity="y", rule=Rule(at_least=2.0))
    verdicts = []
    for scale in ("linear", "log"):
        item = replace(make_claim(), parts=(replace(one, scale=scale),))
        verdicts.append(claims.judge_records(item)[0])
    assert verdicts == ["below the noise here", "holds"]


def test_a_single_number_decides_only_when_it_is_exact(monkeypatch):
    one = make_claim(parts=1)
    monkeypatch.setattr(records, "find", lambda *key: FakeRecord([2.0]))
    assert claims.judge_records(one)[0] == "below the noise here"
    monkeypatch.setattr(records, "find", lambda *key: FakeRecord([2.0], exact=True))
    assert claims.judge_records(one) == ("holds", "2 x", "A")
    assert claims.judge_records(make_claim(parts=0)) == ("not testable here", "", "")


TOML = """# kept
[lion.memory]
# also kept
statement = "Lion halves the state \\"by half\\""
quantity = "bytes"
parts = [{ case = "c", quantity = "q", at_least = 2.0 }]

[lion.speed]
statement = "faster"
quantity = "time"
parts = [{ name = "on a GPU", not_testable = "needs a GPU" }]
verdict = "holds"
"""


def test_writing_verdicts_keeps_everything_else_and_repeats(tmp_path, monkeypatch):
    file = tmp_path / "claims.toml"
    file.write_text(TOML)
    monkeypatch.setattr(records, "find", lambda *key: FakeRecord([2.0], exact=True))
    found = claims.write(file)
    assert found["lion.memory"].verdict == "holds"
    assert found["lion.memory"].measured == "2 x"
    assert found["lion.speed"].verdict == "not testable here"
    once = file.read_text()
    assert "# kept\n" in once
    assert "# also kept\n" in once
    assert "by half" in found["lion.memory"].statement
    claims.write(file)
    assert file.read_text() == once


@pytest.mark.parametrize("text", ["[lion.x]\nnote = 'n'\nquantity = 1\n", "[lion", "lion = 3\n"])
def test_a_damaged_file_is_named(tmp_path, text):
    file = tmp_path / "claims.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"claims\.toml is damaged .*git checkout"):
        claims.load(file)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ("", r"lion\.x must have parts"),
        ('parts = [{ name = "a", not_testable = " " }]', "must say why"),
        ('parts = [{ name = "a", not_testable = "x", by_construction = "y" }]', "must say why"),
        ('parts = [{ name = "a", case = "c", not_testable = "x" }]', "must say why"),
        ('parts = [{ name = "a", case = "c", quantity = "q" }]', "exactly one of at_least"),
        (
            'parts = [{ name = "a", not_testable = "x" }, { name = "a", not_testable = "y" }]',
            "a name each",
        ),
    ],
)
def test_a_part_needs_a_rule_or_a_reason(tmp_path, parts, said):
    file = tmp_path / "claims.toml"
    file.write_text(f'[lion.x]\nstatement = "s"\nquantity = "q"\n{parts}\n')
    with pytest.raises(ValueError, match=said):
        claims.load(file)


def test_parts_that_share_a_quantity_are_named_by_their_cases(tmp_path):
    file = tmp_path / "claims.toml"
    rows = "".join(f'{{ case = "{one}", quantity = "q/no_x", at_least = 1 }},' for one in "ab")
    file.write_text(f'[lion.x]\nstatement = "s"\nquantity = "q"\nparts = [{rows}]\n')
    assert [part.name for part in claims.load(file)["lion.x"].parts] == ["a: q: no x", "b: q: no x"]


def test_the_shipped_verdicts_are_what_the_records_say():
    for item in claims.load().values():
        assert (item.verdict, item.measured, item.hardware) == claims.judge_records(item)


def test_an_unknown_claim_names_the_nearest(monkeypatch):
    monkeypatch.setattr(claims, "load", lambda: {"lion.memory": make_claim()})
    with pytest.raises(ValueError, match=r"did you mean 'lion\.memory'"):
        claims.claim("lion.memmory")  # codespell:ignore
