"""A graphed decoder gives what the model gives, and refuses what a graph would get wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from labcore.models import DenseCache, Llama
from labcore.parallel import graphs
from labcore.parallel.graphs import GraphedDecoder
from labcore.parallel.launch_time import launch_seconds
from tests.parallel.small import (
    CAPACITY,
    CONFIG,
    ROWS,
    SIZES,
    contents,
    made,
    plain,
    prefilled,
)


@pytest.fixture
def model(seed: int) -> Llama:
    return made(seed)


@pytest.mark.parametrize("batch", range(1, 6))
def test_steps_are_those_of_the_model_and_other_rows_rest(
    batch: int, model: Llama, seed: int, generator: torch.Generator
) -> None:
    alone, shared = prefilled(model, seed, batch), prefilled(model, seed)
    before = contents(shared)
    decoder = GraphedDecoder(model, shared, batches=SIZES)
    for step in range(4):
        tokens = torch.randint(CONFIG.vocab_size, (batch,), generator=generator)
        logits = decoder(tokens)
        torch.testing.assert_close(logits, plain(model, alone, tokens), rtol=1e-5, atol=1e-5)
        assert logits.shape == (batch, CONFIG.vocab_size)
        after = contents(shared)
        assert after[-1].tolist() == [
            n + (step + 1) * (row < batch) for row, n in enumerate(before[-1].tolist())
        ]
        for old, new in zip(before, after, strict=True):
            assert torch.equal(old[batch:], new[batch:])
    for own, whole in zip(contents(alone), contents(shared), strict=True):
        torch.testing.assert_close(own, whole[:batch], rtol=1e-5, atol=1e-5)
    assert decoder.captured == (min(size for size in SIZES if size >= batch),)
    decoder.close()


def test_steps_of_any_size_follow_one_another(
    model: Llama, seed: int, generator: torch.Generator
) -> None:
    """What a larger step left in the buffers is no token of a smaller one."""
    shared, twin = prefilled(model, seed), prefilled(model, seed)
    with GraphedDecoder(model, shared, batches=SIZES) as decoder:
        for batch in (8, *torch.randint(1, 9, (4,), generator=generator).tolist(), 3):
            tokens = torch.randint(CONFIG.vocab_size, (ROWS, 1), generator=generator)
            active = torch.rand(ROWS, generator=generator) < (1.0 if batch in (3, 8) else 0.5)
            counts = (active & (torch.arange(ROWS) < batch)).int()
            with torch.no_grad():
                expected = model(tokens, counts=counts, cache=twin).logits[:batch, 0]
            logits = decoder(tokens[:batch, 0], active=None if active.all() else active[:batch])
            steps = counts[:batch].bool()
            torch.testing.assert_close(logits[steps], expected[steps], rtol=1e-5, atol=1e-5)
            assert torch.equal(shared.lengths, twin.lengths)


def test_a_row_rests_among_others(model: Llama, seed: int) -> None:
    alone, shared = prefilled(model, seed, 3), prefilled(model, seed)
    before = contents(shared)
    tokens, active = torch.tensor([5, 11, 7]), torch.tensor([True, False, True])
    with GraphedDecoder(model, shared, batches=SIZES) as decoder:
        logits = decoder(tokens, active=active)
    torch.testing.assert_close(logits[active], plain(model, alone, tokens)[active])
    after = contents(shared)
    assert (after[-1] - before[-1]).tolist() == [1, 0, 1, 0, 0, 0, 0, 0]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[1], new[1])


def test_sizes_are_captured_when_needed_or_all_at_once(model: Llama, seed: int) -> None:
    cache = prefilled(model, seed, 5)
    before = contents(cache)
    decoder = GraphedDecoder(model, cache, batches=(16, 2, 2))
    assert (decoder.batches, decoder.captured) == ((2, 5), ())
    assert decoder.launches(3) == decoder.launches(5)
    assert decoder.captured == (5,)
    decoder.capture()
    assert decoder.captured == (2, 5)
    assert decoder.launches(1) == decoder.launches(2) != decoder.launches(3)
    products = [
        one for one in decoder.launches(2) if one.split("(")[0] in ("aten.mm", "aten.addmm")
    ]
    assert len(products) == 7 * CONFIG.num_hidden_layers + 1
    for old, new in zip(before, contents(cache), strict=True):
        assert torch.equal(old, new)  # a capture leaves the cache as it is
    decoder.close()


def test_the_result_is_the_callers(model: Llama, seed: int) -> None:
    decoder = GraphedDecoder(model, prefilled(model, seed))
    first = decoder(torch.tensor([3]))
    kept = first.clone()
    second = decoder(torch.tensor([4]))
    assert torch.equal(first, kept) and not torch.equal(first, second)
    first.div_(2)  # no tensor of inference mode
    decoder.close()


def move_weight(model: Llama, cache: DenseCache) -> None:
    weight = model.get_parameter("layers.1.mlp.up_proj.weight")
    weight.data = weight.data.clone()


def replace_parameter(model: Llama, cache: DenseCache) -> None:
    model.norm.weight = torch.nn.Parameter(model.norm.weight.detach() * 2)


def replace_module(model: Llama, cache: DenseCache) -> None:
    model.layers[0].mlp = made(1).layers[0].mlp


def other_dtype(model: Llama, cache: DenseCache) -> None:
    model.double()


def move_lengths(model: Llama, cache: DenseCache) -> None:
    cache.lengths = cache.lengths.clone()


def move_keys(model: Llama, cache: DenseCache) -> None:
    cache._keys[1] = cache._keys[1].clone()


CHANGES = {
    "layers.1.mlp.up_proj.weight stands": move_weight,
    "norm.weight stands": replace_parameter,
    "layers.0.mlp was replaced": replace_module,
    "embed_tokens.weight was .*float32 .*float64": other_dtype,
    "the cache's lengths stands": move_lengths,
    "the cache's keys of layer 1 stands": move_keys,
}


@pytest.mark.parametrize("told", CHANGES)
def test_what_moved_is_noticed_and_captured_anew(
    told: str, model: Llama, seed: int, generator: torch.Generator
) -> None:
    cache = prefilled(model, seed)
    decoder = GraphedDecoder(model, cache, batches=SIZES)
    tokens = torch.randint(CONFIG.vocab_size, (3,), generator=generator)
    decoder(tokens)
    with torch.no_grad():
        model.norm.weight.mul_(1.5)  # in place: a replay reads the new values
    decoder(tokens)
    CHANGES[told](model, cache)
    lengths = cache.lengths.clone()
    with pytest.raises(RuntimeError, match=rf"{told}.*; call capture\(\)"):
        decoder(tokens)
    assert torch.equal(cache.lengths, lengths)
    decoder.capture()
    twin = prefilled(model, seed, 3)
    twin._keys = [tensor[:3].clone() for tensor in cache._keys]
    twin._values = [tensor[:3].clone() for tensor in cache._values]
    twin.lengths.copy_(cache.lengths[:3])
    twin.buffers()
    torch.testing.assert_close(decoder(tokens), plain(model, twin, tokens), rtol=1e-5, atol=1e-5)
    decoder.close()


def test_another_model_and_cache_are_captured_on_demand(model: Llama, seed: int) -> None:
    decoder = GraphedDecoder(model, prefilled(model, seed), batches=(2,))
    other, tokens = made(seed + 1), torch.tensor([1, 2])
    decoder(tokens)
    cache = prefilled(other, seed, 3)
    decoder.capture(model=other, cache=cache)
    assert decoder.model is other and decoder.cache is cache
    expected = plain(other, prefilled(other, seed, 2), tokens)
    torch.testing.assert_close(decoder(tokens), expected, rtol=1e-5, atol=1e-5)
    decoder.close()


def test_what_does_not_fit_leaves_the_decoder_as_it_is(model: Llama, seed: int) -> None:
    tokens = torch.tensor([1, 2])
    with GraphedDecoder(model, prefilled(model, seed), batches=(2,)) as decoder:
        decoder(tokens)
        elsewhere = DenseCache(CONFIG, batch=2, capacity=3, device="meta")
        with pytest.raises(ValueError, match="on one device, got cpu and meta"):
            decoder.capture(model=made(seed + 1), cache=elsewhere)
        assert decoder.model is model and decoder.captured == (2,)
        alone = prefilled(model, seed, 2)
        plain(model, alone, tokens)
        torch.testing.assert_close(decoder(tokens), plain(model, alone, tokens))


WAITS: dict[str, Callable[[Tensor], object]] = {
    "_local_scalar_dense": lambda x: x * x.abs().max().item(),
    "Tensor.tolist": lambda x: x + len(x.tolist()),
    "index": lambda x: x[x[:, 0, 0] > 0],
}


@pytest.mark.parametrize("call", WAITS)
def test_a_step_that_waits_is_refused(call: str, model: Llama, seed: int) -> None:
    cache = prefilled(model, seed)
    before = contents(cache)
    decoder = GraphedDecoder(model, cache)
    hook = model.norm.register_forward_hook(lambda _, __, out: WAITS[call](out))
    expected = rf"must not wait .*{call} in .*\(test_graphs.py, line.*; "
    with pytest.raises(RuntimeError, match=expected):
        decoder(torch.tensor([3, 4]))
    with pytest.raises(RuntimeError, match=expected):
        decoder.capture()
    for old, new in zip(before, contents(cache), strict=True):
        assert torch.equal(old, new)
    hook.remove()
    expected_logits = plain(model, prefilled(model, seed, 2), torch.tensor([3, 4]))
    torch.testing.assert_close(decoder(torch.tensor([3, 4])), expected_logits)
    decoder.close()


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.inference_mode])
def test_a_full_row_is_refused_before_it_is_written(
    mode: Callable[[], Any], model: Llama, seed: int
) -> None:
    with mode():
        cache = prefilled(model, seed)
    decoder = GraphedDecoder(model, cache, batches=(2,))
    tokens, active = torch.tensor([1, 2]), torch.tensor([True, False])
    with mode():
        cache.lengths.zero_()
    decoder(tokens)
    with mode():
        cache.lengths[1] = CAPACITY  # behind the decoder's back
    with pytest.raises(ValueError, match=f"at most {CAPACITY} tokens, got {CAPACITY + 1}"):
        decoder(tokens)
    for _ in range(2):
        with mode():
            cache.lengths[1:3] = torch.tensor([CAPACITY - 3, CAPACITY])  # row 2 takes no part
            cache.lengths[0] = 0
        for _ in range(3):
            decoder(tokens)
        for _ in range(2):  # a full row may rest
            decoder(tokens, active=active)
        before = contents(cache)
        with pytest.raises(ValueError, match=f"at most {CAPACITY} tokens, got {CAPACITY + 1}"):
            decoder(tokens)
        for old, new in zip(before, contents(cache), strict=True):
            assert torch.equal(old, new)
    decoder.close()


def test_arguments_that_do_not_fit_are_refused(model: Llama, seed: int) -> None:
    cache = prefilled(model, seed)
    with pytest.raises(ValueError, match="batches must hold at least one size"):
        GraphedDecoder(model, cache, batches=())
    with pytest.raises(ValueError, match="a size in batches must be at least 1, got 0"):
        GraphedDecoder(model, cache, batches=(1, 0))
    with pytest.raises(ValueError, match="warmup must be at least 1"):
        GraphedDecoder(model, cache, warmup=0)
    with pytest.raises(ValueError, match=r"on one device, got cpu and meta; .*device='cpu'"):
        GraphedDecoder(model, DenseCache(CONFIG, batch=2, capacity=3, device="meta"))
    with GraphedDecoder(model, cache, batches=(1, 4)) as decoder:
        with pytest.raises(ValueError, match="at most 4 rows, got 5"):
            decoder(torch.zeros(5, dtype=torch.long))
        for tokens in (torch.zeros(2), torch.zeros(2, 1).long(), torch.zeros(0).long()):
            with pytest.raises(ValueError, match=r"tokens must be integers \[B\]"):
                decoder(tokens)
        for active in (torch.ones(3).bool(), torch.ones(2)):
            with pytest.raises(ValueError, match=r"active must be bool \(2,\)"):
                decoder(torch.zeros(2).long(), active=active)
        with pytest.raises(ValueError, match="decoder must be on a GPU, got one on cpu"):
            launch_seconds(decoder)
    with pytest.raises(RuntimeError, match=r"after close\(\)"):
        decoder(torch.tensor([1]))
    with pytest.raises(RuntimeError, match=r"after close\(\)"):
        decoder.capture()
    decoder.close()


class Own(DenseCache):
    """A cache of another kind: what it changes would be lost in a view of a DenseCache."""


def test_a_cache_of_another_kind_says_how_fewer_rows_look(model: Llama, seed: int) -> None:
    cache = Own(CONFIG, batch=3, capacity=5)
    with pytest.raises(TypeError, match=r"Own must have first_rows\(n\) .* 2 of its 3 rows"):
        GraphedDecoder(model, cache, batches=(2, 3))
    cache.first_rows = lambda rows: graphs.first_rows(whole, rows)  # type: ignore[attr-defined]
    whole = DenseCache(CONFIG, batch=3, capacity=5)
    cache.lengths = whole.lengths
    with GraphedDecoder(model, cache, batches=(2, 3)) as decoder:
        logits = decoder(torch.tensor([1, 2]))
    fresh = DenseCache(CONFIG, batch=2, capacity=5)
    torch.testing.assert_close(logits, plain(model, fresh, torch.tensor([1, 2])))
    assert whole.lengths.tolist() == [1, 1, 0]


def test_a_group_that_ended_first_is_said(model: Llama, seed: int) -> None:
    decoder = GraphedDecoder(model, prefilled(model, seed))
    decoder._grouped = True
    with pytest.raises(RuntimeError, match=r"must outlive the graphs, .*call close\(\) before"):
        decoder(torch.tensor([1]))
    decoder.close()
