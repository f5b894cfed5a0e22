"""A clinic's figure shows each patient beside the healthy one, and says its numbers in words."""

import math

import pytest

from labcore.exercises.topics.adamw_epsilon import CLINIC as EPSILON
from labcore.exercises.topics.lion import CLINIC
from labcore.ui.figures.clinic import curves


def test_each_row_is_a_patient_and_each_column_a_panel() -> None:
    patients = CLINIC.patients(3)
    figure = curves(patients)
    panels = list(patients["healthy"])
    ill = [name for name in patients if name != "healthy"]
    drawn = {(trace.name, trace.xaxis, trace.yaxis): trace for trace in figure.data}
    assert len(drawn) == len(figure.data) == 2 * len(ill) * len(panels)
    by_cell = iter(figure.data)
    for name in ill:
        for panel in panels:
            healthy, patient = next(by_cell), next(by_cell)
            assert (healthy.name, patient.name) == ("healthy", "patient")
            assert (healthy.xaxis, healthy.yaxis) == (patient.xaxis, patient.yaxis)
            assert list(healthy.y) == list(patients["healthy"][panel])
            assert list(patient.y) == list(patients[name][panel])
    titles = [note.text for note in figure.layout.annotations]
    names = [f"<b>{name}</b>" for name in ill]
    assert [title.replace("<br>", " ") for title in titles] == [*panels, *names]
    left = [note for note in figure.layout.annotations if note.text in names]
    assert all(note.x == 0 and -note.xshift <= figure.layout.margin.l for note in left)
    assert [note.y for note in left] == sorted((note.y for note in left), reverse=True)
    assert sum(trace.showlegend for trace in figure.data) == 2


def test_the_figure_does_not_tell_the_diagnosis() -> None:
    text = curves(CLINIC.patients()).to_json()
    assert not any(name in text for name in CLINIC.faults)


def test_a_curve_that_turns_nan_has_a_gap_and_the_words_say_so() -> None:
    figure = curves({"healthy": {"loss": [1.0, 0.5, 0.25]}, "A": {"loss": [1.0, math.nan, 3.0]}})
    assert list(figure.data[1].y) == [1.0, None, 3.0]
    assert "A, loss: 1, 1, nan, nan, 3" in figure.layout.meta["alt"]


def test_rows_share_an_axis_unless_one_is_out_of_all_proportion() -> None:
    healthy, near, far = [0.0, 1.0], [0.0, -3.0], [0.0, 1e6]
    figure = curves({"healthy": {"x": healthy, "y": healthy}, "A": {"x": near, "y": far}})
    assert figure.layout.yaxis.matches == "y" and figure.layout.yaxis2.matches is None
    panels = CLINIC.patients()["healthy"]
    wide = curves({"healthy": panels, "A": panels, "B": panels})
    for row in range(2):
        for column, first in enumerate(("y", "y2", "y3"), 1):
            number = 3 * row + column
            axis = wide.layout["yaxis" if number == 1 else f"yaxis{number}"]
            assert axis.matches == first


@pytest.mark.parametrize("names", [["healthy"], ["A"], []])
def test_comparison_needs_a_patient_and_a_healthy_one(names: list[str]) -> None:
    with pytest.raises(ValueError, match="'healthy' and one patient or more"):
        curves({name: {"loss": [1.0]} for name in names})


def test_a_line_never_lies_on_the_edge_of_its_panel() -> None:
    for clinic in (CLINIC, EPSILON):
        for from_zero in (False, True):
            figure = curves(clinic.patients(), from_zero=from_zero)
            for trace in figure.data:
                axis = figure.layout["yaxis" + (trace.yaxis or "y")[1:]]
                low, high = axis.range
                assert low < min(trace.y) and max(trace.y) < high
                assert not from_zero or low < 0 < high
                if axis.matches:
                    assert figure.layout["yaxis" + axis.matches[1:]].range == axis.range


def test_steps_are_counted_and_few_labels_stand_under_a_panel() -> None:
    figure = curves(EPSILON.patients(), clinic=EPSILON, quantity="learning rates")
    assert list(figure.data[0].x) == list(range(20, 3001, 20))
    for axis in figure.select_xaxes():
        assert list(axis.tickvals) == [0, 1500, 3000] and list(axis.range) == [0, 3000]
        assert axis.title.text in (None, "step")
    sizes = [note.font.size for note in figure.layout.annotations]
    assert all(axis.title.font.size < min(sizes) for axis in figure.select_xaxes(row=4))
    titles = [axis.title.text for axis in figure.select_yaxes()]
    assert titles.count("learning rates") == 4
