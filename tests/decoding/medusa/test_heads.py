"""Medusa heads: what an untrained one says, what is trained, what a file holds."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from labcore.decoding import medusa
from labcore.decoding.medusa import FusedHeads, MedusaHeads, load_heads, save_heads
from labcore.models import Llama, LlamaConfig

SHAPES = [("full", 1), ("low_rank", 2), ("tied", 3)]


def backbone_of(generator: torch.Generator, *, tied: bool = True, **told: int) -> Llama:
    sizes = {
        "vocab_size": 37,
        "hidden_size": 20,
        "intermediate_size": 28,
        "num_hidden_layers": 2,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        **told,
    }
    config = LlamaConfig(tie_word_embeddings=tied, max_position_embeddings=64, **sizes)
    return Llama(config, generator=generator).eval()


def shaken(heads: MedusaHeads, generator: torch.Generator, size: float = 0.3) -> MedusaHeads:
    """Heads as if they had been trained: no parameter is at 0."""
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator).to(parameter)
    return heads


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("projection", "layers"), SHAPES)
def test_an_untrained_head_says_what_the_backbone_says(projection, layers, tied, generator) -> None:
    backbone = backbone_of(generator, tied=tied)
    heads = MedusaHeads(backbone, heads=3, layers=layers, projection=projection, rank=5)
    out = backbone(torch.randint(37, (2, 7), generator=generator))
    torch.testing.assert_close(heads(out.hidden), out.logits.expand(3, -1, -1, -1))


@pytest.mark.parametrize(("projection", "layers"), SHAPES)
def test_every_head_has_parameters_of_its_own(projection, layers, generator) -> None:
    """A change of one head's parameters changes its logits and no other's."""
    heads = MedusaHeads(backbone_of(generator), heads=3, layers=layers, projection=projection)
    hidden = torch.randn(4, 20, generator=generator)
    before = heads(hidden)
    places = {id(parameter) for parameter in heads.parameters()}
    assert len(places) == sum(1 for _ in heads.parameters())
    with torch.no_grad():
        for parameter in heads.blocks[1].parameters():
            parameter += torch.randn(parameter.shape, generator=generator)
    changed = (heads(hidden) - before).abs().amax((1, 2))
    assert changed[1] > 1e-3 and changed[0] == 0 and changed[2] == 0


@pytest.mark.parametrize(("projection", "layers"), SHAPES)
def test_no_gradient_reaches_the_backbone(projection, layers, generator) -> None:
    backbone = backbone_of(generator)
    heads = shaken(MedusaHeads(backbone, layers=layers, projection=projection, rank=3), generator)
    heads(torch.randn(2, 6, 20, generator=generator)).square().sum().backward()
    assert all(parameter.grad is None for parameter in backbone.parameters())
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in heads.parameters())
    own = {id(parameter) for parameter in heads.parameters()}
    assert own.isdisjoint(id(parameter) for parameter in backbone.parameters())
    assert not any("backbone" in name for name in heads.state_dict())


def test_parameters_are_counted_by_hand(generator) -> None:
    backbone, width, vocab = backbone_of(generator), 20, 37

    def count(**told) -> int:
        return sum(p.numel() for p in MedusaHeads(backbone, **told).parameters())

    block = width * width + width
    assert count(heads=3, layers=2, projection="tied") == 3 * 2 * block
    assert count(heads=3, projection="full") == 3 * (block + vocab * width)
    assert count(heads=2, projection="low_rank", rank=7) == 2 * (block + 7 * (vocab + width))


@pytest.mark.parametrize(("projection", "layers"), SHAPES)
@pytest.mark.parametrize("rows", [1, 3])
def test_the_fused_form_says_the_same(projection, layers, rows, generator) -> None:
    """Once with weights that fp16 holds, once with weights that it does not."""
    for rounded in (True, False):
        backbone = backbone_of(generator, hidden_size=80, vocab_size=131, intermediate_size=24)
        heads = shaken(
            MedusaHeads(backbone, heads=3, layers=layers, projection=projection, rank=9), generator
        )
        if rounded:
            for parameter in (*backbone.parameters(), *heads.parameters()):
                parameter.data = parameter.data.bfloat16().float()
        hidden = torch.randn(rows, 80, generator=generator)
        fused = FusedHeads(heads)
        assert fused.packed or not rounded or not torch.backends.quantized.supported_engines
        exact = copy.deepcopy(heads).double()
        exact._backbone = (copy.deepcopy(backbone).double(),)
        found, wanted = fused(hidden).double(), exact(hidden.double()).detach()
        assert found.shape == (3, rows, 131)
        torch.testing.assert_close(fused(hidden, 2), fused(hidden)[:2])
        assert torch.equal(heads(hidden, 2), heads(hidden)[:2])
        torch.testing.assert_close(found, wanted, atol=2e-5 * float(wanted.abs().max()), rtol=0)


def test_the_fused_form_refuses_what_it_cannot_compute(generator) -> None:
    heads = MedusaHeads(backbone_of(generator))
    with pytest.raises(TypeError, match="float32, got torch.bfloat16"):
        FusedHeads(heads.bfloat16())


@pytest.mark.parametrize(("projection", "layers"), SHAPES)
def test_a_file_gives_the_same_heads_back(projection, layers, generator, tmp_path) -> None:
    backbone = backbone_of(generator)
    heads = shaken(MedusaHeads(backbone, layers=layers, projection=projection, rank=3), generator)
    save_heads(heads, tmp_path)
    again = load_heads(tmp_path, backbone)
    for name, tensor in heads.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert (again.layers, again.projection, again.training) == (layers, projection, False)
    assert load_heads(tmp_path, backbone, dtype=torch.bfloat16).blocks[0][
        0
    ].linear.weight.dtype == (torch.bfloat16)
    stored = load_file(tmp_path / "medusa_lm_head.safetensors")
    assert f"3.{layers - 1}.linear.weight" in stored
    if projection == "full":
        assert stored[f"2.{layers}.weight"].shape == (37, 20)


def test_a_wrong_file_is_refused_by_name(generator, tmp_path) -> None:
    backbone = backbone_of(generator)
    with pytest.raises(FileNotFoundError, match=r"medusa_config\.json"):
        load_heads(tmp_path, backbone)
    save_heads(MedusaHeads(backbone, projection="full"), tmp_path)
    with pytest.raises(ValueError, match="hidden_size of 24, got 20"):
        load_heads(
            tmp_path,
            backbone_of(generator, hidden_size=24, num_attention_heads=6, num_key_value_heads=6),
        )
    file = tmp_path / "medusa_lm_head.safetensors"
    tensors = load_file(file)
    save_file({name: t for name, t in tensors.items() if name != "1.1.weight"}, file)
    with pytest.raises(ValueError, match=r"1\.1\.weight"):
        load_heads(tmp_path, backbone)
    save_file({**tensors, "0.1.weight": torch.zeros(37, 21)}, file)
    with pytest.raises(ValueError, match=r"0\.1\.weight"):
        load_heads(tmp_path, backbone)
    told = json.loads((tmp_path / "medusa_config.json").read_text())
    assert told["medusa_num_heads"] == 4


@pytest.mark.parametrize(
    ("told", "match"),
    [
        ({"projection": "shared"}, "projection must be one of"),
        ({"heads": 0}, "heads must be"),
        ({"layers": 0}, "layers must be"),
        ({"projection": "low_rank", "rank": 0}, "rank must be"),
    ],
)
def test_bad_shapes_are_refused(told, match, generator) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        MedusaHeads(backbone_of(generator), **told)


def test_the_package_has_what_it_names() -> None:
    assert all(hasattr(medusa, name) for name in medusa.__all__)
