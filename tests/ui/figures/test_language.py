"""The figures of the language-model runs hold the numbers that they are given."""

from labcore.studies.language.curves import Reported
from labcore.studies.language.tuning import Setting
from labcore.ui.figures import language as figures


def alt(figure) -> str:
    return figure.layout.meta["alt"]


def runs(level: float) -> Reported:
    return Reported(
        setting=Setting(lr=0.1, decay=0.0),
        steps=4,
        tokens=(1_000.0, 3_000.0),
        losses=(level + 1, level),
        held_out=(level - 0.1, level + 0.1),
    )


def test_loss_on_the_language_model_stands_against_tokens_or_time() -> None:
    data = {1_000: {"AdamW": runs(4.0), "Lion": runs(4.5), "Lion 0.95/0.98": runs(4.25)}}
    seconds = {1_000: {"AdamW": 2.0, "Lion": 1.0}}
    figure = figures.curves(1_000, "tokens", data, seconds)
    assert [list(line.x) for line in figure.data] == [[1.0, 3.0]] * 3
    assert list(figure.data[1].y) == [5.5, 4.5]
    assert "AdamW 4.00, Lion 4.50, Lion 0.95/0.98 4.25" in alt(figure)
    assert figure.data[1].line.color == figure.data[2].line.color
    assert figure.data[1].line.dash != figure.data[2].line.dash
    timed = figures.curves(1_000, "time", data, seconds)
    assert [(line.name, list(line.x)) for line in timed.data] == [
        ("AdamW", [2.0, 6.0]),
        ("Lion", [1.0, 3.0]),
    ]


def test_the_settings_within_the_noise_are_filled() -> None:
    losses = {
        Setting(lr=0.4, decay=0.1): 5.3,
        Setting(lr=0.1, decay=0.1): 5.0,
        Setting(lr=0.1, decay=1.0): 5.1,
    }
    figure = figures.tuning(64, {64: {"AdamW": losses}}, {64: 0.2})
    line, points = figure.data
    assert list(line.x) == [0.1, 0.4] and list(line.y) == [5.0, 5.3]
    assert list(points.marker.symbol) == ["circle", "circle-open", "square"]
    assert list(points.text) == ["decay 0.1", "decay 0.1", "decay 1"]
    assert "AdamW 5.00" in alt(figure)
