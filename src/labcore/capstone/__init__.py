"""Your own language model: from a text and a dial of minutes to a served answer.

Glue over the course's own parts. `python -m labcore.capstone FOLDER` does all of it.
"""

from labcore.capstone.corpus import Corpus, read_text
from labcore.capstone.draft import Speed, prompts_of, speeds, train_draft
from labcore.capstone.plan import (
    WIDTHS,
    Choices,
    Plan,
    batch_for,
    held,
    levers,
    make_plan,
    predicted,
    shape,
    sized,
    step_seconds,
)
from labcore.capstone.project import Project
from labcore.capstone.scaling import ScalingLaw, recorded_runs, scaling_law
from labcore.capstone.training import Moment, Run, train_model

__all__ = [
    "WIDTHS",
    "Choices",
    "Corpus",
    "Moment",
    "Plan",
    "Project",
    "Run",
    "ScalingLaw",
    "Speed",
    "batch_for",
    "held",
    "levers",
    "make_plan",
    "predicted",
    "prompts_of",
    "read_text",
    "recorded_runs",
    "scaling_law",
    "shape",
    "sized",
    "speeds",
    "step_seconds",
    "train_draft",
    "train_model",
]
