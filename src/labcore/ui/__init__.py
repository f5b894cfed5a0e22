"""What a chapter shows: explorers with sliders, predictions, quizzes, tables and tested source."""

try:
    import ipywidgets as _ipywidgets  # noqa: F401
    import plotly as _plotly  # noqa: F401
except ImportError as missing:  # pragma: no cover - needs an environment without the extra
    raise ImportError(
        f"labcore.ui needs {missing.name}; install the notebook extra: pip install 'labcore[labs]'"
    ) from missing

from labcore.ui import hosts, theme
from labcore.ui.boxes import takeaway
from labcore.ui.cards import verdicts
from labcore.ui.controls import Choice, Control, IntSlider, LogSlider, Nodes, Slider, Toggle
from labcore.ui.explorer import Explorer, describe, explore
from labcore.ui.prediction import Prediction, Reveal, predict
from labcore.ui.questions import Question, Quiz, quiz
from labcore.ui.recordings import recorded
from labcore.ui.source import Source, show_file, show_source
from labcore.ui.tables import Table, table

__all__ = [
    "Choice",
    "Control",
    "Explorer",
    "IntSlider",
    "LogSlider",
    "Nodes",
    "Prediction",
    "Question",
    "Quiz",
    "Reveal",
    "Slider",
    "Source",
    "Table",
    "Toggle",
    "describe",
    "explore",
    "predict",
    "quiz",
    "recorded",
    "show_file",
    "show_source",
    "table",
    "takeaway",
    "theme",
    "verdicts",
]

theme.install()
hosts.enable_widgets()
