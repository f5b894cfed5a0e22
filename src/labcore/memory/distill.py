"""Distillation: a small model learns what a large one says, not only the label.

The teacher's probabilities at a temperature tell how near the other classes are, and they exist for
data that nobody labelled. Training holds both models, but only the student's gradients, moments
and activations.
Source: Hinton, Vinyals and Dean, 2015, arXiv 1503.02531.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from labcore.checks import positive, positive_int
from labcore.data import digits
from labcore.memory.accounting.breakdown import Breakdown
from labcore.memory.accounting.prediction import MOMENTS, estimate
from labcore.memory.model import CONFIG, batches, fresh, held_out_loss
from labcore.memory.trials import Trial, adamw, trial
from labcore.models.config import LlamaConfig
from labcore.models.llama import Llama
from labcore.models.training import train

__all__ = [
    "STUDENT",
    "DigitsRun",
    "distil_digits",
    "distillation_loss",
    "estimate_distillation",
    "make_student",
    "make_teacher",
    "try_distillation",
]

FLOAT = 4  # bytes
STUDENT = replace(
    CONFIG,
    hidden_size=96,
    intermediate_size=288,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=3,
    head_dim=32,
    initializer_range=96**-0.5,
)
TEMPERATURE, WEIGHT = 2.0, 0.5


def distillation_loss(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor | None = None,
    *,
    temperature: float = TEMPERATURE,
    weight: float = WEIGHT,
) -> Tensor:
    """weight · T² · KL(teacher ‖ student) + (1 − weight) · cross entropy, in nats.

    student, teacher: logits [..., K]; the teacher gets no gradient. labels: integers [...], -100
    where there is none, or None for none at all; the cross entropy is the mean over those that
    there are, and 0 without any. The divergence, of the probabilities at temperature T, is the mean
    over all positions; T² keeps its gradient as large as the labels'. weight: 0 to 1. At least
    fp32. Raises ValueError for shapes that do not fit.
    """
    if student.shape != teacher.shape or student.dim() < 2:
        raise ValueError(
            f"student and teacher must both have shape [..., K], got {tuple(student.shape)} and "
            f"{tuple(teacher.shape)}"
        )
    if labels is not None and labels.shape != student.shape[:-1]:
        raise ValueError(
            f"labels must have shape {tuple(student.shape[:-1])}, got {tuple(labels.shape)}"
        )
    if not 0 <= weight <= 1:
        raise ValueError(f"weight must lie between 0 and 1, got {weight}")
    positive("temperature", temperature)
    ours, theirs = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (student, teacher))
    ours, theirs = ours.flatten(0, -2), theirs.detach().flatten(0, -2)
    loss = F.kl_div(
        (ours / temperature).log_softmax(-1),
        (theirs / temperature).log_softmax(-1),
        log_target=True,
        reduction="batchmean",
    )
    loss = weight * temperature**2 * loss
    if labels is None or weight == 1:
        return loss
    # A mean over no label at all would be NaN.
    given = (labels != -100).sum().clamp(min=1)
    hard = F.cross_entropy(ours, labels.flatten(), ignore_index=-100, reduction="sum") / given
    return loss + (1 - weight) * hard


def make_student(seed: int) -> Llama:
    """A fresh model of half the topic's width and depth."""
    return Llama(STUDENT, generator=torch.Generator().manual_seed(seed))


def make_teacher(seed: int, *, steps: int, batch: int = 8, length: int = 256) -> Llama:
    """The topic's model, trained and then frozen."""
    model = fresh(seed)
    draw = batches(seed, batch=batch, length=length)
    train(model, draw, adamw(model), steps=positive_int("steps", steps), progress=False)
    model.zero_grad()  # or it would keep the gradients of its last step
    return model.requires_grad_(False)


