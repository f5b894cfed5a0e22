"""A model's fused form is shared while the model stays the same, and made again after a change."""

from __future__ import annotations

import copy
import gc
import random
import weakref

import pytest
import torch
from torch import Tensor, nn

from labcore.models import Llama, save_pretrained
from labcore.models.checkpoint import from_pretrained
from labcore.models.forms import fused_form, why_not_fused
from tests.models.shapes import CONFIGS, model_of, tokens_of

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(params=["grouped", "tied", "biased"])
def model(request, generator: torch.Generator) -> Llama:
    return model_of(CONFIGS[request.param], generator)


def agrees(model: Llama) -> bool:
    """Whether the shared form gives the logits that the model gives now."""
    form = fused_form(model)
    tokens = tokens_of(model.config, (1, 9), torch.Generator().manual_seed(4))
    logits = form(tokens, cache=form.new_cache(1, 9)).logits
    with torch.no_grad():
        return torch.allclose(logits, model(tokens).logits, **CLOSE)


def trained(model: Llama) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    logits = model(torch.arange(9)[None]).logits
    nn.functional.cross_entropy(logits[0, :-1], torch.arange(1, 9)).backward()
    optimizer.step()


def written_uncounted(model: Llama) -> None:
    one = random.choice(list(model.parameters()))
    one.data.view(-1)[random.randrange(one.numel())] += 1  # PyTorch counts no such change


def swapped_uncounted(model: Llama) -> None:
    """A permutation, which keeps every sum."""
    weight = model.layers[1].mlp.down_proj.weight
    weight.data = weight.data.flip(0)


def replaced(model: Llama) -> None:
    old: nn.Linear = model.layers[2].self_attn.v_proj
    model.layers[2].self_attn.v_proj = nn.Linear(
        old.in_features, old.out_features, bias=old.bias is not None
    )


@torch.inference_mode()
def written_in_inference(model: Llama) -> None:
    model.norm.weight.mul_(-1)


def loaded(model: Llama) -> None:
    other = model_of(model.config, torch.Generator().manual_seed(1))
    model.load_state_dict(other.state_dict())


CHANGES = [
    trained,
    written_uncounted,
    swapped_uncounted,
    replaced,
    written_in_inference,
    loaded,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_has_another_form(model: Llama, change, seed: int) -> None:
    random.seed(seed)
    first = fused_form(model)
    assert first is not None and fused_form(model) is first and agrees(model)
    change(model)
    assert fused_form(model) is not first and agrees(model)
    assert fused_form(model) is fused_form(model)


def test_a_tiny_change_that_pytorch_counts_is_seen(model: Llama) -> None:
    first = fused_form(model)
    with torch.no_grad():
        model.norm.weight[0] = torch.nextafter(model.norm.weight[0], torch.tensor(9.0))
    assert fused_form(model) is not first


def test_weights_without_a_version_are_watched_too(generator, tmp_path) -> None:
    save_pretrained(model_of(CONFIGS["plain"], generator), tmp_path)
    with torch.inference_mode():
        model = from_pretrained(tmp_path)
        assert model.norm.weight.is_inference()
        first = fused_form(model)
        assert first is not None and fused_form(model) is first
        model.norm.weight.mul_(2)
        assert fused_form(model) is not first and agrees(model)


def test_training_mode_changes_nothing(model: Llama) -> None:
    form = fused_form(model.eval())
    assert fused_form(model.train()) is form and agrees(model)


def test_a_copy_has_its_own_form(model: Llama) -> None:
    form = fused_form(model)
    other = copy.deepcopy(model)
    assert fused_form(other) is not form
    with torch.no_grad():
        other.norm.weight.zero_()
    assert agrees(other) and fused_form(model) is form


def test_the_form_of_a_deleted_model_is_freed(generator) -> None:
    model = model_of(CONFIGS["plain"], generator)
    before = weakref.ref(fused_form(model))
    trained(model)
    form = weakref.ref(fused_form(model))
    gc.collect()
    assert before() is None and form() is not None
    del model
    gc.collect()
    assert form() is None


class Halves(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def test_why_a_model_has_no_fused_form(model: Llama) -> None:
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert why_not_fused(model) == "" and fused_form(model, most=weights) is not None
    assert fused_form(model, most=weights - 1) is None
    assert fused_form(model, most=None) is fused_form(model)
    assert "torch.float64" in why_not_fused(copy.deepcopy(model).double())
    assert "on meta" in why_not_fused(copy.deepcopy(model).to("meta"))
    hook = model.layers[1].register_forward_hook(lambda *_: None)
    assert why_not_fused(model) == "layers.1 has hooks" and fused_form(model) is None
    hook.remove()
    model.norm.forward = lambda x: x  # type: ignore[method-assign]
    assert why_not_fused(model) == "norm has a forward of its own"
    del model.norm.forward
    assert why_not_fused(model) == ""
    layer = model.layers.pop(2)
    assert why_not_fused(model) == "it has 2 layers, its config says 3"
    model.layers.append(layer)
    proj: nn.Linear = model.layers[0].self_attn.o_proj
    model.layers[0].self_attn.o_proj = Halves(proj.in_features, proj.out_features, bias=False)
    assert "o_proj is a Halves" in why_not_fused(model) and fused_form(model) is None


class Louder(Llama):
    def head(self, hidden: Tensor) -> Tensor:
        return 2 * super().head(hidden)


def test_a_subclass_has_no_fused_form() -> None:
    assert why_not_fused(Louder(CONFIGS["plain"])) == "the model is a Louder"
