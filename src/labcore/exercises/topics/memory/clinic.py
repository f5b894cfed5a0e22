"""Diagnose five trainings that run out of memory on one card, by log and error message."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from labcore.exercises.clinic import Clinic, Fault
from labcore.exercises.topics.memory.card import CONTEXT, GIB, Allocator, Card
from labcore.models.config import LlamaConfig
from labcore.models.llama import Llama

__all__ = ["CLINIC", "LINES", "Job", "last_words"]

MODEL = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=11_008,
    num_hidden_layers=4,
    num_attention_heads=32,
    num_key_value_heads=32,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
)
ROWS = 2
LENGTHS = range(1920, 575, -224)  # tokens per row in each step
CHUNK = 512  # tokens whose logits exist at once
PAUSE = 4  # steps between two evaluations
HELD_OUT, HELD_LENGTH = 6, 1024  # batches of one row
RANKS = 3
STEP = ("forward", "backward", "step")
LINES = 1 + sum(
    len(STEP) + (HELD_OUT if number % PAUSE == 0 else 0) for number in range(1, len(LENGTHS) + 1)
)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Call the GPU kernel for causal attention in 16 bits; torch itself chooses by the device."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training on one card; each flag is a fault.

    all_logits: the logits of a whole batch exist at once, in float32. adamw: the optimizer keeps
    two moments per weight instead of one. graphs_kept: an evaluation adds up losses with their
    graphs. short_first: the steps run in reverse order, with the longest rows last. loaded_here:
    the processes of the other cards loaded the checkpoint onto this card.
    """

    all_logits: bool = False
    adamw: bool = False
    graphs_kept: bool = False
    short_first: bool = False
    loaded_here: bool = False

    def run(self) -> Log:
        """Return the log of LINES lines, or of fewer if memory runs out."""
        return _run(self)


@dataclass(kw_only=True, slots=True)
class Log:
    """One line for each part of a step and each batch of an evaluation, in bytes.

    highest: the peak of allocated bytes since the line before. reserved, in_use: the bytes when
    the line is written. message: torch's error message if memory ran out.
    """

    highest: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    in_use: list[int] = field(default_factory=list)
    message: str = ""

    def write(self, memory: Allocator) -> None:
        self.highest.append(memory.highest)
        self.reserved.append(memory.reserved)
        self.in_use.append(memory.in_use)
        memory.highest = memory.allocated


class _Body(Llama):
    """A Llama that leaves its head to the loss."""

    def head(self, hidden: Tensor) -> Tensor:
        """Return the hidden states unchanged."""
        return hidden


def _tokens(rows: int, length: int) -> Tensor:
    return torch.empty(rows, length, dtype=torch.long, device="meta")


def _losses(model: _Body, hidden: Tensor, targets: Tensor, chunk: int) -> Iterator[Tensor]:
    """Yield summed cross entropies of `chunk` tokens at a time, in float32."""
    for states, right in zip(
        hidden.flatten(0, 1).split(chunk), targets.flatten().split(chunk), strict=True
    ):
        logits = F.linear(states, model.embed_tokens.weight).float()
        yield F.cross_entropy(logits, right, reduction="sum")


def _train(job: Job, memory: Allocator, log: Log) -> None:
    model = _Body(MODEL, attention=_attention, device="meta", dtype=torch.bfloat16)
    weights = list(model.parameters())
    optimizer: torch.optim.Optimizer
    if job.adamw:
        optimizer = torch.optim.AdamW(weights, foreach=True)
    else:
        optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9, foreach=True)
    log.write(memory)
    for number, length in enumerate(LENGTHS[::-1] if job.short_first else LENGTHS, 1):
        tokens = _tokens(ROWS, length)
        hidden = model(tokens).hidden
        chunk = tokens.numel() if job.all_logits else CHUNK
        # Each chunk's loss goes back to the hidden states before the next chunk starts.
        front = hidden.detach().requires_grad_()
        for loss in _losses(model, front, tokens, chunk):
            loss.backward()
            del loss
        log.write(memory)
        hidden.backward(front.grad)
        del hidden, front
        log.write(memory)
        optimizer.step()
        optimizer.zero_grad()
        log.write(memory)
        if number % PAUSE == 0:
            _evaluate(job, model, memory, log)


