"""The capstone: what loss comes of so many weights and tokens, and a whole run by the dial."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.runner import Measurement, case, exact, seen
from labcore.capstone import (
    Choices,
    Corpus,
    Moment,
    Plan,
    Project,
    Speed,
    batch_for,
    held,
    predicted,
    prompts_of,
    read_text,
    scaling_law,
    shape,
    speeds,
    train_model,
)
from labcore.decoding import SamplingConfig, generate
from labcore.models import Llama, bits_per_byte, from_pretrained

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much the cases do. counts: the tokens that a run reads. bytes: of text. minutes: dial."""

    counts: tuple[int, ...] = (2**19, 2**20, 2**21, 2**22)
    bytes: int = 20_000_000
    minutes: float = 10.0


FULL = Sizes()
SMALL = Sizes(counts=(2**12, 2**13), bytes=1_000_000, minutes=0.1)


def _declare_width(width: int, *, minutes: float, runs: int) -> None:
    @case(f"scaling/width {width}", minutes=minutes)
    def _(sizes: Sizes = FULL) -> list[Measurement]:
        return losses_of(width, sizes.counts[:runs], sizes.bytes)


for _width, _minutes, _runs in (
    (32, 2.0, 3),
    (64, 6.0, 4),
    (96, 14.0, 4),
    (128, 12.0, 3),
):
    _declare_width(_width, minutes=_minutes, runs=_runs)


def losses_of(width: int, counts: tuple[int, ...], most: int) -> list[Measurement]:
    """Train a model for each number of tokens, each from the start, and judge it."""
    text, choices = read_text("python", max_bytes=most), Choices()
    found = []
    for tokens in counts:
        accumulate = batch_for(tokens)
        plan = Plan(config=shape(width), accumulate=accumulate, rate=0.5 / width)
        plan = replace(plan, steps=tokens // plan.tokens)
        run = train_model(text, plan, choices)
        bits = bits_per_byte(run.model, text.judged, text.tokenizer)
        told: dict[str, Any] = {
            "weights": plan.weights,
            "tokens": plan.tokens,
            "seed": choices.seed,
        }
        found.append(exact(f"held-out text/{tokens} tokens", "bits per byte", bits, **told))
    return found


@case("dial/10 minutes", minutes=11.0)
def whole_run(sizes: Sizes = FULL) -> list[Measurement]:
    """Do all that the dial pays for, and load the export with transformers."""
    began, moments = time.perf_counter(), list[Moment]()
    with tempfile.TemporaryDirectory() as folder:
        choices = Choices(spike=True)
        project = Project.open(Path(folder) / "model", minutes=sizes.minutes, choices=choices)
        plan, text = project.plan, project.text
        memory = [one(plan, choices).total / MIB for one in (predicted, held)]
        run = project.train(moments.append)
        bits = project.bits_per_byte(run.model)
        head = project.draft(run.model)
        found = speeds(run.model, head, prompts_of(text))
        place = project.export(run, found, {})
        seconds = time.perf_counter() - began
        same = _same_tokens(place, prompts_of(text))
    details: dict[str, Any] = {
        "losses": [round(one.loss, 3) for one in moments],
        "norms": [round(one.norm, 3) for one in moments],
        "seconds": [round(one.seconds, 4) for one in moments],
        "width": plan.config.hidden_size,
        "layers": plan.config.num_hidden_layers,
        "weights": plan.weights,
        "tokens per step": plan.tokens // plan.steps,
        "planned seconds per step": plan.seconds,
        "tokens": plan.tokens,
        "bytes per token": text.bytes_per_token,
        "epochs": plan.tokens / len(text.train),
        "sample": _sample(run.model, text),
        "spikes": [[one.step, *next(iter(one.provenance.items()))] for one in run.spikes],
    }
    return [
        exact(
            "held-out text",
            "bits per byte",
            bits,
            predicted=scaling_law()(plan.weights, plan.tokens),
            **details,
        ),
        exact("memory of a step", "MiB", memory[1], predicted=memory[0]),
        exact("time", "s", seconds, predicted=60 * sizes.minutes),
        *(_decoding(name, one) for name, one in found.items()),
        exact("same tokens as transformers", "share of prompts", same),
    ]


def _decoding(name: str, speed: Speed) -> Measurement:
    told: dict[str, Any] = {
        "over plain": speed.over_plain,
        "per step": speed.per_step,
        "same": speed.same,
    }
    return seen(f"decoding/{name}", "tokens per second", [speed.tokens_per_second], **told)


def _sample(model: Llama, text: Corpus) -> str:
    """Return what the model writes after the beginning of a function, drawn at temperature 0.8."""
    start = "def read(self, path):\n"
    drawn = SamplingConfig(max_tokens=120, temperature=0.8, seed=0)
    found = generate(model, [text.tokenizer.encode(start)], drawn, tokenizer=text.tokenizer)
    return start + (found.texts or [""])[0]


def _same_tokens(place: Path, prompts: list[list[int]]) -> float:
    """Return for which share of the prompts transformers writes the tokens that we write."""
    ours, theirs = from_pretrained(place), AutoModelForCausalLM.from_pretrained(place)
    same = 0
    for prompt in prompts:
        wanted = generate(ours, [prompt], SamplingConfig(max_tokens=32)).tokens[0]
        found = theirs.generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False)
        same += found[0, len(prompt) :].tolist() == wanted
    return same / len(prompts)
