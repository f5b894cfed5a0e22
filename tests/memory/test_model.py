"""The topic's model: one seed, one model; the loss of a model that knows nothing is known."""

import math

import pytest
import torch

from labcore.data import python_text
from labcore.memory.model import CONFIG, batches, fresh, held_out_loss, held_out_rows


def test_it_has_two_million_parameters() -> None:
    assert sum(p.numel() for p in fresh(0).parameters()) == 2_016_960
    assert CONFIG.num_attention_heads == CONFIG.num_key_value_heads and CONFIG.head_dim == 32


def test_a_seed_gives_one_model_in_every_dtype(seed: int) -> None:
    wide, again, other = fresh(seed), fresh(seed), fresh(seed + 1)
    half = fresh(seed, dtype=torch.bfloat16)
    for name, parameter in wide.named_parameters():
        torch.testing.assert_close(again.get_parameter(name), parameter, rtol=0, atol=0)
        rounded = parameter.to(torch.bfloat16)
        torch.testing.assert_close(half.get_parameter(name), rounded, rtol=0, atol=0)
    assert not torch.equal(wide.lm_head.weight, other.lm_head.weight)


def test_batches_come_from_their_seed_and_number(seed: int) -> None:
    draw = batches(seed, batch=3, length=17)
    tokens, counts = draw(5)
    assert tokens.shape == (3, 18) and counts is None
    assert tokens.min() >= 0 and tokens.max() < CONFIG.vocab_size
    torch.testing.assert_close(batches(seed, batch=3, length=17)(5)[0], tokens)
    assert not torch.equal(draw(6)[0], tokens)


def test_the_held_out_windows_stay_and_are_not_trained_on() -> None:
    rows = held_out_rows(8)
    assert rows.shape == (8, 257) and torch.equal(rows, held_out_rows(8))
    read = python_text("train", max_bytes=1_000_000).text.encode()
    known = [bytes(row.tolist()) in read for row in rows]
    assert sum(known) <= 1  # two files may say the same
    with pytest.raises(ValueError, match="rows must be at least 1"):
        held_out_rows(0)


def test_loss_with_a_zeroed_head_is_that_of_256_equal_bytes(seed: int) -> None:
    model = fresh(seed)
    torch.nn.init.zeros_(model.lm_head.weight)
    # 8,192 equal terms are summed in float32: 2⁻²⁴ each time, at most 5e-4 of the sum.
    assert held_out_loss(model) == pytest.approx(math.log(256), rel=5e-4)
