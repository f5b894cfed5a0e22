"""Hidden states: those of each row, kept in a file only for the same text and weights."""

from __future__ import annotations

import pytest
import torch

from labcore.models import Llama, states
from labcore.models.states import hidden_states
from tests.models.shapes import CONFIGS, model_of


def small(generator: torch.Generator) -> Llama:
    return model_of(CONFIGS["tied"], generator)


def text(generator: torch.Generator, size: int = 400) -> torch.Tensor:
    return torch.randint(37, (size,), generator=generator)


def test_states_are_those_of_each_row_by_itself(generator) -> None:
    backbone, tokens = small(generator), text(generator, 151)
    held = hidden_states(backbone, tokens, length=13, ahead=5)
    assert len(held) == (151 - 5) // 13
    for row in (0, 4, len(held) - 1):
        read = tokens[row * 13 : row * 13 + 13]
        hidden, found = held.rows(torch.tensor([row]))
        assert found[0].tolist() == tokens[row * 13 : row * 13 + 18].tolist()
        wanted = backbone(read[None]).hidden.to(torch.bfloat16)
        torch.testing.assert_close(hidden, wanted, atol=0.02, rtol=0.01)
    part = held.part(3, 6)
    assert len(part) == 3 and torch.equal(
        part.rows(torch.tensor([1]))[0], held.rows(torch.tensor([4]))[0]
    )
    live = states.live_states(backbone, tokens, length=13, ahead=5)
    index = torch.tensor([3, 1])
    for one, two in zip(live.rows(index), held.rows(index), strict=True):
        torch.testing.assert_close(one, two, atol=0.02, rtol=0.01)


def test_state_file_is_used_only_for_the_same_text_and_weights(generator, tmp_path) -> None:
    backbone, tokens, path = (
        small(generator),
        text(generator),
        tmp_path / "deep" / "states",
    )
    made = hidden_states(backbone, tokens, length=16, path=path)
    assert path.stat().st_size == 2 * made.hidden.numel()
    again = states._mapped(path, tuple(made.hidden.shape))
    again[0, 0, 0] = 99  # a mark that survives only if nothing is computed anew
    del again
    assert hidden_states(backbone, tokens, length=16, path=path).hidden[0, 0, 0] == 99
    other = tokens.clone()
    other[-1] = (other[-1] + 1) % 37
    rows = states._in_rows(other, 16, 5)
    if not torch.equal(rows, made.tokens):
        assert hidden_states(backbone, other, length=16, path=path).hidden[0, 0, 0] != 99
    hidden_states(backbone, tokens, length=16, path=path).hidden[0, 0, 0] = 99
    with torch.no_grad():
        backbone.norm.weight[0] += 1
    assert hidden_states(backbone, tokens, length=16, path=path).hidden[0, 0, 0] != 99


def test_states_that_were_broken_off_are_made_anew(generator, tmp_path) -> None:
    backbone, tokens, path = (
        small(generator),
        text(generator),
        tmp_path / "states",
    )
    whole = hidden_states(backbone, tokens, length=16, path=path).hidden.clone()
    (tmp_path / "states.json").unlink()
    path.write_bytes(b"\0" * 64)
    assert torch.equal(hidden_states(backbone, tokens, length=16, path=path).hidden, whole)


def test_a_full_disk_is_told_before_anything_is_computed(generator, tmp_path, monkeypatch) -> None:
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(states.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match="live_states"):
        hidden_states(small(generator), text(generator), length=16, path=tmp_path / "x")


def test_a_short_text_is_refused(generator) -> None:
    with pytest.raises(ValueError, match=r"tokens must be .* 16 \+ 5 tokens.* got \(20,\)"):
        hidden_states(small(generator), list(range(20)), length=16)


def test_each_row_comes_once_before_any_comes_again() -> None:
    rows = [states.rows_of_step(step, 4, 10, 3).tolist() for step in range(5)]
    flat = [row for step in rows for row in step]
    assert sorted(flat[:10]) == list(range(10)) and sorted(flat[10:]) == list(range(10))
    assert flat[:10] != flat[10:]
