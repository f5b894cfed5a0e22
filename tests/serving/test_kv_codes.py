"""An engine whose cache holds 8-bit codes computes with the dequantized codes, and nothing else."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from labcore.attention import quantize_kv
from labcore.decoding import SamplingConfig
from labcore.models import DenseCache, Llama
from labcore.models.cache import KV_DTYPES, kv_bytes
from labcore.serving.engine import packed as module
from labcore.serving.engine.cache import PagedCache, Segment
from labcore.serving.engine.engine import Engine
from labcore.serving.engine.packed import PackedStep
from tests.models.shapes import CONFIGS, model_of, tokens_of
from tests.serving.tiny import TINY_POOL, nothing_left, run, tiny

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
CODES = ("int8", "float8")


class RoundedCache(DenseCache):
    """A dense cache of dequantized codes."""

    kind = torch.int8

    def write(self, layer: int, k: Tensor, v: Tensor, counts: Tensor) -> None:
        super().write(layer, self.rounded(k), self.rounded(v), counts)

    def rounded(self, x: Tensor) -> Tensor:
        codes, scales = quantize_kv(x, self.kind)
        return codes.to(x.dtype) * scales[..., None].to(x.dtype)


@pytest.fixture(params=["gathered", "paged"])
def group(request, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "paged":
        monkeypatch.setattr(module, "_GroupOnCpu", module._GroupOnGpu)
    return request.param


def coded(model: Llama, kind: str, block_size: int, rows: int = 3) -> PagedCache:
    """A cache whose unwritten slots read as NaN."""
    each = -(-24 // block_size)
    cache = PagedCache.of(
        model, num_blocks=rows * each + 1, block_size=block_size, rows=rows, max_blocks=each,
        dtype=KV_DTYPES[kind],
    )  # fmt: skip
    for scales in (*cache.scales[0], *cache.scales[1]):
        scales.fill_(torch.nan)
    return cache


@torch.inference_mode()
def packed(model: Llama, cache: PagedCache, segments: list[Segment]) -> list[Tensor]:
    step = PackedStep(cache, segments)
    logits = model(step.tokens[None], positions=step.positions[None], cache=step).logits[0]
    return [logits[list(span)] for span in step.spans]


@torch.inference_mode()
def dense(model: Llama, kind: str, tokens: list[int]) -> Tensor:
    cache = RoundedCache(model.config, batch=1, capacity=len(tokens), dtype=torch.float64)
    cache.kind = KV_DTYPES[kind]
    return model(torch.tensor([tokens]), cache=cache).logits[0]


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_any_chunks_give_the_logits_of_a_dense_cache_of_dequantized_codes(
    kind: str, block_size: int, group: str, generator: torch.Generator
) -> None:
    for shape in ("plain", "grouped", "one-key-head"):
        model = model_of(CONFIGS[shape], generator).double()
        cache = coded(model, kind, block_size)
        order = torch.randperm(cache.num_blocks, generator=generator).tolist()
        each = cache.block_table.shape[1]
        rows = tokens_of(model.config, (3, 23), generator).tolist()
        wanted = [dense(model, kind, row) for row in rows]
        starts = [0, 0, 0]
        while any(start < 23 for start in starts):
            segments, owners = [], []
            for row in range(3):
                count = int(torch.randint(0, 8, (1,), generator=generator))
                new = rows[row][starts[row] : starts[row] + count]
                if new:
                    blocks = order[row * each :][:each]
                    segments.append(Segment(blocks=blocks, start=starts[row], tokens=new))
                    owners.append(row)
            if not segments:
                continue
            for row, logits in zip(owners, packed(model, cache, segments), strict=True):
                expected = wanted[row][starts[row] :][: len(logits)]
                torch.testing.assert_close(logits, expected, **CLOSE)
                starts[row] += len(logits)


@pytest.mark.parametrize("kind", CODES)
def test_a_kept_path_of_a_tree_takes_its_scales_along(
    kind: str, group: str, generator: torch.Generator
) -> None:
    model = model_of(CONFIGS["grouped"], generator).double()
    cache = coded(model, kind, 3, rows=1)
    blocks = torch.randperm(8, generator=generator).tolist()
    prompt = tokens_of(model.config, (1, 5), generator)[0].tolist()
    draft = tokens_of(model.config, (1, 6), generator)[0].tolist()
    after = tokens_of(model.config, (1, 2), generator)[0].tolist()
    packed(model, cache, [Segment(blocks=blocks, start=0, tokens=prompt)])
    tree = Segment(blocks=blocks, start=5, tokens=draft, parents=[-1, 0, 1, 1, 0, 4])
    packed(model, cache, [tree])
    cache.keep(tree, [0, 4, 5])
    read = prompt + [draft[node] for node in (0, 4, 5)]
    (logits,) = packed(model, cache, [Segment(blocks=blocks, start=8, tokens=after)])
    torch.testing.assert_close(logits, dense(model, kind, read + after)[8:], **CLOSE)


@pytest.mark.parametrize("kind", CODES)
def test_attention_errs_by_no_more_than_the_codes_allow(
    kind: str, group: str, generator: torch.Generator
) -> None:
    """Scores move by at most e = |q|_1 dk / sqrt(D), so weights by exp(2e) and the output by
    max |v| (exp(2e) - 1) + exp(2e) dv."""
    model = model_of(CONFIGS["grouped"], generator).double()
    config = model.config
    heads, kv, size = config.num_attention_heads, config.kv_heads, config.head_size

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v = drawn(1, heads, 19, size), drawn(1, kv, 19, size), drawn(1, kv, 19, size)
    found = {}
    for dtype in (kind, "exact"):
        cache = PagedCache.of(
            model, num_blocks=7, block_size=3, rows=1, max_blocks=7,
            dtype=KV_DTYPES.get(dtype, torch.float64),
        )  # fmt: skip
        step = PackedStep(cache, [Segment(blocks=range(7), start=0, tokens=[0] * 19)])
        counts = torch.tensor([19])
        step.write(0, k, v, counts)
        found[dtype] = step.attend(0, q, counts, None)
    share = 1 / 254 if kind == "int8" else 1 / 16
    dk, dv = share * k.abs().max() * 1.001, share * v.abs().max() * 1.001
    e = q.abs().sum(-1, keepdim=True) * dk / size**0.5
    bound = v.abs().max() * ((2 * e).exp() - 1) + (2 * e).exp() * dv
    error = (found[kind] - found["exact"]).abs()
    assert (error <= bound).all()
    assert error.max() > 0


@pytest.mark.parametrize("kind", CODES)
def test_sharing_preemption_and_drafts_change_no_token(kind: str, seed: int) -> None:
    """Codes are written once and depend on the prefix alone, so any schedule reads the same."""
    chance, model = random.Random(seed), tiny(seed % 1000)
    shared = [chance.randrange(256) for _ in range(24)]
    asked = [
        ([*shared[: chance.randrange(25)], chance.randrange(256)],
         SamplingConfig(temperature=chance.choice((0.0, 0.9)), max_tokens=chance.randint(1, 30),
                        seed=chance.randrange(2**40)))
        for _ in range(14)
    ]  # fmt: skip
    wanted = []
    for prompt, sampling in asked:
        with Engine(model, num_blocks=9, block_size=8, kv_dtype=kind) as engine:
            id = engine.submit(prompt, sampling)
            wanted.append(engine.drain()[id].tokens)
    for more in ({}, {"proposer": "ngram"}, {"graphs": True}):
        pool = {**TINY_POOL, "num_blocks": 11, "max_length": 80}
        with Engine(model, **pool, policy="max_utilization", kv_dtype=kind, **more) as engine:
            ids = [engine.submit(prompt, sampling) for prompt, sampling in asked]
            heard = run(engine)
            assert [tuple(heard.tokens[id]) for id in ids] == [tuple(one) for one in wanted]
            assert more or engine.counters.preemptions > 0
            nothing_left(engine)


@pytest.mark.parametrize("kind", KV_DTYPES)
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_the_pool_takes_the_bytes_of_the_formula(
    kind: str, block_size: int, generator: torch.Generator
) -> None:
    """The pool has one more block, for idle rows."""
    for config in CONFIGS.values():
        model = model_of(config, generator)
        with Engine(model, num_blocks=7, block_size=block_size, kv_dtype=kind) as engine:
            pool = engine.runner.cache.stored
        found = sum(tensor.untyped_storage().nbytes() for tensor in pool)
        assert found == kv_bytes(model.config, 8 * block_size, dtype=kind, page=block_size)


def test_unknown_dtypes_are_refused(generator: torch.Generator) -> None:
    model = model_of(CONFIGS["plain"], generator)
    with pytest.raises(ValueError, match="kv_dtype must be"):
        Engine(model, kv_dtype="int4")
    for dtype in (torch.float8_e5m2, torch.int16):
        with pytest.raises(ValueError, match="dtype must be"):
            PagedCache.of(model, num_blocks=2, rows=1, max_blocks=2, dtype=dtype)
