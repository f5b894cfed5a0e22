"""The fused decoder computes what Llama with a DenseCache computes, whatever is asked of it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from labcore.models import DenseCache, Llama, LlamaConfig, fused, packed
from labcore.models.fused import FusedLlama
from labcore.models.fused_cache import FusedCache
from tests.models.shapes import CONFIGS, model_of, tokens_of

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
PARENTS = torch.tensor(
    [[-1, 0, 0, -1, 1, 3, 1], [-1, 0, 1, 2, -2, -2, -2], [-1, -1, -1, 2, 3, 2, -2]],
    dtype=torch.int32,
)
PACKED = "quantized::linear_dynamic_fp16"


def through_bf16(model: Llama) -> Llama:
    """The model as a bf16 checkpoint would hold it, computing in fp32."""
    return model.bfloat16().float()


def quiet(config: LlamaConfig, generator: torch.Generator) -> Llama:
    """Random in every parameter, with logits of the size that trained models have."""
    model = model_of(config, generator)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(0.5)
    return model


class Both:
    """Llama with its cache and the fused form, driven with the same calls and compared."""

    def __init__(self, model: Llama, batch: int, capacity: int) -> None:
        self.model, self.fused = model, FusedLlama(model)
        self.dense = DenseCache(model.config, batch=batch, capacity=capacity)
        self.cache = self.fused.new_cache(batch, capacity)

    @torch.inference_mode()
    def read(self, tokens, counts=None, tree=None) -> None:
        exact = self.model(tokens, counts=counts, cache=self.dense, tree=tree)
        found = self.fused(tokens, counts=counts, cache=self.cache, tree=tree)
        assert found.logits.isfinite().all()
        if counts is None and tree is not None:
            counts = (tree != -2).sum(1)
        for row in range(tokens.shape[0]):
            valid = slice(None) if counts is None else slice(int(counts[row]))
            torch.testing.assert_close(found.logits[row, valid], exact.logits[row, valid], **CLOSE)
            torch.testing.assert_close(found.hidden[row, valid], exact.hidden[row, valid], **CLOSE)
        self.agree()

    def agree(self) -> None:
        assert self.cache.lengths.dtype == torch.int32
        assert self.cache.lengths.tolist() == self.dense.lengths.tolist()

    def truncate(self, lengths: list[int]) -> None:
        for cache in (self.dense, self.cache):
            cache.truncate(torch.tensor(lengths))
        self.agree()

    def keep(self, row: int, slots) -> None:
        for cache in (self.dense, self.cache):
            cache.keep(row, slots)
        self.agree()


@pytest.fixture(params=["bf16", "fp32"])
def weights(request):
    return through_bf16 if request.param == "bf16" else lambda model: model


@pytest.mark.parametrize("name", CONFIGS)
def test_prompts_and_steps_of_every_kind_of_model(name: str, weights, generator) -> None:
    both = Both(weights(quiet(CONFIGS[name], generator)), batch=1, capacity=130)
    for width in (1, 2, 7, 33, 70):
        both.truncate([0])
        both.read(tokens_of(both.model.config, (1, width), generator))
        for step in (1, 5, 1, 9, 2):
            both.read(tokens_of(both.model.config, (1, step), generator))


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_ragged_rows_and_rows_that_rest(batch: int, weights, generator) -> None:
    both = Both(weights(quiet(CONFIGS["grouped"], generator)), batch=batch, capacity=40)
    for counts in ([5, 1, 9, 3], [2, 6, 0, 1], [1, 1, 1, 1], [0, 4, 8, 2], [0, 0, 0, 0]):
        tokens = tokens_of(both.model.config, (batch, max(*counts, 1) + 1), generator)
        both.read(tokens, counts=torch.tensor(counts[:batch]))


def test_prefill_with_more_rows_than_are_packed(weights, generator) -> None:
    both = Both(weights(quiet(CONFIGS["scaled"], generator)), batch=3, capacity=90)
    tokens = tokens_of(both.model.config, (3, 67), generator)
    both.read(tokens, counts=torch.tensor([67, 30, 1]))
    both.read(tokens[:, :22], counts=torch.tensor([22, 0, 20], dtype=torch.int32))


def test_trees_and_kept_paths(weights, generator) -> None:
    both = Both(weights(quiet(CONFIGS["qwen2"], generator)), batch=3, capacity=40)
    both.read(tokens_of(both.model.config, (3, 9), generator), counts=torch.tensor([9, 2, 0]))
    for _ in range(2):
        both.read(tokens_of(both.model.config, (3, 7), generator), tree=PARENTS)
        both.keep(0, torch.tensor([3, 5], dtype=torch.int32))
        both.keep(1, [])
        both.keep(2, [2, 3, 4])
        both.read(tokens_of(both.model.config, (3, 2), generator))
    single = Both(both.model, batch=1, capacity=20)
    single.read(tokens_of(both.model.config, (1, 7), generator), tree=PARENTS[:1])
    single.keep(0, [0, 1])
    single.read(tokens_of(both.model.config, (1, 1), generator))


def random_tree(width: int, dice: random.Random) -> tuple[list[int], int]:
    nodes = dice.randint(1, width)
    parents = [dice.randint(-1, i - 1) for i in range(nodes)]
    return parents + [-2] * (width - nodes), nodes


@pytest.mark.parametrize("name", ["one-key-head", "wide-heads", "biased"])
def test_random_programs(name: str, weights, seed: int, generator) -> None:
    dice, capacity = random.Random(seed), 60
    batch = dice.randint(1, 4)
    both = Both(weights(quiet(CONFIGS[name], generator)), batch=batch, capacity=capacity)
    for _ in range(25):
        width = dice.randint(1, 9)
        lengths = both.cache.lengths.tolist()
        if max(lengths) + width > capacity:
            both.truncate([dice.randint(0, 30) for _ in range(batch)])
            continue
        tokens = tokens_of(both.model.config, (batch, width), generator)
        if dice.random() < 0.5:
            counts = [dice.randint(0, width) for _ in range(batch)]
            both.read(tokens, counts=torch.tensor(counts))
            for row in range(batch):
                if dice.random() < 0.5:
                    both.keep(row, list(range(dice.randint(0, counts[row]))))
            continue
        trees = [random_tree(width, dice) for _ in range(batch)]
        both.read(tokens, tree=torch.tensor([parents for parents, _ in trees], dtype=torch.int32))
        for row, (parents, nodes) in enumerate(trees):
            path = [dice.randrange(nodes)]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            both.keep(row, path[: dice.randint(0, len(path))])


def products(decoder: FusedLlama, rows: int) -> set[str]:
    """Names of the matrix products that a forward of so many rows takes."""
    cache = decoder.new_cache(1, rows)
    with torch.profiler.profile() as profiler:
        decoder(torch.ones(1, rows, dtype=torch.long), cache=cache)
    return {event.key for event in profiler.key_averages()} & {PACKED, "aten::linear"}


def test_weights_are_packed_where_it_loses_nothing(generator, monkeypatch) -> None:
    if not packed.packing_works():
        pytest.skip("this build of torch multiplies no fp16 weights on this processor")
    plain = quiet(CONFIGS["grouped"], generator)
    assert not FusedLlama(plain).packed
    assert products(FusedLlama(plain), 3) == {"aten::linear"}
    rounded = through_bf16(plain)
    decoder = FusedLlama(rounded)
    assert decoder.packed
    for rows in (2, 65):
        assert products(decoder, rows) == {PACKED}
    assert products(decoder, 1) == {"aten::linear"}  # small matrices and one row
    monkeypatch.setattr(packed, "_SMALL", 0)
    assert products(FusedLlama(rounded), 1) == {PACKED}
    # One weight that fp16 cannot hold is enough.
    spoilt = through_bf16(quiet(CONFIGS["tied"], generator))
    with torch.no_grad():
        spoilt.layers[1].mlp.down_proj.weight[0, 0] = 1 / 3
    assert not FusedLlama(spoilt).packed


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_packed_weights_of_any_size_lose_nothing(size: float, generator) -> None:
    weight = (torch.randn(50, 41, generator=generator) * size).bfloat16().float()
    weight[0, :5] *= 2.0**-22  # below fp16's smallest number, unless scaled
    weight[1] = 0
    matrix = packed.PackedMatrix(weight)
    assert matrix.fits() and not packed.PackedMatrix(weight + 1e-4 * size).fits()
    if not packed.packing_works():
        pytest.skip("this build of torch multiplies no fp16 weights on this processor")
    matrix.pack()
    x = torch.randn(3, 41, generator=generator)
    exact = x.double() @ weight.double().T
    error = (matrix(x) / matrix.scale - exact).abs() / (x.abs() @ weight.abs().T + 1e-30)
    assert error.max() < 41 * 2.0**-24


def test_without_fbgemm_the_products_are_plain(generator, monkeypatch) -> None:
    model = through_bf16(quiet(CONFIGS["tied"], generator))
    monkeypatch.setattr(fused, "packing_works", lambda: False)
    decoder = FusedLlama(model)
    assert not decoder.packed and products(decoder, 3) == {"aten::linear"}
    Both(model, batch=1, capacity=9).read(tokens_of(model.config, (1, 9), generator))


def test_rotary_angles_grow_past_their_first_size(generator) -> None:
    model = quiet(replace(CONFIGS["scaled"], num_hidden_layers=1), generator)
    both = Both(model, batch=1, capacity=700)
    both.read(tokens_of(model.config, (1, 3), generator))
    first = len(both.fused._turns.up_to(1))
    both.read(tokens_of(model.config, (1, 600), generator))
    assert first < 603 <= len(both.fused._turns.up_to(1))
    both.read(tokens_of(model.config, (1, 4), generator))
    both.read(tokens_of(model.config, (1, 4), generator), tree=PARENTS[:1, :4].clamp(min=-1))


def test_repeated_runs_agree_in_every_bit(weights, generator) -> None:
    model = weights(quiet(CONFIGS["grouped"], generator))
    pieces = tokens_of(model.config, (2, 40), generator).split((25, 1, 5, 1, 8), 1)
    runs = []
    for _ in range(2):
        decoder = FusedLlama(model)
        for _ in range(2):
            cache = decoder.new_cache(2, 40)
            runs.append(torch.cat([decoder(piece, cache=cache).logits for piece in pieces], 1))
    assert all(torch.equal(run, runs[0]) for run in runs)


def test_later_changes_of_the_model_are_not_seen(generator) -> None:
    model = quiet(CONFIGS["biased"], generator)
    decoder, tokens = FusedLlama(model), tokens_of(model.config, (1, 5), generator)
    before = decoder(tokens, cache=decoder.new_cache(1, 5)).logits
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert torch.equal(decoder(tokens, cache=decoder.new_cache(1, 5)).logits, before)


def test_it_is_a_decoder(generator) -> None:
    config = CONFIGS["scaled"]
    decoder = FusedLlama(quiet(config, generator))
    assert decoder.vocab_size == 37 and decoder.eos_token_ids == (3, 5)
    assert decoder.device == torch.device("cpu")
    cache = decoder.new_cache(2, 6)
    assert isinstance(cache, FusedCache) and cache.lengths.tolist() == [0, 0]
    out = decoder(torch.ones(2, 3, dtype=torch.int32), cache=cache)
    assert out.logits.shape == (2, 3, 37) and out.hidden.shape == (2, 3, 24)
    assert out.logits.dtype == torch.float32


def test_a_full_cache_refuses_and_a_truncated_one_goes_on(generator) -> None:
    both = Both(quiet(CONFIGS["grouped"], generator), batch=2, capacity=8)
    tokens = tokens_of(both.model.config, (2, 6), generator)
    both.read(tokens, counts=torch.tensor([6, 2]))
    both.read(tokens, counts=torch.tensor([2, 6]))  # padding may reach beyond the capacity
    with pytest.raises(ValueError, match="at most 8 tokens, got 9"):
        both.fused(tokens[:, :1], cache=both.cache)
    assert both.cache.lengths.tolist() == [8, 8]
    both.truncate([7, 99])
    both.read(tokens[:, :1], counts=torch.tensor([1, 0]))


def test_lengths_that_a_caller_writes_are_obeyed(generator) -> None:
    model = quiet(CONFIGS["grouped"], generator)
    decoder, tokens = FusedLlama(model), tokens_of(model.config, (1, 9), generator)
    cache = decoder.new_cache(1, 9)
    whole = decoder(tokens, cache=cache).logits
    cache.lengths.fill_(4)
    torch.testing.assert_close(decoder(tokens[:, 4:], cache=cache).logits, whole[:, 4:], **CLOSE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": torch.ones(2, 3)}, "tokens must be integers"),
        ({"tokens": torch.ones(2, 0, dtype=torch.long)}, "both at least 1"),
        ({"tokens": torch.ones(1, 3, dtype=torch.long)}, "each of the 1 rows"),
        ({"counts": torch.ones(3, dtype=torch.int32)}, r"counts must have shape \(2,\)"),
        ({"counts": torch.ones(2)}, "counts must hold integers"),
        ({"counts": torch.tensor([4, 1])}, "between 0 and 3 tokens"),
        ({"counts": torch.tensor([-1, 1])}, "between 0 and 3 tokens"),
        ({"tree": torch.zeros(2, 4, dtype=torch.int32)}, "tree must have shape"),
        ({"cache": DenseCache(CONFIGS["plain"], batch=2, capacity=4)}, "FusedLlama.new_cache"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict, message: str, generator) -> None:
    decoder = FusedLlama(quiet(CONFIGS["plain"], generator))
    given = {"tokens": torch.ones(2, 3, dtype=torch.long), "cache": decoder.new_cache(2, 4)}
    given |= options
    with pytest.raises((ValueError, TypeError), match=message):
        decoder(given.pop("tokens"), **given)
    cache = decoder.new_cache(2, 4)
    with pytest.raises(ValueError, match=r"slots must be .* 0 tokens .* got \[0\]"):
        cache.keep(0, [0])
    with pytest.raises(ValueError, match=r"lengths must have shape \(2,\)"):
        cache.truncate(torch.tensor([1]))


def test_only_fp32_on_the_cpu() -> None:
    with pytest.raises(TypeError, match=r"torch.float32, got .* in torch.bfloat16; convert"):
        FusedLlama(Llama(CONFIGS["plain"], dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"runs on the CPU, got .* on meta"):
        FusedLlama(Llama(CONFIGS["plain"], device="meta"))
