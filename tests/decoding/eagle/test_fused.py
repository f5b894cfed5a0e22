"""The fused form: the same features, however a row is read, and the drafts of the head itself."""

from __future__ import annotations

import itertools

import pytest
import torch

from labcore.decoding.eagle import Costs, EagleHead, FusedEagle
from labcore.decoding.eagle.fused import fused_eagle
from tests.decoding.eagle.made import SHAPES, made


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_candidates_are_those_of_the_head_on_their_path(shape, packed, generator) -> None:
    backbone, head = made(shape, generator)
    if packed:
        for parameter in (*backbone.parameters(), *head.parameters()):
            parameter.copy_(parameter.bfloat16())
    fused, width = FusedEagle(head), 11
    assert fused.packed == packed or not packed
    hidden = torch.randn(width, 24, generator=generator)
    tokens = torch.randint(37, (width,), generator=generator).tolist()
    costs, trees = Costs(beam=3, ranks=4, go_on=0.0), 0
    for length in (1, 2, 7, 11):
        memory = fused.new_memory()
        cuts = sorted({0, length, *torch.randint(length + 1, (2,), generator=generator).tolist()})
        for start, end in itertools.pairwise(cuts):
            fused.read(memory, hidden[start:end], tokens[start:end])
        for _ in range(2):  # a draft leaves nothing behind
            grown = fused.draft(memory, costs, depth=4, sharpness=1.3)
            assert memory.length == length and len(grown.levels) == 4
            _check(head, hidden[:length], tokens[:length], grown, 1.3)
        trees += len(set(grown.parents)) > 4
    assert trees


def _check(head: EagleHead, hidden, tokens, grown, sharpness) -> None:
    """Compare the confidences with the head's own along each path, one position after another."""
    for node in range(len(grown.tokens)):
        states, read, chance = hidden[None], list(tokens), 1.0
        for one in reversed(grown.way(node)):
            feature = head(states, torch.tensor([read]))[:, -1:]
            odds = (head.logits(feature[0, 0]) * sharpness).softmax(-1)
            chance *= float(odds[grown.tokens[one]])
            states, read = torch.cat((states, feature), 1), [*read, grown.tokens[one]]
        assert grown.confidence[node] == pytest.approx(chance, abs=1e-4, rel=1e-2)


def test_other_devices_and_dtypes_are_refused(generator) -> None:
    _, head = made("grouped", generator)
    with pytest.raises(ValueError, match="read the row first"):
        fused = FusedEagle(head)
        fused.draft(fused.new_memory(), Costs(), depth=1, sharpness=1.0)
    with pytest.raises(TypeError, match="computes in torch.float32, got torch.float64"):
        FusedEagle(head.double())
    with pytest.raises(ValueError, match="runs on the CPU, got meta"):
        FusedEagle(head.to("meta"))


def test_the_shared_form_follows_the_weights(generator) -> None:
    backbone, head = made("grouped", generator)
    first = fused_eagle(head)
    assert fused_eagle(head) is first
    with torch.no_grad():
        head.norm.weight *= 2
    second = fused_eagle(head)
    assert second is not first
    with torch.no_grad():
        backbone.embed_tokens.weight[3] *= 2
    assert fused_eagle(head) is not second
