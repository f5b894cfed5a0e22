"""The decode step against attention in double precision, on the emulator."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from labcore.hip import EmulationError, LaunchCounters, load
from labcore.hip.build import DECODE
from labcore.hip.decode import decode, launches

DTYPES = [torch.float16, torch.bfloat16]
# None, one, around a wavefront's 16 or 32 keys and a block's 64 or 128, all, more than there are.
LENGTHS = (0, 1, 15, 33, 64, 129, 270, 300)
S = 270


def draw(generator, dtype, dim: int, heads: int, key_heads: int) -> tuple[Tensor, ...]:
    """Draw query, key and value; what is below fp16's normal range counts as zero on CDNA2."""
    shapes = (len(LENGTHS), heads, dim), *[(len(LENGTHS), key_heads, S, dim)] * 2
    drawn = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return tuple(x.where(x.abs() >= torch.finfo(dtype).tiny, 0) for x in drawn)


def lengths() -> Tensor:
    return torch.tensor(LENGTHS, dtype=torch.int32)


def reference(query, key, value, lengths, *, scale=None) -> tuple[Tensor, Tensor]:
    """One sequence after the other, in the inputs' dtype."""
    out, lse = torch.zeros_like(query), query.new_full(query.shape[:2], -math.inf)
    group = query.shape[1] // key.shape[1]
    for i, length in enumerate(lengths.clamp(0, key.shape[2]).tolist()):
        if length == 0:
            continue
        keys, values = (x[i, :, :length].repeat_interleave(group, dim=0) for x in (key, value))
        scores = (query[i, :, None] @ keys.mT) * (scale or query.shape[-1] ** -0.5)
        out[i], lse[i] = (scores.softmax(-1) @ values)[:, 0], scores.logsumexp(-1)[:, 0]
    return out, lse


def holds(out: Tensor, lse: Tensor, query, key, value, lengths, **how) -> None:
    """Twice the error of the same attention in torch's 16 bits, and an exact lse."""
    exact = reference(query.double(), key.double(), value.double(), lengths, **how)
    peer, _ = reference(query, key, value, lengths, **how)
    error = (out.double() - exact[0]).abs().max()
    assert error <= 2 * (peer.double() - exact[0]).abs().max() + torch.finfo(query.dtype).eps
    torch.testing.assert_close(lse.double(), exact[1], rtol=1e-6, atol=5e-6)
    empty = lengths <= 0
    assert (out[empty] == 0).all() and (lse[empty] == -math.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("heads", "key_heads"), [(3, 3), (14, 2), (16, 1), (66, 2)])
@pytest.mark.parametrize("splits", [1, 3, 70])
def test_decode_is_attention(splits: int, heads, key_heads, dim, dtype, generator) -> None:
    query, key, value = draw(generator, dtype, dim, heads, key_heads)
    got = decode(query, key, value, lengths(), splits=splits)
    assert got.out.dtype == dtype and got.lse.dtype == torch.float32
    holds(got.out, got.lse, query, key, value, lengths())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 128])
def test_nothing_is_read_that_is_not_there(dim: int, dtype, generator) -> None:
    """NaN past each length and in whatever the first launch may leave alone; sequences go on."""
    query, key, value = draw(generator, dtype, dim, 6, 2)
    many = lengths() + torch.tensor([-7, 0, 0, 0, 0, 0, 0, 2**20], dtype=torch.int32)
    for i, length in enumerate(LENGTHS):
        key[i, :, length:], value[i, :, length:] = torch.nan, torch.nan
    program = load(DECODE)
    block = program.attention_block(dtype, dim)
    out, lse, planned = launches(query, key, value, many, splits=5, scale=0.3, block=block)
    for launch in planned:
        for name in ("piece_out", "piece_lse", "out", "lse"):
            if launch is planned[0] or name in ("out", "lse"):
                launch.arguments.get(name, torch.empty(0)).fill_(torch.nan)
    for launch in planned:
        program.launch(
            launch.name, grid=launch.grid, block=launch.threads, arguments=launch.arguments
        )
    holds(out, lse, query, key, value, many, scale=0.3)
    parts = planned[0].arguments["piece_out"]
    assert parts.isnan().any() and not parts[-1].isnan().all()  # type: ignore[union-attr]
    # Each piece is attention over its own keys: the launch's bounds end where a cache ends.
    short = replace(
        planned[0], arguments={**planned[0].arguments, "k": key[: len(LENGTHS) - 1].contiguous()}
    )
    with pytest.raises(EmulationError, match=r"the part \d+ \.\.\. \d+ of k is outside"):
        program.launch(short.name, grid=short.grid, block=short.threads, arguments=short.arguments)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_thousands(dtype, generator) -> None:
    query, key, value = draw(generator, dtype, 64, 4, 2)
    got = decode(16 * query, 16 * key, value, lengths(), splits=2, scale=1.0)
    out, lse = reference(
        16 * query.double(), 16 * key.double(), value.double(), lengths(), scale=1.0
    )
    seen = lengths() > 0
    assert lse.max() > 2000
    # fp32 sums a score s to some eps * s, and a result moves by no more than the scores do.
    rounding = 8 * torch.finfo(torch.float32).eps * lse[seen].abs().max()
    assert (got.lse[seen].double() - lse[seen]).abs().max() <= rounding
    rounding += torch.finfo(dtype).eps
    assert (got.out.double() - out).abs().max() <= rounding * value.abs().max()


