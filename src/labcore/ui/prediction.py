"""predict(): ask for a guess before a measurement, and show both side by side afterwards."""

from __future__ import annotations

import hashlib
import html
import math
from typing import Any

import ipywidgets as widgets

from labcore import device
from labcore.ui.hosts import Displayed, view

__all__ = ["Prediction", "Reveal", "predict"]


def predict(question: str, *, unit: str = "") -> Prediction:
    """Ask the reader to guess a number. End a cell with it to display it.

    `reveal` shows the guess beside the measurement; running all cells never waits for a guess.
    Raises ValueError for an empty question.
    """
    return Prediction(question, unit=unit)


class Prediction(Displayed):
    """A question with the reader's guess; guess is None until one is entered."""

    def __init__(self, question: str, *, unit: str = "") -> None:
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"question must be a sentence, got {question!r}")
        self.question = " ".join(question.split())
        self.unit = unit
        self.guess: float | None = None
        self._reveals: list[Reveal] = []
        self._live: _Form | None = None

    def reveal(self, measured: float, *, digits: int = 3, computed: bool = False) -> Reveal:
        """Show the guess beside `measured`, in this prediction's unit, and the factor between them.

        digits: significant digits shown. computed: say that the number was computed from a formula,
        not measured. Raises ValueError unless measured is a finite number.
        """
        shown = Reveal(self, measured, digits=digits, computed=computed)
        self._reveals.append(shown)
        return shown

    def record(self, guess: float) -> None:
        """Store `guess` as the reader's, and update what is already revealed."""
        if not math.isfinite(guess):
            raise ValueError(f"a guess must be a finite number, got {guess}")
        self.guess = float(guess)
        for shown in self._reveals:
            shown.refresh()

    @property
    def live(self) -> _Form:
        """The number field and its button, made on first use."""
        if self._live is None:
            self._live = _Form(self)
        return self._live

    @property
    def key(self) -> str:
        """Return what names the question on its page."""
        return hashlib.sha256(self.question.encode()).hexdigest()[:10]

    def _form(self) -> str:
        """Return the question for a page, whose script keeps the guess in the browser."""
        question, unit = html.escape(self.question), html.escape(self.unit)
        return (
            f'<form class="labcore-html labcore-predict" data-predict="{self.key}">'
            f"<strong>Predict.</strong> {question}"
            "<p hidden><label>Your guess "
            f'<input type="number" step="any" autocomplete="off"></label> {unit} '
            '<button>Keep this guess</button> <span role="status"></span></p></form>'
        )

    def _repr_mimebundle_(self, **_wanted: Any) -> dict[str, Any]:
        unit = f" (in {self.unit})" if self.unit else ""
        plain = f"Predict: {self.question}{unit}"
        if device.building_book():
            return {
                "text/html": self._form(),
                "text/plain": plain,
            }
        return view(self.live.box, plain)


class _Form:
    """Question, number field, button and acknowledgement."""

    def __init__(self, prediction: Prediction) -> None:
        self._prediction = prediction
        self.number = widgets.Text(  # a FloatText would begin with 0, a guess that nobody made
            placeholder="a number",
            description="Your guess",
            style={"description_width": "initial"},
            layout={"width": "14rem"},
        )
        self.button = widgets.Button(description="Keep this guess")
        self.answer = widgets.HTML()
        self.button.on_click(self._keep)
        unit = widgets.HTML(html.escape(prediction.unit))
        self.box = widgets.VBox(
            [
                widgets.HTML(f"<strong>Predict.</strong> {html.escape(prediction.question)}"),
                widgets.HBox([self.number, unit, self.button]),
                self.answer,
            ]
        )

    def _keep(self, _button: Any) -> None:
        try:
            self._prediction.record(float(self.number.value.strip().replace(",", "")))
        except ValueError:
            said = f"a guess must be a finite number such as 0.25, got {self.number.value!r}"
            self.answer.value = html.escape(said)
            return
        kept = f"{self._prediction.guess:g} {self._prediction.unit}".strip()
        self.answer.value = f"Kept: {html.escape(kept)}. Go on to the measurement."


class Reveal(Displayed):
    """The measurement, with the guess if there is one."""

    def __init__(
        self,
        prediction: Prediction,
        measured: float,
        *,
        digits: int = 3,
        computed: bool = False,
    ) -> None:
        if isinstance(measured, bool) or not math.isfinite(measured):
            raise ValueError(f"measured must be a finite number, got {measured!r}")
        if not isinstance(digits, int) or digits < 1:
            raise ValueError(f"digits must be a whole number of at least 1, got {digits!r}")
        self.prediction = prediction
        self.measured = float(measured)
        self._digits = digits
        self._found, self._thing = (
            ("Computed", "number") if computed else ("Measured", "measurement")
        )
        self._live: widgets.HTML | None = None

    def _number(self, value: float) -> str:
        text = f"{value:.{self._digits}g}"
        if "e" in text and 1e-4 < abs(value) < 1e7:
            text = f"{float(text):,.0f}"
        return f"{text} {self.prediction.unit}".strip()

    def sentence(self) -> str:
        """Return the measurement in words; with a guess, also the guess and the factor between."""
        measured = f"{self._found}: {self._number(self.measured)}."
        guess = self.prediction.guess
        if guess is None:
            return measured
        line = f"You said {self._number(guess)}. {measured}"
        if guess == self.measured:
            return f"{line} The same."
        if guess * self.measured > 0:
            factor = max(guess / self.measured, self.measured / guess)
            side = "above" if abs(guess) > abs(self.measured) else "below"
            return f"{line} Your guess was {side} by a factor of {factor:.3g}."
        return f"{line} Your guess was off by {self._number(abs(guess - self.measured))}."

    def markup(self) -> str:
        """Return HTML: open after a guess, else folded so that the reader can still guess."""
        line = html.escape(self.sentence())
        if self.prediction.guess is not None:
            return f'<div class="labcore-html labcore-reveal" role="status">{line}</div>'
        question = html.escape(self.prediction.question)
        return (
            '<details class="labcore-html labcore-reveal" '
            f'data-reveal="{self.prediction.key}" data-measured="{self.measured!r}" '
            f'data-unit="{html.escape(self.prediction.unit)}"><summary>Make your guess, then '
            f"reveal the {self._thing}: {question}</summary>"
            f'<p>{line} <span role="status"></span></p></details>'
        )

    def refresh(self) -> None:
        """Update the displayed text to the guess."""
        if self._live is not None:
            self._live.value = self.markup()

    def _repr_mimebundle_(self, **_wanted: Any) -> dict[str, Any]:
        if device.building_book():
            return {"text/html": self.markup(), "text/plain": self.sentence()}
        if self._live is None:
            self._live = widgets.HTML(self.markup())
        return view(self._live, self.sentence())
