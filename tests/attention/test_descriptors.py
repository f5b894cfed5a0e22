"""The kernel with tensor descriptors: right for any shape, and taken where it can run."""

import pytest
import torch

from labcore.attention import Pattern, descriptors, forward
from labcore.attention.configs import Config
from labcore.attention.descriptors import described_forward, suits
from labcore.attention.forward import flash_forward
from labcore.attention.launch import new_heads, new_lse
from tests.attention.cases import draw, error, exact, plain
from tests.attention.kernels import needs_interpreter

SMALL = Config(m=32, n=16)
BANDS = [{}, {"is_causal": True}, {"is_causal": True, "bottom_right": True}]


def run(leaves, pattern: Pattern, config: Config = SMALL):
    q, k, v = (x.detach() for x in leaves)
    out, lse = new_heads(q).fill_(torch.nan), new_lse(q).fill_(torch.nan)
    described_forward(q, k, v, out, lse, pattern=pattern, config=config)
    return out, lse


@needs_interpreter
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize(("q_len", "k_len"), [(1, 1), (45, 70), (70, 45), (96, 32), (33, 129)])
def test_every_length_follows_the_law(band, q_len: int, k_len: int, generator) -> None:
    shape = {"batch": 2, "heads": 6, "kv_heads": 2, "dim": 24}
    leaves = draw(generator, q_len=q_len, k_len=k_len, **shape, dtype=torch.float32)
    pattern = Pattern(scale=0.4, **band)
    _, out, lse = exact(*leaves, pattern)
    ours = run(leaves, pattern)
    assert error(ours[0], out) < 2e-6 and error(ours[1], lse) < 5e-6


@needs_interpreter
def test_16_bits_are_within_twice_the_error_of_plain_torch(generator) -> None:
    leaves = draw(generator, q_len=100, dim=64, dtype=torch.float16)
    pattern = Pattern(scale=0.125, is_causal=True)
    _, out, _ = exact(*leaves, pattern)
    theirs = error(plain(*leaves, pattern), out)
    assert error(run(leaves, pattern)[0], out) <= 2 * theirs


@needs_interpreter
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("fit", [0, 1, 2, 100])
def test_heads_are_taken_in_sections(fit: int, is_causal: bool, generator, monkeypatch) -> None:
    """However many heads' keys fit into the cache, each block is computed once."""
    monkeypatch.setattr(descriptors, "CACHED", fit * 2 * 50 * 16 * 4)
    leaves = draw(generator, batch=3, heads=6, kv_heads=3, q_len=70, k_len=50, dtype=torch.float32)
    pattern = Pattern(scale=0.25, is_causal=is_causal)
    _, out, _ = exact(*leaves, pattern)
    assert error(run(leaves, pattern)[0], out) < 2e-6


def test_a_causal_mask_gives_each_block_a_program(monkeypatch) -> None:
    """Blocks of different lengths are dealt out by the GPU, equal ones by a fixed assignment."""
    launched: list[int] = []
    monkeypatch.setattr(
        descriptors, "launch", lambda _, programs, *__, **___: launched.append(programs)
    )
    q = torch.zeros(2, 3, 70, 16)
    for pattern in (Pattern(scale=1.0, is_causal=True), Pattern(scale=1.0)):
        described_forward(q, q, q, q, q[..., 0], pattern=pattern, config=SMALL)
    assert launched == [2 * 3 * 3, 4]


def test_a_section_has_no_more_heads_than_there_are(monkeypatch) -> None:
    """Its heads times blocks are counted in 32 bits, and short rows would let millions fit."""
    given: dict = {}
    monkeypatch.setattr(descriptors, "launch", lambda *_, **named: given.update(named))
    q, k = torch.zeros(2, 64, 3, 16), torch.zeros(2, 2, 1, 16)
    described_forward(q, k, k, q, q[..., 0], pattern=Pattern(scale=1.0))
    assert given["section"] == 2 * 64


@needs_interpreter
def test_a_hopper_gpu_takes_it_where_it_can(generator, monkeypatch) -> None:
    monkeypatch.setattr(forward, "kind_of", lambda _: "hopper")
    seen = []

    def counted(*tensors, **given) -> None:
        seen.append(tensors[0].shape)
        described_forward(*tensors, **given)

    monkeypatch.setattr(descriptors, "described_forward", counted)
    leaves = draw(generator, batch=1, q_len=130, dim=64, dtype=torch.float16)
    for band, taken in (({"is_causal": True}, 1), ({"window": (9, 0)}, 0), ({"softcap": 2.0}, 0)):
        seen.clear()
        pattern = Pattern(scale=0.125, **band)
        _, out, lse = exact(*leaves, pattern)
        ours = flash_forward(*leaves, pattern=pattern, max_q=130, max_k=130)
        assert error(ours[0], out) < 3e-3 and error(ours[1], lse) < 1e-5
        assert len(seen) == taken


def test_what_suits_it() -> None:
    x = torch.zeros(2, 3, 8, 64, dtype=torch.bfloat16)
    causal = Pattern(scale=1.0, is_causal=True)
    assert suits(x, x, x, causal, "hopper") and suits(x, x, x, Pattern(scale=1.0), "blackwell")
    assert suits(*[x.transpose(1, 2).contiguous().transpose(1, 2)] * 3, causal, "hopper")
    wide, odd = torch.zeros(2, 3, 8, 136, dtype=torch.bfloat16), x[..., :60].contiguous()
    shifted = torch.zeros(x.numel() + 1, dtype=torch.bfloat16)[1:].view(x.shape)
    parents = torch.zeros(2, 8, dtype=torch.int32)
    refused = [
        (x, causal, "ampere"),
        (x, causal, "cdna"),
        (x.float(), causal, "hopper"),
        (wide, causal, "hopper"),
        (odd, causal, "hopper"),
        (x[..., :60], causal, "hopper"),  # its own rows are in place, its result's are not
        (shifted, causal, "hopper"),
        (x[:1].expand(2, -1, -1, -1), causal, "hopper"),
        (x, Pattern(scale=1.0, window=(5, 0)), "hopper"),
        (x, Pattern(scale=1.0, window=(None, 3)), "hopper"),
        (x, Pattern(scale=1.0, softcap=5.0), "hopper"),
        (x, Pattern(scale=1.0, tree=parents), "hopper"),
    ]
    for tensor, pattern, kind in refused:
        assert not suits(tensor, tensor, tensor, pattern, kind)
