"""Distillation: the loss in float64 by hand, its limits; bytes; few labels against all."""

import pytest
import torch

from labcore.memory import distill as module
from labcore.memory.distill import (
    STUDENT,
    distill_digits,
    distillation_loss,
    estimate_distillation,
    make_student,
    make_teacher,
    try_distillation,
)
from labcore.memory.model import CONFIG


def drawn(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of a student and a teacher [2, 5, 7], labels of which some are missing."""
    student = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    teacher = 3 * torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    labels = torch.randint(7, (2, 5), generator=generator)
    labels[0, 1] = labels[1, 4] = -100
    return student.requires_grad_(), teacher, labels


@pytest.mark.parametrize("temperature", [0.7, 1.0, 4.0])
def test_it_is_the_sum_of_its_two_parts(temperature: float, generator) -> None:
    student, teacher, labels = drawn(generator)
    found = distillation_loss(student, teacher, labels, temperature=temperature, weight=0.3)
    p = (teacher / temperature).softmax(-1)
    q = (student / temperature).softmax(-1)
    soft = (p * (p.log() - q.log())).sum(-1).mean() * temperature**2
    log_q = student.softmax(-1).log()
    hard = [-log_q[i, j, labels[i, j]] for i in range(2) for j in range(5) if labels[i, j] >= 0]
    expected = 0.3 * soft + 0.7 * sum(hard) / 8
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    ours, theirs = (torch.autograd.grad(x, student, retain_graph=True) for x in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_student_that_agrees_has_no_loss_and_no_gradient(generator) -> None:
    _, teacher, labels = drawn(generator)
    same = (teacher + 5).requires_grad_()  # logits are known up to a constant
    loss = distillation_loss(same, teacher, labels, weight=1.0)
    loss.backward()
    assert abs(loss.item()) < 1e-12 and same.grad.abs().max() < 1e-12


def test_the_gradient_keeps_its_size_at_high_temperatures(generator) -> None:
    """T² · KL tends to half the squared distance of the centred logits, over K."""
    student, teacher, _ = drawn(generator)
    apart = (student - teacher).detach()
    apart = apart - apart.mean(-1, keepdim=True)
    loss = distillation_loss(student, teacher, temperature=1e5, weight=1.0)
    (gradient,) = torch.autograd.grad(loss, student)
    torch.testing.assert_close(gradient, apart / 7 / 10, rtol=0, atol=1e-4)


def test_the_teacher_gets_no_gradient_and_no_label_is_no_nan(generator) -> None:
    student, teacher, labels = drawn(generator)
    teacher.requires_grad_()
    nothing = torch.full_like(labels, -100)
    with_none = distillation_loss(student, teacher, nothing, weight=0.25)
    with_none.backward()
    assert teacher.grad is None and torch.isfinite(student.grad).all()
    without = distillation_loss(student, teacher, weight=0.25)
    assert with_none.item() == pytest.approx(without.item(), rel=1e-12)


def test_half_precision_is_computed_in_float32(generator) -> None:
    student, teacher, labels = (x.detach() for x in drawn(generator))
    found = distillation_loss(student.half(), teacher.half(), labels)
    exact = distillation_loss(student.half().double(), teacher.half().double(), labels)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_is_refused(generator) -> None:
    student, teacher, labels = drawn(generator)
    with pytest.raises(ValueError, match=r"shape \[..., K\], got \(2, 5, 7\) and \(5, 7\)"):
        distillation_loss(student, teacher[0])
    with pytest.raises(ValueError, match=r"labels must have shape \(2, 5\), got \(5,\)"):
        distillation_loss(student, teacher, labels[0])
    with pytest.raises(ValueError, match=r"labels must have shape \(2, 5\), got \(5,\)"):
        distillation_loss(student, teacher, labels[0], weight=1.0)
    with pytest.raises(ValueError, match=r"weight must lie between 0 and 1, got 1\.5"):
        distillation_loss(student, teacher, weight=1.5)
    with pytest.raises(ValueError, match="temperature must be a finite number above 0"):
        distillation_loss(student, teacher, temperature=0)
    with pytest.raises(ValueError, match="labels must be at most 1438, got 2000"):
        distill_digits(0, labels=2000)
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        distill_digits(0, steps=0)


def test_the_student_is_half_as_wide_and_deep() -> None:
    assert 2 * STUDENT.hidden_size == CONFIG.hidden_size
    assert 2 * STUDENT.num_hidden_layers == CONFIG.num_hidden_layers
    size = sum(p.numel() for p in make_student(0).parameters())
    assert size == 2 * 256 * 96 + 2 * (4 * 96 * 96 + 3 * 96 * 288 + 2 * 96) + 96


def test_bytes_are_those_of_both_models(seed: int, monkeypatch) -> None:
    monkeypatch.setattr(module, "held_out_loss", lambda model: 1.0)
    teacher = make_teacher(seed, steps=1, batch=1, length=8)
    assert not any(weight.requires_grad for weight in teacher.parameters())
    before = {name: weight.clone() for name, weight in teacher.state_dict().items()}
    found = try_distillation(seed, teacher, steps=1, batch=4, length=100)
    predicted = estimate_distillation(STUDENT, CONFIG, batch=4, length=100)
    assert found.peak.total == pytest.approx(predicted.total, rel=0.05)
    assert found.most.parameters == predicted.parameters
    assert found.most.gradients == sum(p.numel() for p in make_student(0).parameters()) * 4
    assert all(torch.equal(w, before[name]) for name, w in teacher.state_dict().items())
    alone = try_distillation(seed, None, steps=1, batch=4, length=100)
    assert alone.most.parameters == alone.most.gradients < found.most.parameters


def test_few_labels_gain_from_a_teacher_who_saw_all(seed: int) -> None:
    """With 30 labels the gain is 0.24 on average, and 0.056 its spread from seed to seed."""
    found = [distill_digits(seed + more, labels=30) for more in range(2)]
    assert sum(one.distilled - one.alone for one in found) > 0  # six times the spread of the sum
    assert min(one.teacher for one in found) > 0.9