def test_a_step_reads_each_key_once_for_its_group(generator) -> None:
    """Segments of 64 bytes: eight times the heads in a group ask for little more."""
    few, many = (
        decode(
            *draw(generator, torch.bfloat16, 128, heads, 2), lengths(), splits=2, count=True
        ).counters
        for heads in (2, 16)
    )
    assert isinstance(few, LaunchCounters) and isinstance(many, LaunchCounters)
    assert few.lds_conflicts == many.lds_conflicts == 0 and few.mfma == many.mfma > 0
    keys = sum(min(length, S) for length in LENGTHS) * 2 * 2 * 128 * 2 // 64
    assert keys <= few.transactions < many.transactions < 2.2 * keys


def test_any_strides_the_fast_build_and_nothing(generator) -> None:
    query, key, value = draw(generator, torch.float16, 64, 6, 2)
    wanted = decode(query, key, value, lengths(), splits=2)
    turned = key.transpose(1, 2).contiguous().transpose(1, 2)  # [B, S, Hkv, D] in memory
    got = decode(query, turned, value, lengths(), splits=2, check=False)
    torch.testing.assert_close(got.out, wanted.out, rtol=2e-3, atol=1e-3)
    torch.testing.assert_close(got.lse, wanted.lse)
    for rows, heads in ((0, 6), (8, 0)):
        none = decode(
            query[:rows, :heads],
            key[:rows, : heads // 3],
            value[:rows, : heads // 3],
            lengths()[:rows],
            count=True,
        )
        assert none.out.shape == (rows, heads, 64) and none.lse.shape == (rows, heads)
        assert none.counters is not None and none.counters.bytes == 0
    no_room = decode(query, key[:, :, :0], value[:, :, :0], lengths())
    assert (no_room.out == 0).all() and (no_room.lse == -math.inf).all()


def test_decode_says_what_it_takes() -> None:
    query, key, some = torch.zeros(2, 4, 64).half(), torch.zeros(2, 2, 9, 64).half(), lengths()[:2]
    refused = [
        (ValueError, r"query must be \[B, H, D\]", (query[0], key, key, some)),
        (ValueError, "head dimension must be one of 64, 128", (query[..., :32], key, key, some)),
        (TypeError, "float16 or bfloat16, got torch.float32", (query.float(), key, key, some)),
        (TypeError, "value must have query's dtype", (query, key, key.bfloat16(), some)),
        (ValueError, "Hkv divides 3", (query[:, :3], key, key, some)),
        (ValueError, r"key and value must be \[2, Hkv", (query, key, key[:, :, :8], some)),
        (ValueError, r"lengths must be int32 \[2\]", (query, key, key, some.long())),
        (ValueError, r"lengths must be int32 \[2\]", (query, key, key, some[:1])),
        (ValueError, "key must be on query's cpu", (query, key.to("meta"), key, some)),
    ]
    for kind, sentence, tensors in refused:
        with pytest.raises(kind, match=sentence):
            decode(*tensors)
    with pytest.raises(ValueError, match="on the CPU for emulation"):
        decode(*(x.to("meta") for x in (query, key, key, some)))
    for splits in (0, 2.0):
        with pytest.raises((TypeError, ValueError), match="splits"):
            decode(query, key, key, some, splits=splits)
    with pytest.raises(ValueError, match="scale must be a finite number above 0"):
        decode(query, key, key, some, scale=-1.0)
