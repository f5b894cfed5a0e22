"""The forward kernel in the interpreter: the law, and awkward memory."""

import pytest
import torch

from labcore.attention import Pattern
from tests.attention.cases import BANDS, draw, draw_tree, error, exact, plain
from tests.attention.kernels import Guards, guarded, needs_interpreter

pytest.importorskip("triton", reason="Triton has no build for this system")

from labcore.attention import forward
from labcore.attention.configs import Config
from labcore.attention.forward import flash_forward

pytestmark = needs_interpreter
SMALL = Config(m=32, n=16)  # several tiles of each kind at these lengths


def check(query, key, value, pattern: Pattern, *, config: Config | None = SMALL, **lengths) -> None:
    out, lse = flash_forward(query, key, value, pattern=pattern, config=config, **lengths)
    _, wanted, wanted_lse = exact(query, key, value, pattern)
    assert error(out, wanted) < 1e-5
    assert error(lse, wanted_lse) < 1e-5
    blind = wanted_lse == -torch.inf
    assert (out[blind] == 0).all() and (lse[blind] == -torch.inf).all()


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize(("q_len", "k_len"), [(63, 75), (70, 31)])
def test_every_pattern_follows_the_law(band, q_len, k_len, generator) -> None:
    shape = {"batch": 1, "heads": 1, "q_len": q_len, "k_len": k_len}
    query, key, value = draw(generator, **shape, dtype=torch.float32)
    check(query, key, value, Pattern(scale=0.4, **band))


@pytest.mark.parametrize("length", [1, 31, 128, 257])
def test_awkward_lengths(length: int, generator) -> None:
    query, key, value = draw(generator, batch=1, heads=1, q_len=length, dtype=torch.float32)
    check(query, key, value, Pattern(scale=0.25, is_causal=True), config=None)


@pytest.mark.parametrize("dim", [1, 24, 80, 256])
def test_head_dimensions_are_padded_inside(dim: int, generator) -> None:
    shape = {"batch": 1, "heads": 1, "q_len": 20, "k_len": 50, "dim": dim}
    query, key, value = (guarded(x) for x in draw(generator, **shape, dtype=torch.float32))
    check(query, key, value, Pattern(scale=dim**-0.5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_are_within_twice_the_error_of_plain_torch(dtype, generator) -> None:
    query, key, value = draw(generator, batch=1, q_len=100, dim=32, dtype=dtype)
    pattern = Pattern(scale=32**-0.5, is_causal=True)
    out, lse = flash_forward(query, key, value, pattern=pattern)
    _, wanted, wanted_lse = exact(query, key, value, pattern)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert error(out, wanted) <= 2 * error(plain(query, key, value, pattern), wanted)
    assert error(lse, wanted_lse) < 1e-4


def test_heads_share_keys_by_group(generator) -> None:
    query, key, value = draw(
        generator, batch=1, heads=6, kv_heads=2, q_len=17, k_len=40, dtype=torch.float32
    )
    check(query, key, value, Pattern(scale=0.25), config=None)


@pytest.mark.parametrize("kind", ["fused qkv", "tokens first", "odd columns", "expanded"])
def test_any_strides(kind: str, generator) -> None:
    query, key, value = draw(generator, q_len=40, dtype=torch.float32)
    if kind == "fused qkv":  # [B, T, 3, H, D]
        joined = torch.stack([x.detach().transpose(1, 2) for x in (query, key, value)], dim=2)
        query, key, value = (x.transpose(1, 2) for x in joined.unbind(2))
    elif kind == "tokens first":  # [T, B, H, D]
        query, key, value = (
            x.detach().permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
            for x in (query, key, value)
        )
    elif kind == "odd columns":
        query = torch.stack((query.detach(), query.detach()), dim=-1)[..., 0]
        assert query.stride(3) == 2
    else:
        key, value = key[:1, :1].expand(2, 2, 40, 16), value[:1].expand(2, 2, 40, 16)
    check(query, key, value, Pattern(scale=0.3, is_causal=True), config=None)


def test_nothing_is_read_or_written_outside(generator, monkeypatch) -> None:
    guards = Guards()
    monkeypatch.setattr(forward, "new_heads", guards)
    for band in BANDS[1], BANDS[3]:
        leaves = draw(generator, batch=1, q_len=31, k_len=63, dim=20, dtype=torch.float32)
        check(*(guarded(x) for x in leaves), Pattern(scale=0.3, **band))
    assert guards.intact()


def test_packed_sequences_are_what_they_are_alone(generator) -> None:
    q_lens, k_lens = [5, 0, 40, 17], [33, 4, 0, 17]
    query, key, value = draw(
        generator, batch=1, q_len=sum(q_lens), k_len=sum(k_lens), dtype=torch.float32
    )
    pattern = Pattern(scale=0.4, is_causal=True, bottom_right=True)
    cu_q, cu_k = (torch.tensor([0, *lens]).cumsum(0).to(torch.int32) for lens in (q_lens, k_lens))
    lengths = {"cu_q": cu_q, "cu_k": cu_k, "max_q": 40, "max_k": 33}
    out, lse = flash_forward(query, key, value, pattern=pattern, config=SMALL, **lengths)
    for i in range(4):
        mine = slice(cu_q[i], cu_q[i + 1])
        keys = slice(cu_k[i], cu_k[i + 1])
        alone = query[:, :, mine], key[:, :, keys], value[:, :, keys]
        if k_lens[i] == 0:
            assert (out[:, :, mine] == 0).all() and (lse[:, :, mine] == -torch.inf).all()
        elif q_lens[i]:
            _, wanted, wanted_lse = exact(*alone, pattern)
            assert error(out[:, :, mine], wanted) < 1e-5
            assert error(lse[:, :, mine], wanted_lse) < 1e-5


def test_cumulative_lengths_may_be_strided(generator) -> None:
    tensors = draw(generator, batch=1, q_len=40, dtype=torch.float32)
    cu = torch.tensor([0, 3, 17, 40], dtype=torch.int32)
    column = torch.stack((cu, cu), dim=1)[:, 0]
    assert not column.is_contiguous()
    found, wanted = (
        flash_forward(*tensors, pattern=Pattern(scale=0.4), cu_q=x, cu_k=x, max_q=23, max_k=23)
        for x in (column, cu)
    )
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("prefix", [0, 50])
def test_trees(prefix: int, generator) -> None:
    nodes = 37  # more than one word of bits
    tree = draw_tree(generator, batch=2, nodes=nodes, padding=(0, 5))
    query, key, value = draw(
        generator, heads=1, q_len=nodes, k_len=prefix + nodes, dtype=torch.float32
    )
    check(query, key, value, Pattern(scale=0.4, tree=tree))


def test_a_large_score_does_not_overflow(generator) -> None:
    query, key, value = draw(generator, batch=1, q_len=40, dtype=torch.float32)
    query, key, pattern = 8 * query.detach(), 8 * key.detach(), Pattern(scale=1.0)
    out, lse = flash_forward(query, key, value, pattern=pattern)
    _, wanted, wanted_lse = exact(query, key, value, pattern)
    assert wanted_lse.max() > 300  # exp alone ends at 88
    assert error(out, wanted) < 1e-3
    assert error(lse / wanted_lse, torch.ones_like(lse)) < 1e-5
