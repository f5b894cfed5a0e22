"""Sequences scattered over pages, and the truth about them one query at a time."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from labcore import device
from labcore.attention import paged

interpreted = pytest.mark.skipif(
    not device.interpreting(), reason="needs Triton's interpreter, which a machine with a GPU lacks"
)
FORMS = pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=interpreted)])


@dataclass
class Scattered:
    """Keys and values of some sequences, in pages whose other slots hold NaN."""

    keys: list[Tensor]  # [S, Hkv, D] of each sequence, fp64
    values: list[Tensor]
    key_pages: Tensor  # [P, page, Hkv, D]
    value_pages: Tensor
    block_table: Tensor  # int32 [B, max_pages], -1 where a sequence has no page
    lengths: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.key_pages, self.value_pages, self.block_table, self.lengths


def scatter(
    lengths: list[int],
    *,
    page: int,
    kv_heads: int,
    head_dim: int,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
    spare: int = 3,
) -> Scattered:
    """Random keys and values in pages of random order, `spare` pages a table more than needed."""
    counts = [-(-length // page) for length in lengths]
    pool = torch.randperm(sum(counts) + spare, generator=generator)
    table = torch.full((len(lengths), max(counts) + spare), -1, dtype=torch.int32)
    size = (len(pool), page, kv_heads, head_dim)
    pages = [torch.full(size, math.nan, dtype=dtype) for _ in range(2)]
    kept: tuple[list[Tensor], list[Tensor]] = ([], [])
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        mine, pool = pool[:count], pool[count:]
        table[row, :count] = mine
        for stored, side in zip(pages, kept, strict=True):
            values = torch.randn(length, kv_heads, head_dim, generator=generator).to(dtype)
            places = torch.arange(length)
            stored[mine[places // page], places % page] = values
            side.append(values.double())
    return Scattered(*kept, *pages, table, torch.tensor(lengths, dtype=torch.int32))


def truth(
    query: Tensor,
    held: Scattered,
    seen: list[list[list[int]]],
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse in fp64: query t of sequence b attends to the keys seen[b][t] and no others."""
    batch, heads, queries, head_dim = query.shape
    out = torch.zeros(query.shape, dtype=torch.float64)
    lse = torch.full(query.shape[:3], -math.inf, dtype=torch.float64)
    group = heads // held.key_pages.shape[2]
    for b in range(batch):
        for t in range(queries):
            if not seen[b][t]:
                continue
            k = held.keys[b][seen[b][t]].repeat_interleave(group, dim=1)  # [S, H, D]
            v = held.values[b][seen[b][t]].repeat_interleave(group, dim=1)
            scores = torch.einsum("hd,shd->hs", query[b, :, t].double(), k)
            scores = scores * (1 / math.sqrt(head_dim) if scale is None else scale)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            lse[b, :, t] = scores.logsumexp(-1)
            out[b, :, t] = torch.einsum("hs,shd->hd", scores.softmax(-1), v)
    return out, lse


def causal(
    lengths: list[int], queries: int, *, counts: list[int] | None = None, left: int | None = None
) -> list[list[list[int]]]:
    """The last counts[b] keys are the queries' own; each sees the keys up to its own."""
    seen = []
    for length, count in zip(lengths, counts or [queries] * len(lengths), strict=True):
        own = [length - count + t for t in range(count)]
        rows = [list(range(0 if left is None else max(0, at - left), max(at + 1, 0))) for at in own]
        seen.append(rows + [[]] * (queries - count))
    return seen


def paths(
    lengths: list[int], parents: Tensor, *, counts: list[int] | None = None
) -> list[list[list[int]]]:
    """What plain attention along each node's own path sees: the prefix, then the path."""
    seen = []
    for b, length in enumerate(lengths):
        count = parents.shape[1] if counts is None else counts[b]
        prefix = length - count
        rows: list[list[int]] = []
        for n in range(parents.shape[1]):
            path, node = [], n
            while node >= 0:
                path.append(prefix + node)
                node = int(parents[b, node])
            alone = n < count and node == -1
            own = [key for key in sorted(path) if key >= 0]  # a sequence may lack its first nodes
            rows.append([*range(prefix), *own] if alone else [])
        seen.append(rows)
    return seen


def gap(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> float:
    """The largest difference of outputs and log-sum-exps; equal infinities differ by nothing."""
    out = (found[0].double() - wanted[0]).abs().max()
    lse = torch.where(found[1] == wanted[1], 0, found[1] - wanted[1]).abs().max()
    return math.inf if out.isnan() or lse.isnan() else float(torch.maximum(out, lse))


def queries(held: Scattered, heads: int, tokens: int, generator: torch.Generator) -> Tensor:
    shape = (len(held.lengths), heads, tokens, held.key_pages.shape[3])
    return torch.randn(shape, generator=generator).to(held.key_pages.dtype)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The forms that run from now on."""
    seen: list[str] = []

    def watch(module: object, name: str, form: str) -> None:
        original = getattr(module, name)

        def run(*arguments, **keywords):
            seen.append(form)
            return original(*arguments, **keywords)

        monkeypatch.setattr(module, name, run)

    watch(paged, "_torch_form", "torch")
    if device.triton_problem() is None:
        from labcore.attention import decode

        watch(decode, "split_decode", "triton")
    return seen
