"""predict, quiz and show_source: what they hand to a notebook and to a page."""

import re

import pytest

from labcore import checks
from labcore.ui import Question, controls, predict, quiz, show_source, table

VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def book(monkeypatch):
    monkeypatch.setenv("LABCORE_BOOK", "1")


def test_prediction_is_a_field_in_notebooks_and_text_on_pages(monkeypatch):
    prediction = predict("How many  bytes?", unit="B")
    bundle = prediction._repr_mimebundle_(include=None, exclude=None)
    assert bundle["text/plain"] == "Predict: How many bytes? (in B)"
    assert VIEW in bundle
    monkeypatch.setenv("LABCORE_BOOK", "1")
    static = predict("Is a < b?")._repr_mimebundle_()
    assert VIEW not in static
    assert "Is a &lt; b?" in static["text/html"]


@pytest.mark.parametrize(
    ("guess", "measured", "said"),
    [
        (2, 8, "below by a factor of 4"),
        (16, 8, "above by a factor of 2"),
        (8, 8, "The same"),
        (-3, 6, "off by 9"),
        (0, 0.5, "off by 0.5"),
        (-4, -2, "above by a factor of 2"),
    ],
)
def test_the_guess_stands_beside_the_measurement(guess, measured, said):
    prediction = predict("How many?")
    revealed = prediction.reveal(measured)
    assert "You said" not in revealed.sentence()
    revealed._repr_mimebundle_()
    assert "<details" in revealed._live.value
    prediction.live.number.value = f" {guess:,} "
    prediction.live.button.click()
    assert said in revealed.sentence()
    assert said in revealed._live.value
    assert "<details" not in revealed._live.value
    assert "Kept" in prediction.live.answer.value


@pytest.mark.parametrize("typed", ["", "inf", "ten", "1 2"])
def test_a_guess_that_is_no_number_is_not_kept(typed):
    prediction = predict("How many?")
    assert prediction.live.number.value == ""
    prediction.live.number.value = typed
    prediction.live.button.click()
    assert prediction.guess is None
    assert "finite" in prediction.live.answer.value


@pytest.mark.parametrize(
    ("value", "text"), [(0.123456, "0.123"), (123456, "123,000"), (12.0, "12"), (1.5e-7, "1.5e-07")]
)
def test_a_measurement_has_three_digits(value, text):
    assert predict("How?", unit="s").reveal(value).sentence() == f"Measured: {text} s."


def test_the_page_folds_the_measurement(book):
    bundle = predict("How many?", unit="B").reveal(8)._repr_mimebundle_()
    folded = bundle["text/html"]
    assert folded.startswith("<details")
    assert folded.index("</summary>") < folded.index("Measured: 8 B.")
    assert bundle["text/plain"] == "Measured: 8 B."


def test_a_computed_number_is_not_called_measured(book):
    html = predict("How many?", unit="B").reveal(8, computed=True)._repr_mimebundle_()["text/html"]
    assert "reveal the number: How many?" in html
    assert "Computed: 8 B." in html
    assert "easure" not in html.replace("data-measured", "")


QUESTIONS = [
    Question("Is 1 < 2?", ("No & never", "Yes"), 1, "By <order>."),
    Question("And 2 < 3?", ("Yes", "No"), 0, "Again."),
]


def test_no_answer_stands_above_its_question():
    markup = quiz(QUESTIONS)._repr_mimebundle_()["text/html"]
    for question, why in (("Is 1 &lt; 2?", "By &lt;order&gt;."), ("And 2 &lt; 3?", "Again.")):
        folds = [m.span() for m in re.finditer(r"<details>.*?</details>", markup)]
        assert markup.index(question) < markup.index(why)
        assert any(start < markup.index(why) < end for start, end in folds)
    assert " open" not in markup.split("<script>")[0]
    assert "No &amp; never" in markup


def test_two_quizzes_do_not_share_their_buttons():
    names = [
        set(re.findall(r'name="([^"]+)"', quiz(part).markup()))
        for part in (QUESTIONS, QUESTIONS[:1])
    ]
    assert len(names[0]) == 2
    assert not names[0] & names[1]


def test_the_plain_text_holds_no_answer():
    plain = quiz(QUESTIONS)._repr_mimebundle_()["text/plain"]
    assert "( ) Yes" in plain
    assert "order" not in plain


def test_source_is_what_stands_in_the_package():
    shown = show_source(checks.one_of, controls.Toggle)
    (name, path, line, text), (other, *_rest) = shown.parts
    assert (name, other) == ("labcore.checks.one_of", "labcore.ui.controls.Toggle")
    assert path == "src/labcore/checks.py"
    whole = _read(checks.__file__)
    assert text in whole
    assert whole.splitlines()[line - 1] == text.splitlines()[0]
    bundle = shown._repr_mimebundle_()
    assert text in bundle["text/plain"]
    assert 'class="k"' in bundle["text/html"]


def _read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def test_docstrings_can_be_left_out():
    short = show_source(controls.Toggle, docstring=False).parts[0][3]
    assert '"""' not in short
    assert "def positions" in short
    compile(short, "short", "exec")


def test_the_page_takes_its_colors_from_the_theme(monkeypatch):
    assert "<style>" in show_source(checks.one_of)._repr_mimebundle_()["text/html"]
    monkeypatch.setenv("LABCORE_BOOK", "1")
    assert "<style>" not in show_source(checks.one_of)._repr_mimebundle_()["text/html"]


def test_a_table_has_headings_and_keeps_what_looks_like_markup():
    shown = table(("way", "a < b"), [("plain", "1"), ("longer name", "10")], note="<note>")
    bundle = shown._repr_mimebundle_()
    assert bundle["text/html"].count('scope="row"') == 2
    assert "a &lt; b" in bundle["text/html"]
    assert "&lt;note&gt;" in bundle["text/html"]
    lines = ("way          a < b", "plain            1", "longer name     10", "<note>")
    assert bundle["text/plain"] == "\n".join(lines)


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="must have 2 cells, .* got .*'short'"):
        table(("way", "ratio"), [("plain", "1"), ("short",)])