def _evaluate(job: Job, model: _Body, memory: Allocator, log: Log) -> None:
    total = torch.zeros((), device="meta")
    for _ in range(HELD_OUT):
        tokens = _tokens(1, HELD_LENGTH)
        with torch.set_grad_enabled(job.graphs_kept):
            for loss in _losses(model, model(tokens).hidden, tokens, CHUNK):
                total = total + loss
        log.write(memory)


@functools.cache
def _run(job: Job) -> Log:
    weights = 2 * sum(p.numel() for p in Llama(MODEL, device="meta").parameters())
    others = (CONTEXT + weights,) * (RANKS - 1) if job.loaded_here else ()
    memory, log = Allocator(others), Log()
    try:
        with Card(memory):
            _train(job, memory, log)
    except torch.OutOfMemoryError as problem:
        log.message = str(problem)
        log.write(memory)
    return log


def _observe(job: Job) -> dict[str, list[float]]:
    """Return the log's columns in GiB, with NaN for lines that the run did not reach."""
    log = job.run()
    columns = {
        "most allocated since the line before": log.highest,
        "reserved by this process": log.reserved,
        "in use on the card": log.in_use,
    }
    missing = [math.nan] * (LINES - len(log.highest))
    return {title: [one / GIB for one in column] + missing for title, column in columns.items()}


def last_words(student: int = 0) -> dict[str, str]:
    """Return torch's error message for each patient: patient -> message."""
    return {
        label: CLINIC.faults[name].make().run().message
        for label, name in CLINIC.diagnoses(student).items()
    }


CLINIC = Clinic(
    id="memory.clinic",
    points=5,
    healthy=Job,
    faults={
        "an evaluation adds up losses with their graphs": Fault(
            make=functools.partial(Job, graphs_kept=True),
            symptom="training goes as in the healthy run. In the evaluation, where that one needs "
            "next to nothing, each batch adds as much as the one before: what it saved for a "
            "backward that never comes hangs on the sum. Almost all that is reserved is allocated "
            "when the memory ends.",
        ),
        "the logits of a whole batch are computed at once": Fault(
            make=functools.partial(Job, all_logits=True),
            symptom="the first forward is the last, on a card with nothing else on it, and more is "
            "allocated than the healthy run ever has. The request that fails is as large as the "
            "logits of the batch in float32, tokens times vocabulary times 4 bytes; some like it "
            "stand already.",
        ),
        "the optimizer keeps two moments a weight": Fault(
            make=functools.partial(Job, adamw=True),
            symptom="forward and backward of the first step are those of the healthy run to the "
            "byte. The optimizer's first step is the last: there its state is made, twice as large "
            "as in the healthy run, and room is wanted for what the step computes in between.",
        ),
        "the shortest rows come first": Fault(
            make=functools.partial(Job, short_first=True),
            symptom="each forward holds more than the one before, and the error comes with fewer "
            "bytes allocated than the healthy run has had. More is reserved and not allocated than "
            "was asked for: segments as small as the first rows needed, in pieces between tensors "
            "that stay, such as the optimizer's state. Only a segment that is free as a whole goes "
            "back to the driver.",
        ),
        "the other processes loaded the checkpoint onto this card": Fault(
            make=functools.partial(Job, loaded_here=True),
            symptom="what this process allocates and reserves is as in the healthy run, but the "
            "card is fuller by the same amount in every line, also before the first step. The "
            "message counts what other processes have.",
        ),
    },
    observe=_observe,
    axis=range(LINES),
    unit="line of the log",
    explanation="The line that fails is seldom the one that is to blame: each message names only "
    "the last straw. Three questions find the cause. Is the memory this process's own? Is what it "
    "reserved allocated? And in which part of a step does a curve leave the healthy one, once or "
    "with every line? A loss that is added up after its own backward holds next to nothing, as the "
    "backward has let go of what was saved; one that never has a backward keeps all of it. "
    "The remedies differ: `.item()` and `torch.no_grad()`; logits by chunks; another optimizer, or "
    "its state divided or offloaded; the longest rows first, or expandable segments; "
    '`map_location="cpu"` where each process reads its checkpoint.',
)
