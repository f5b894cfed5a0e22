"""Distillation: a small model learns a large model's predictions, not only the labels.

The teacher's probabilities at a temperature show how close the other classes are, and they exist
even for unlabeled data. Training holds both models, but gradients, moments and activations only for
the student.
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
    "DistillationRun",
    "distill_digits",
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
    """Return weight · T² · KL(teacher ‖ student) + (1 − weight) · cross entropy, in nats.

    student, teacher: logits [..., K]; the teacher gets no gradient. labels: integers [...], with
    -100 for unlabeled positions, or None for no labels at all. The cross entropy is the mean over
    the labeled positions, or 0 without any. The divergence between the probabilities at temperature
    T is the mean over all positions; T² keeps its gradient as large as the labels'. weight: 0 to 1.
    The loss is at least fp32.
    Raises ValueError for shapes that don't fit.
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
    # Without labels the mean would be NaN.
    given = (labels != -100).sum().clamp(min=1)
    hard = F.cross_entropy(ours, labels.flatten(), ignore_index=-100, reduction="sum") / given
    return loss + (1 - weight) * hard


def make_student(seed: int) -> Llama:
    """Return a fresh model with half the width and depth of the chapter's."""
    return Llama(STUDENT, generator=torch.Generator().manual_seed(seed))


def make_teacher(seed: int, *, steps: int, batch: int = 8, length: int = 256) -> Llama:
    """Train the chapter's model and freeze it."""
    model = fresh(seed)
    draw = batches(seed, batch=batch, length=length)
    train(model, draw, adamw(model), steps=positive_int("steps", steps), progress=False)
    model.zero_grad()  # or it would keep the gradients of its last step
    return model.requires_grad_(False)


def estimate_distillation(
    student: LlamaConfig, teacher: LlamaConfig, *, batch: int, length: int
) -> Breakdown:
    """Predict the bytes of a float32 AdamW step: the student's, plus what the teacher adds.

    The teacher adds its weights and four tensors of the logits' size: the student's and the
    teacher's logits, which the step holds, and the two log-probabilities of the divergence.
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
    """Train the student on the chapter's text, with a teacher or, for None, on the text alone.

    The seed gives the same weights and batches either way. The bytes include both models.
    """
    student = make_student(seed)
    optimizer, draw = adamw(student), batches(seed, batch=batch, length=length)
    models = nn.ModuleList([student] if teacher is None else [student, teacher])

    def step(n: int) -> None:
        tokens, _ = draw(n)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        optimizer.zero_grad()
        told = None
        if teacher is not None:  # first, before the student has activations
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
class DistillationRun:
    """Test accuracies: the teacher's, and the student's from labels alone and with the teacher."""

    teacher: float
    alone: float
    distilled: float


def distill_digits(
    seed: int, *, labels: int | None = 80, steps: int = 200, temperature: float = 4.0
) -> DistillationRun:
    """Train a student with few labels, alone and with a teacher's predictions on all digits.

    labels: how many training digits are labeled for the student; None is all. The teacher is
    trained on all labels: what it gives a student with few comes from labels that only the teacher
    saw.
    steps: of full-batch Adam for each model. Raises ValueError for more labels than digits.
    """
    data = digits(seed=seed)
    if labels is not None and positive_int("labels", labels) > len(data.train_y):
        raise ValueError(
            f"labels must be at most {len(data.train_y)}, got {labels}; pass None for all"
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
    return DistillationRun(**found)


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
    """Train with full-batch Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(x)).backward()
        optimizer.step()
    return model
