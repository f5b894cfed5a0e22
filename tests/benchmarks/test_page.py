"""The page of the aims on a CPU."""

from benchmarks import page, runner


def test_the_page_says_what_the_records_say() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.text(), "run python -m benchmarks --page"


def test_every_aim_names_a_case_and_either_a_most_or_a_least() -> None:
    for aim in page.AIMS:
        assert aim.case in {case.name for case in runner.cases_of(aim.slug)}, aim
        assert (aim.most is None) != (aim.least is None), aim
    assert len({aim.what for aim in page.AIMS}) == len(page.AIMS)
