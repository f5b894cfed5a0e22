"""The mixture of the backbone's and the heads' predictions, against sums by hand."""

import itertools

import pytest
import torch

from labcore.decoding.medusa import MedusaHeads
from labcore.models import Llama, LlamaConfig
from labcore.studies.medusa import mix, predictions


@pytest.fixture
def pair(generator: torch.Generator) -> tuple[Llama, MedusaHeads]:
    config = LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2,
    )  # fmt: skip
    backbone = Llama(config).eval()
    heads = MedusaHeads(backbone, heads=3).eval()
    with torch.no_grad():
        for weight in (*backbone.parameters(), *heads.parameters()):
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.2)
    return backbone, heads


def test_each_predictor_is_read_where_it_stood(pair, generator) -> None:
    backbone, heads = pair
    text = torch.randint(31, (23,), generator=generator).tolist()
    found, row = predictions(backbone, heads, text, length=9), 0
    with torch.no_grad():
        for first in (0, 9):  # the rest of the text is shorter than a row
            hidden = backbone(torch.tensor([text[first : first + 9]])).hidden[0]
            for place in range(4, 9):
                token = text[first + place]
                wanted = [backbone.head(hidden[place - 1]).double().softmax(-1)[token]]
                wanted += [
                    heads.head(i, hidden[place - 2 - i]).double().softmax(-1)[token]
                    for i in range(3)
                ]
                assert found[row].tolist() == pytest.approx([float(x) for x in wanted], rel=1e-4)
                row += 1
    assert row == len(found)


def test_no_other_weights_are_better(generator) -> None:
    chances = torch.rand(400, 3, generator=generator, dtype=torch.float64)
    best = mix(chances, chances)
    assert sum(best.weights) == pytest.approx(1)
    assert best.alone == pytest.approx(float(-chances[:, 0].log().mean()))
    for one, other in itertools.product(torch.linspace(0, 1, 21), repeat=2):
        if one + other <= 1:
            weights = torch.stack([one, other, 1 - one - other]).double()
            assert best.mixed <= float(-(chances @ weights).log().mean()) + 1e-5


def test_a_predictor_that_adds_nothing_gets_no_weight(generator) -> None:
    backbone = torch.rand(500, 1, generator=generator, dtype=torch.float64)
    found = mix(torch.cat([backbone, 0.5 * backbone], 1), torch.cat([backbone] * 2, 1))
    assert found.weights[0] == pytest.approx(1, abs=1e-6)
    assert found.mixed == pytest.approx(found.alone)


def test_rows_that_leave_no_token_are_refused(pair) -> None:
    with pytest.raises(ValueError, match="length must be more than 4"):
        predictions(*pair, [1] * 30, length=4)
    with pytest.raises(ValueError, match="at most the text's 6"):
        predictions(*pair, [1] * 6, length=7)
