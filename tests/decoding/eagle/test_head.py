"""The head: what its unrolled steps see, and what a file holds."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from labcore.decoding.eagle import EagleHead, load_eagle, save_eagle
from tests.decoding.eagle.made import SHAPES, made
from tests.models.shapes import CONFIGS, model_of


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_unrolled_steps_are_what_drafting_would_see(shape, generator) -> None:
    """Step s at position t is a row with the backbone's states, then s features of the head."""
    _, head = made(shape, generator)
    width, steps = 9, 4
    hidden = torch.randn(2, width, 24, generator=generator)
    tokens = torch.randint(37, (2, width), generator=generator)
    unrolled = head.unrolled(hidden, tokens, steps)
    for t in range(steps, width):
        for s in range(steps):
            own = [unrolled[i][:, t - s + i, None] for i in range(s)]
            given = torch.cat((hidden[:, : t - s + 1], *own), 1)
            found = head(given, tokens[:, : t + 1])[:, -1]
            torch.testing.assert_close(unrolled[s][:, t], found, atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_a_pair_sees_its_token_and_nothing_later(generator) -> None:
    _, head = made("grouped", generator)
    hidden = torch.randn(1, 8, 24, generator=generator)
    tokens = torch.randint(36, (1, 8), generator=generator)
    features = head(hidden, tokens)
    tokens[0, 5] += 1
    hidden[0, 6] += 1
    changed = (head(hidden, tokens) - features).abs().amax(-1)[0] > 1e-5
    assert changed.tolist() == [False] * 5 + [True] * 3


def test_only_the_head_is_trained(generator) -> None:
    backbone, head = made("tied", generator)
    assert not {id(p) for p in head.parameters()} & {id(p) for p in backbone.parameters()}
    head.logits(head(torch.ones(1, 3, 24), torch.tensor([[1, 2, 3]]))).sum().backward()
    assert all(parameter.grad is not None for parameter in head.parameters())
    assert all(parameter.grad is None for parameter in backbone.parameters())


def test_biases_are_refused(generator) -> None:
    with pytest.raises(ValueError, match="no attention biases"):
        EagleHead(model_of(CONFIGS["biased"], generator))


def test_a_file_brings_the_head_back(generator, tmp_path) -> None:
    backbone, head = made("grouped", generator)
    head.sharpness = 1.75
    save_eagle(head, tmp_path)
    again = load_eagle(tmp_path, backbone)
    assert again.sharpness == 1.75 and not again.training
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert load_eagle(tmp_path, backbone, dtype=torch.bfloat16).norm.weight.dtype == torch.bfloat16


def test_files_that_do_not_fit_are_refused(generator, tmp_path) -> None:
    backbone, head = made("grouped", generator)
    with pytest.raises(FileNotFoundError, match="save_eagle writes it"):
        load_eagle(tmp_path / "none", backbone)
    save_eagle(head, tmp_path)
    with pytest.raises(ValueError, match="kv_heads of 6, got 2"):
        load_eagle(tmp_path, model_of(CONFIGS["plain"], generator))
    stored = load_file(tmp_path / "model.safetensors")
    for wrong in (
        {name: tensor for name, tensor in stored.items() if name != "q_proj.weight"},
        {**stored, "more": torch.ones(1)},
        {**stored, "norm.weight": torch.ones(3)},
    ):
        save_file(wrong, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match="missing, unexpected or wrongly shaped"):
            load_eagle(tmp_path, backbone)
    assert json.loads((tmp_path / "eagle_config.json").read_text("utf-8"))["kv_heads"] == 2
