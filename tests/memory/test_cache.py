"""The bytes of a KV cache, and the requests that fit next to the weights."""

from __future__ import annotations

import random

import pytest
import torch

from labcore.memory import Meter
from labcore.memory.cache import WEIGHTS, kv_bytes, serving_room
from labcore.models import DenseCache, Llama, LlamaConfig
from labcore.models.cache import KV_DTYPES

LLAMA_3_8B = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8,
)  # fmt: skip
SMALL = LlamaConfig(
    vocab_size=50, hidden_size=24, intermediate_size=64, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip


def test_a_token_of_llama_3_8b_takes_128_kib_and_a_context_of_128_k_tokens_16_gib() -> None:
    assert kv_bytes(LLAMA_3_8B, 1) == 2 * 32 * 8 * 128 * 2 == 131_072
    assert kv_bytes(LLAMA_3_8B, 131_072) == 16 * 2**30


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_a_dense_cache_takes_the_bytes_of_the_formula(kind: str) -> None:
    cache = DenseCache(SMALL, batch=2, capacity=12, dtype=KV_DTYPES[kind])
    found = sum(x.untyped_storage().nbytes() for x in (*cache._keys, *cache._values))
    assert found == 2 * kv_bytes(SMALL, 13, dtype=kind)  # one slot is for padding


def test_pages_round_up_and_devices_divide_heads() -> None:
    one = kv_bytes(SMALL, 1)
    assert kv_bytes(SMALL, 17, page=16) == kv_bytes(SMALL, 32) == 32 * one
    assert kv_bytes(SMALL, 1, devices=2) == kv_bytes(SMALL, 1, devices=64) == one / 2
    assert kv_bytes(SMALL, 7, dtype="float8") == kv_bytes(SMALL, 7, dtype="int8")
    assert kv_bytes(SMALL, 7, dtype="int8") == 7 * one * (6 + 4) / 12  # 6 codes and a scale


def test_the_average_request_wastes_half_a_page(seed: int) -> None:
    chance = random.Random(seed)
    lengths = [chance.randint(1, 12 * 256) for _ in range(20_000)]  # whole pages
    average = sum(lengths) / len(lengths)
    for page in (1, 16, 64, 256):
        held = [kv_bytes(SMALL, length, page=page) / kv_bytes(SMALL, 1) for length in lengths]
        taken = sum(held) / len(held)
        # The waste is uniform over 0 … page - 1; 6 standard errors.
        assert taken - average == pytest.approx((page - 1) / 2, abs=6 * page / (12 * 2e4) ** 0.5)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_room_is_what_weights_and_a_step_leave(weights: str) -> None:
    room = serving_room(LLAMA_3_8B, 80 * 10**9, context=8000, weights=weights, page=64)
    assert room.weights + room.step + room.cache == 80 * 10**9
    assert room.request == kv_bytes(LLAMA_3_8B, 8000, page=64)
    assert room.requests * room.request <= room.cache < (room.requests + 1) * room.request
    if weights == "bfloat16":
        with torch.device("meta"):
            model = Llama(LLAMA_3_8B)
        assert room.weights == 2 * sum(x.numel() for x in model.parameters())
    if weights == "int4":  # AWQ's layout, by hand: eight codes a word, per 128 an fp16 and 4 bits
        layer = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
        codes = 32 * (layer // 2 + layer // 128 * 5 // 2)
        assert room.weights == codes + 2 * (2 * 128256 * 4096 + 65 * 4096)
    four = serving_room(LLAMA_3_8B, 80 * 10**9, context=8000, weights=weights, devices=4)
    assert four.weights == -(-room.weights // 4) and four.request < room.request


def test_a_step_holds_what_the_meter_finds() -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=160, intermediate_size=440, num_hidden_layers=3,
        num_attention_heads=5, num_key_value_heads=1,
    )  # fmt: skip
    model, tokens = Llama(config).eval(), torch.zeros(1, 300, dtype=torch.int64)
    with Meter(model) as meter, torch.no_grad():
        for _ in range(2):
            model(tokens, logits_at=torch.tensor([299]))
    predicted = serving_room(config, 10**9, context=1, batched_tokens=300).step
    assert meter.peak.workspace == pytest.approx(2 * predicted, rel=0.05)  # it counts float32


def test_a_card_that_the_weights_fill_serves_nobody() -> None:
    room = serving_room(LLAMA_3_8B, 16 * 10**9, context=100)
    assert room.cache == 0 == room.requests


def test_invalid_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="dtype must be"):
        kv_bytes(SMALL, 1, dtype="int4")
    with pytest.raises(ValueError, match="page must be"):
        kv_bytes(SMALL, 1, page=0)
    with pytest.raises(ValueError, match="weights must be"):
        serving_room(SMALL, 10**9, context=5, weights="fp4")
    with pytest.raises(ValueError, match="card must be"):
        serving_room(SMALL, 0, context=5)
