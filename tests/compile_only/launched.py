"""Launches of random shapes, for a process without Triton's interpreter."""

import random

import torch

from labcore.attention import flash_attention, flash_attention_varlen, paged_attention
from labcore.compile_only.launches import launching, programs


def inputs(draw: random.Random, layout: str, tokens: int, heads: tuple[int, int], head_dim: int):
    """Return q, k and v [B, H, T, D] as rows of a projection, or as some other layout."""
    batch, (q_heads, kv_heads) = draw.randint(1, 3), heads
    if layout == "fused rows":
        width = (q_heads + 2 * kv_heads) * head_dim
        rows = torch.zeros(batch, tokens, width, dtype=torch.bfloat16, requires_grad=True)
        parts = rows.unflatten(2, (-1, head_dim)).split([q_heads, kv_heads, kv_heads], 2)
        return [part.transpose(1, 2) for part in parts]
    shapes = [(batch, count, tokens, head_dim) for count in (q_heads, kv_heads, kv_heads)]
    if layout == "BHTD":
        return [torch.zeros(s, dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    return [
        torch.zeros(b, t, h, d, dtype=torch.bfloat16, requires_grad=True).transpose(1, 2)
        for b, h, t, d in shapes
    ]


def random_launches(target: str, seed: int) -> list[str]:
    """Return the programs that some calls of common head dimensions and any shape launch."""
    draw = random.Random(seed)
    with launching(target) as found:
        for _ in range(8):
            kv_heads = draw.randint(1, 3)
            heads = (kv_heads * draw.choice((1, 1, 2, 3, 7)), kv_heads)
            tokens, head_dim = draw.randint(2, 90), draw.choice((64, 128))
            q, k, v = inputs(
                draw, draw.choice(("fused rows", "BHTD", "BTHD")), tokens, heads, head_dim
            )
            given = draw.choice(
                [{}, {"is_causal": True}, {"softcap": 5.0}, {"window": (draw.randint(0, 99), 3)}]
            )
            flash_attention(
                q, k, v, enable_gqa=True, scale=draw.random() + 0.1, backend="triton", **given
            ).sum().backward()
            lengths = [draw.randint(0, tokens) for _ in range(draw.randint(1, 4))]
            starts = torch.tensor([0, *lengths]).cumsum(0).int()
            packed = torch.zeros(
                sum(lengths) or 1, heads[1], head_dim, dtype=torch.bfloat16, requires_grad=True
            )
            if sum(lengths):
                flash_attention_varlen(
                    packed, packed, packed, starts, starts, is_causal=draw.random() < 0.5,
                    backend="triton",
                ).sum().backward()  # fmt: skip
            pages = torch.zeros(5, 16, kv_heads, 128, dtype=torch.bfloat16)
            table = torch.zeros(3, draw.randint(1, 9), dtype=torch.int32)
            lengths = torch.full((3,), draw.randint(0, 16), dtype=torch.int32)
            query = torch.zeros(3, kv_heads * draw.choice((1, 4, 8)), 1, 128, dtype=torch.bfloat16)
            paged_attention(
                query, pages, pages, table, lengths, splits=draw.randint(1, 128), backend="triton"
            )
    return list(found)


def of_width(target: str, width: int, layout: str) -> list[str]:
    """Return the programs of causal attention with heads of 128 in rows of `width` elements."""
    heads = width // 3 // 128 if layout == "fused rows" else width // 128
    with launching(target) as found:
        q, k, v = inputs(random.Random(0), layout, 33, (heads, heads), 128)
        flash_attention(q, k, v, is_causal=True, backend="triton").sum().backward()
    return list(found)


def odd(target: str) -> list[str]:
    """Return the programs of inputs whose addresses or strides are no multiples of 16."""
    with launching(target) as found:
        x = torch.zeros(2 * 40 * 64 + 1, dtype=torch.bfloat16)
        flash_attention(*[x[1:].view(1, 2, 40, 64)] * 3, backend="triton")
        x = torch.zeros(1, 2, 40, 68, dtype=torch.bfloat16)[..., :64]
        flash_attention(x, x, x, backend="triton")
    return list(found)


def large(target: str) -> list[str]:
    """Return the programs of decoding from pages in over 2 GiB, which take no memory unread."""
    with launching(target) as found:
        room = torch.empty((1 << 30) + 8, dtype=torch.bfloat16)
        pages = room[: 5 * 16 * 2 * 128].view(5, 16, 2, 128)
        table = torch.zeros(3, 4, dtype=torch.int32)
        query = torch.zeros(3, 16, 1, 128, dtype=torch.bfloat16)
        lengths = torch.full((3,), 9, dtype=torch.int32)
        paged_attention(query, pages, pages, table, lengths, backend="triton")
    return list(found)


def attributes(*targets: str) -> list[list[str]]:
    """Return what a kernel of each target knows of its queries, one target after another."""
    found = []
    for target in targets:
        program = programs(target)["dq_kernel/bfloat16-d64"]
        at = program.kernel.arg_names.index("q_ptr")
        found.append([str(name) for name, _ in program.attributes[at,]])
    return found
