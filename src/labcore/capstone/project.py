"""A reader's model in a folder: what was decided, trained and measured, and its export.

A stopped run goes on where it was. The text and the plan are kept, both trainings resume from their
checkpoints, and what is trained isn't trained again.
"""

from __future__ import annotations

import io
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import labcore
from labcore.capstone.corpus import Corpus, read_text
from labcore.capstone.draft import Speed, prompts_of, speeds, steps_within, train_draft
from labcore.capstone.plan import LENGTH, Choices, Plan, make_plan
from labcore.capstone.training import Moment, Run, train_model
from labcore.checks import positive
from labcore.decoding.eagle import EagleHead
from labcore.device import hardware
from labcore.models import Llama, LlamaConfig, Tokenizer, bits_per_byte, save_pretrained
from labcore.models.recipes import END_OF_TEXT
from labcore.models.shipped import card_table, write_card
from labcore.shuffling import Spike

__all__ = ["Project"]

BYTES = range(4_000_000, 20_000_000)  # of text, at least and at most
BYTES_PER_MINUTE = 2_000_000
CLOSING = 8.0  # seconds for starting, measuring and exporting, if the dial has three times as many
STARTED = {"text.pt", "text.pt.part", "plan.json.part", "tokenizer.json", "tokenizer_config.json"}
LOADING = "`transformers.AutoModelForCausalLM.from_pretrained` reads this folder."
LEAST = 2 * (LENGTH + 8)  # held-out tokens that the draft and its measurements need


@dataclass(kw_only=True, slots=True, eq=False)
class Project:
    """A model in the making. Make it with `Project.open`.

    folder: where it lives. asked: what was asked for. text: what it learns. plan, choices: how.
    ends: when the draft should be trained, by `time.perf_counter`; None after an interruption.
    """

    folder: Path
    asked: dict[str, Any]
    text: Corpus
    plan: Plan
    choices: Choices
    ends: float | None = None

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        minutes: float = 10.0,
        text: str = "python",
        choices: Choices | None = None,
        memory: int | None = None,
    ) -> Project:
        """Plan a model in a new or empty folder, or go on with the one that is there.

        minutes, memory, choices: as in `make_plan`. text: as in `read_text`.
        Raises ValueError if the folder holds a model of other decisions, or other files; OSError if
        it can't be written.
        """
        began, total = time.perf_counter(), 60 * positive("minutes", minutes)
        folder, choices = Path(folder), Choices() if choices is None else choices
        asked = {"minutes": minutes, "text": str(text), "memory": memory, **asdict(choices)}
        if (folder / "plan.json").is_file():
            plan = _resumed(folder, asked)
            return cls(folder=folder, asked=asked, text=_load(folder), plan=plan, choices=choices)
        _check_folder(folder)
        wanted = min(max(int(minutes * BYTES_PER_MINUTE), BYTES.start), BYTES.stop)
        found = read_text(str(text), max_bytes=wanted)
        least = min(len(found.train), len(found.held_out))
        if least < LEAST:
            raise ValueError(
                f"text must have at least {LEAST} tokens to learn from and as many held out, got "
                f"{least}; add files to it"
            )
        ends = began + total - min(CLOSING, total / 3)
        plan = make_plan(max(ends - time.perf_counter(), total / 3), choices, memory=memory)
        folder.mkdir(parents=True, exist_ok=True)
        _save(found, folder)
        _whole(folder / "plan.json", {"asked": asked, "plan": asdict(plan)})  # the last
        return cls(folder=folder, asked=asked, text=found, plan=plan, choices=choices, ends=ends)

    def train(self, watch: Callable[[Moment], None] = lambda _: None) -> Run:
        """Train the model, or go on with it; see `train_model`."""
        checkpoint = self.folder / "training.pt"
        return train_model(self.text, self.plan, self.choices, checkpoint=checkpoint, watch=watch)

    def draft(self, model: Llama) -> EagleHead:
        """Train a draft head for the trained model, or go on with it."""
        place = self.folder / "draft.json"
        if not place.is_file():
            seconds = self.plan.draft_seconds
            if self.ends is not None:
                seconds = max(self.ends - time.perf_counter(), seconds / 3)
            steps = steps_within(model, self.text, seconds=seconds)
            _whole(place, {"steps": steps})
        steps = json.loads(place.read_text("utf-8"))["steps"]
        return train_draft(model, self.text, steps=steps, checkpoint=self.folder / "draft.pt")

    def speeds(self, model: Llama, head: EagleHead) -> dict[str, Speed]:
        """Return what each draft brings; see `draft.speeds`. It's measured once."""
        place = self.folder / "speeds.json"
        if not place.is_file():
            found = speeds(model, head, prompts_of(self.text))
            _whole(place, {name: asdict(one) for name, one in found.items()})
        told = json.loads(place.read_text("utf-8"))
        return {name: Speed(**one) for name, one in told.items()}

    def bits_per_byte(self, model: Llama) -> float:
        """Return the bits that the model needs for a byte of files that it hasn't read."""
        return bits_per_byte(model, self.text.judged, self.text.tokenizer)

    def export(self, run: Run, found: Mapping[str, Speed], measured: Mapping[str, Any]) -> Path:
        """Write the model as transformers reads it, with a card, once; return the folder.

        measured: what else the card tells, by name.
        """
        place = self.folder / "model"
        if (place / "README.md").is_file():  # the last
            return place
        place.mkdir(exist_ok=True)
        save_pretrained(run.model, place)
        self.text.tokenizer.save(place, end=END_OF_TEXT, length=self.plan.length)
        told = {
            "made on": hardware().name,
            "date": datetime.now(UTC).date().isoformat(),
            "with": f"labcore {labcore.__version__}, torch {torch.__version__}, "
            f"Python {platform.python_version()}",
            **{f"decided: {name}": value for name, value in self.asked.items()},
            "text": self.text.name,
            "weights": self.plan.weights,
            "tokens read": self.plan.tokens,
            "steps": self.plan.steps,
            "training loss of the last step, nats per token": round(run.curve.losses[-1], 3),
            "spikes of the loss": "; ".join(map(_told, run.spikes)) or "none",
            **measured,
            **{
                f"tokens per second on the CPU, {name}": round(one.tokens_per_second, 1)
                for name, one in found.items()
            },
        }
        text = f"# {self.folder.resolve().name}\n\n{card_table(told)}\n\n{LOADING}\n"
        write_card(place, told, text)
        return place