def estimate_distillation(
    student: LlamaConfig, teacher: LlamaConfig, *, batch: int, length: int
) -> Breakdown:
    """Bytes of a step of AdamW in float32: the student's, and what the teacher adds.

    That is its weights and four tensors of the logits' size: the student's logits and the
    teacher's, which the step holds, and the two log-probabilities of the divergence.
    """
    logits = batch * length * student.vocab_size * FLOAT
    weights = estimate(teacher, batch=batch, length=length).parameters
    found = []
    for moment in MOMENTS:
        one = estimate(student, batch=batch, length=length, moment=moment)
        if moment != "step":
            one = replace(one, activations=one.activations + 4 * logits)
        found.append(replace(one, parameters=one.parameters + weights))
    return max(found, key=lambda breakdown: breakdown.total)


def try_distillation(
    seed: int,
    teacher: Llama | None,
    *,
    steps: int,
    temperature: float = TEMPERATURE,
    weight: float = WEIGHT,
    batch: int = 8,
    length: int = 256,
) -> Trial:
    """Train the student on the topic's text, by a teacher or, for None, by the text alone.

    The seed gives the same weights and batches either way. The bytes are those of both models.
    """
    student = make_student(seed)
    optimizer, draw = adamw(student), batches(seed, batch=batch, length=length)
    models = nn.ModuleList([student] if teacher is None else [student, teacher])

    def step(n: int) -> None:
        tokens, _ = draw(n)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        optimizer.zero_grad()
        told = None
        if teacher is not None:  # first, when none of the student's activations stand yet
            with torch.no_grad():
                told = teacher(inputs).logits
        logits = student(inputs).logits
        if told is None:
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        else:
            loss = distillation_loss(logits, told, targets, temperature=temperature, weight=weight)
        loss.backward()
        optimizer.step()

    return trial(models, optimizer, step, steps=steps, loss=lambda: held_out_loss(student))


@dataclass(frozen=True, kw_only=True, slots=True)
class DigitsRun:
    """Accuracies on the test digits: the teacher's, the student's by labels alone, and by both."""

    teacher: float
    alone: float
    distilled: float


def distil_digits(
    seed: int, *, labels: int | None = 80, steps: int = 200, temperature: float = 4.0
) -> DigitsRun:
    """A student that has few labels, alone and with a teacher's word on all training digits.

    labels: how many training digits have one for the student, None for all. The teacher was trained
    on all of them: what the student gains with few labels are the labels that the teacher saw.
    steps: of each model's full-batch Adam. Raises ValueError for more labels than digits.
    """
    data = digits(seed=seed)
    if labels is not None and positive_int("labels", labels) > len(data.train_y):
        raise ValueError(
            f"labels must be at most {len(data.train_y)}, got {labels}; None is for all of them"
        )
    positive_int("steps", steps)
    few = data.train_y.clone()
    few[len(few) if labels is None else labels :] = -100
    known = few != -100
    teacher = _fit(
        _mlp(256, seed),
        data.train_x,
        steps,
        lambda logits: F.cross_entropy(logits, data.train_y),
    )
    with torch.no_grad():
        told = teacher(data.train_x)
    alone = _fit(
        _mlp(32, seed + 1),
        data.train_x[known],
        steps,
        lambda logits: F.cross_entropy(logits, few[known]),
    )
    distilled = _fit(
        _mlp(32, seed + 1),
        data.train_x,
        steps,
        lambda logits: distillation_loss(logits, told, few, temperature=temperature),
    )
    found = {}
    for name, model in (("teacher", teacher), ("alone", alone), ("distilled", distilled)):
        with torch.no_grad():
            guesses = model(data.test_x).argmax(-1)
        found[name] = (guesses == data.test_y).float().mean().item()
    return DigitsRun(**found)


def _mlp(width: int, seed: int) -> nn.Sequential:
    """64 pixels to 10 classes."""
    first, last = nn.Linear(64, width), nn.Linear(width, 10)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in (first, last):
            layer.weight.normal_(0, (2 / layer.in_features) ** 0.5, generator=generator)
            layer.bias.zero_()
    return nn.Sequential(first, nn.ReLU(), last)


def _fit(
    model: nn.Sequential, x: Tensor, steps: int, loss: Callable[[Tensor], Tensor]
) -> nn.Sequential:
    """Full-batch Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(x)).backward()
        optimizer.step()
    return model
