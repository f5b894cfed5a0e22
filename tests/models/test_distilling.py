"""A student learns its teacher's distribution, on the teacher's own words."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from labcore.models import Llama, train
from labcore.models.distilling import Distillation, OwnWords, greedy_agreement, own_words
from labcore.models.states import hidden_states, live_states
from labcore.optim import AdamW
from tests.models.shapes import CONFIGS, model_of

WORDS = OwnWords(rows=70, prompt=5, width=17, temperature=0.7, seed=1, kept=4)


@pytest.fixture
def teacher(generator: torch.Generator) -> Llama:
    return model_of(CONFIGS["tied"], generator)


@pytest.fixture
def corpus(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(37, (300,), generator=generator)


def test_own_words_begin_in_the_corpus_and_every_other_row_is_greedy(
    teacher: Llama, corpus: torch.Tensor, tmp_path: Path
) -> None:
    path = tmp_path / "deep" / "words.safetensors"
    words = own_words(teacher, corpus, path, WORDS, progress=False)
    assert words.shape == (70, 17) and words.dtype == torch.int64
    stretches = {tuple(row) for row in corpus.unfold(0, 5, 1).tolist()}
    assert {tuple(row) for row in words[:, :5].tolist()} <= stretches
    with torch.no_grad():
        logits = teacher(words[:, :-1]).logits[:, 4:]
    gaps = logits.max(-1).values - logits.gather(-1, words[:, 5:, None])[..., 0]
    # 64 rows are continued together, so the rest starts with a greedy row too.
    assert float(gaps[0::2].max()) < 1e-3 < float(gaps[1::2].max())
    other = own_words(model_of(CONFIGS["plain"], torch.Generator()), corpus, path, WORDS)
    assert torch.equal(other, words)  # read from the file


def test_the_loss_is_the_cross_entropy_against_the_teacher(
    teacher: Llama, corpus: torch.Tensor, tmp_path: Path, generator: torch.Generator
) -> None:
    words = own_words(teacher, corpus, tmp_path / "words", WORDS, progress=False)
    states = hidden_states(teacher, words, length=16, ahead=1)
    long = live_states(teacher, corpus, length=24, ahead=1)
    lessons = Distillation([(states, 3), (long, 2)], teacher.embed_tokens.weight, seed=5)
    student = model_of(CONFIGS["grouped"], generator)
    drawn = [lessons.batches(n)[0] for n in range(4)]  # several batches wait for their losses
    for tokens in drawn:
        loss, count = lessons.loss(student, tokens, None)
        with torch.no_grad():
            told = teacher(tokens[:, :-1]).logits.double().softmax(-1)
            wanted = -(told * student(tokens[:, :-1]).logits.double().log_softmax(-1)).sum()
        assert count == (48 if tokens.shape == (3, 17) else 2 * 24)
        assert float(loss.detach()) == pytest.approx(float(wanted), rel=0.02)
    assert [tokens.shape for tokens in drawn] == [(3, 17), (2, 25)] * 2
    assert not torch.equal(drawn[0], drawn[2]) and torch.equal(lessons.batches(0)[0], drawn[0])
    with pytest.raises(ValueError, match="counts must be None"):
        lessons.loss(student, drawn[0], torch.tensor([3, 3, 3]))


def test_a_student_comes_to_agree_with_its_teacher(
    teacher: Llama, corpus: torch.Tensor, tmp_path: Path, generator: torch.Generator
) -> None:
    recipe = dataclasses.replace(WORDS, rows=256)
    words = own_words(teacher, corpus, tmp_path / "words", recipe, progress=False)
    lessons = Distillation(
        [(hidden_states(teacher, words, length=16, ahead=1), 32)],
        teacher.embed_tokens.weight,
        seed=5,
    )
    student = model_of(dataclasses.replace(CONFIGS["tied"], num_hidden_layers=2), generator)
    prompts = words[-8:, :5].tolist()
    before = greedy_agreement(teacher, student, prompts, tokens=12)
    curve = train(
        student,
        lessons.batches,
        AdamW(student.parameters(), lr=1e-2),
        steps=120,
        loss=lessons.loss,
        progress=False,
    )
    assert curve.tokens == [512] * 120
    assert greedy_agreement(teacher, student.eval(), prompts, tokens=12) > before + 0.2
    assert greedy_agreement(teacher, teacher, prompts, tokens=12) == 1.0
    with pytest.raises(ValueError, match="at least one row"):
        greedy_agreement(teacher, student, [])