def _told(spike: Spike) -> str:
    (source, rows), *_ = spike.provenance.items()
    return f"step {spike.step + 1}, {rows} of {sum(spike.provenance.values())} rows from {source}"


def _check_folder(folder: Path) -> None:
    """Refuse what can't be written, and a folder with other files than a killed start left."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set[str]()
    ours = STARTED if {"text.pt", "text.pt.part"} & names else set[str]()
    if folder.is_file() or any(name[0] != "." and name not in ours for name in names):
        raise ValueError(f"folder must be new, empty or one that a capstone began, got {folder}")
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(above, os.W_OK):
        raise PermissionError(f"folder must be writable, got {folder}; choose another")


def _resumed(folder: Path, asked: Mapping[str, Any]) -> Plan:
    """Return the plan in a folder, if the same was asked."""
    told = json.loads((folder / "plan.json").read_text("utf-8"))
    if not {"asked", "plan"} <= told.keys():
        raise ValueError(f"folder must be new, empty or one that a capstone began, got {folder}")
    for name, value in asked.items():
        if (planned := told["asked"].get(name)) != value:
            unit = " bytes" if name == "memory" else ""
            raise ValueError(
                f"{name} must be {planned!r}{unit} to go on with the model in {folder}, got "
                f"{value!r}; choose another folder for another model"
            )
    ends = tuple(told["plan"]["config"]["eos_token_ids"])
    config = LlamaConfig(**{**told["plan"]["config"], "eos_token_ids": ends})
    return Plan(**{**told["plan"], "config": config})


def _save(text: Corpus, folder: Path) -> None:
    """Keep the text as it was read: its files may change before the model is finished."""
    names = ("name", "train", "held_out", "files", "starts")
    buffer = io.BytesIO()
    torch.save({name: getattr(text, name) for name in names}, buffer)
    _whole(folder / "text.pt", buffer.getvalue())
    text.tokenizer.save(folder, end=END_OF_TEXT, length=LENGTH)


def _load(folder: Path) -> Corpus:
    told = torch.load(folder / "text.pt", weights_only=True)
    return Corpus(tokenizer=Tokenizer.from_pretrained(folder), **told)


def _whole(path: Path, told: Mapping[str, Any] | bytes) -> None:
    """Write a file whole or not at all."""
    beside = path.with_name(f"{path.name}.part")
    with open(beside, "wb") as file:
        file.write(told if isinstance(told, bytes) else json.dumps(told, indent=2).encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
