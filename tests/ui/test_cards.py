"""A record as a table of intervals, and a chapter's claims as cards."""

import re

import pytest

from labcore import claims, records
from labcore.claims import Measured
from labcore.ui import predict, recorded, takeaway, verdicts
from labcore.ui.cards import BADGES


def html(shown: object) -> str:
    return shown._repr_mimebundle_()["text/html"]  # type: ignore[attr-defined]


def plain(shown: object) -> str:
    return shown._repr_mimebundle_()["text/plain"]  # type: ignore[attr-defined]


def test_a_record_shows_itself_its_peers_and_where_it_is_from() -> None:
    record = records.find("lion", "step-time/quarter-gpt2", "Lion over AdamW")
    shown = recorded("lion", "step-time/quarter-gpt2", {"Lion over AdamW": "Lion over AdamW"})
    assert [row.name for row in shown.rows] == ["Lion over AdamW", *record.peers]
    assert shown.rows[0].measured.mean == pytest.approx(sum(record.samples) / record.n)
    assert record.hardware["name"] in html(shown) and record.hardware["name"] in plain(shown)
    assert ("; code since changed." in plain(shown)) == records.is_stale(record)


def test_peers_stand_beside_ours_unless_they_are_left_out() -> None:
    record = next(one for one in records.load() if one.peers and len(one.samples) > 1)
    key = (record.slug, record.case, record.quantity)
    found = records.find(*key)
    first, *others = found.peers
    assert [row.kind for row in recorded(*key).rows].count("ours") == 1
    assert len(recorded(*key).rows) == 1 + len(found.peers)
    assert len(recorded(*key, peers=False).rows) == 1
    fewer = recorded(*key, names={first: "", **dict.fromkeys(others[:1], "renamed")})
    assert len(fewer.rows) == len(found.peers)
    assert ("renamed" in plain(fewer)) == bool(others)


def test_what_cannot_share_an_axis_or_is_not_there_is_refused() -> None:
    with pytest.raises(KeyError):
        recorded("lion", "step-time/quarter-gpt2", "no such quantity")
    of_lion = [one for one in records.load() if one.slug == "lion"]
    by_case: dict[str, dict[str, str]] = {}
    for one in of_lion:
        by_case.setdefault(one.case, {})[one.unit] = one.quantity
    case, units = next((case, units) for case, units in by_case.items() if len(units) > 1)
    with pytest.raises(ValueError, match="must share one unit"):
        recorded("lion", case, units.values())


def test_every_claim_is_a_card_with_its_verdict_and_every_part() -> None:
    for slug in {item.slug for item in claims.load().values()}:
        shown = verdicts(slug)
        markup = html(shown)
        for item in (one for one in claims.load().values() if one.slug == slug):
            assert f'id="verdict-{item.id.partition(".")[2]}"' in markup
            assert f"{item.statement} {BADGES[item.verdict]} {item.verdict}" in plain(shown)
            judged = [part for part in item.parts if not part.untested]
            for part in judged:
                record = records.find(slug, part.case, part.quantity)
                assert f"{BADGES[part.judge(part.measured(record))]}" in markup
        rows = len(re.findall(r'<tr class="ours">', markup))
        assert rows == sum(not part.untested for one in shown.claims.values() for part in one.parts)


def test_what_ran_here_is_judged_beside_its_part(clean_environment) -> None:
    item = claims.claim("lion.speed")
    second = item.parts[1].name
    here = {"speed": Measured.exactly(7.5), f"speed/{second}": Measured.exactly(0.125)}
    markup = html(verdicts("lion", live=here))
    found = re.findall(r'<tr class="live">.*?</tr>', markup)
    assert [("does not hold" in row, "7.5" in row) for row in found] == [
        (True, True),
        (False, False),
    ]
    assert "0.125" in found[1]
    clean_environment.setenv("LABCORE_STRICT_CLAIMS", "1")
    with pytest.raises(claims.ClaimContradictedError, match=r"lion\.speed"):
        verdicts("lion", live={"speed": Measured.exactly(7.5)})
    with pytest.raises(ValueError, match="did you mean 'speed'"):
        verdicts("lion", live={"sped": Measured.exactly(1.0)})
    with pytest.raises(ValueError, match="must have claims"):
        verdicts("tiger")


def test_a_takeaway_is_a_sentence() -> None:
    shown = takeaway("Lion halves  the\n state.")
    assert "Lion halves the state." in html(shown) and plain(shown).startswith("Takeaway:")
    for empty in ("", " \n", None):
        with pytest.raises(ValueError, match="text must be a sentence"):
            takeaway(empty)  # type: ignore[arg-type]


def test_a_takeaway_that_answers_a_question_is_folded_until_there_is_a_guess() -> None:
    guess = predict("How many?")
    folded = html(takeaway("Seven.", after=guess))
    assert re.search("<details><summary>[^<]+</summary>Seven.</details>", folded)
    guess.record(8)
    for shown in (takeaway("Seven.", after=guess), takeaway("Seven.")):
        assert "Seven." in html(shown) and "details" not in html(shown).partition("</style>")[2]
