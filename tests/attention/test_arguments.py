"""What the doors of attention refuse, and that the sentence says what to do."""

import pytest
import torch

from labcore.attention import flash_attention, flash_attention_varlen


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


Q = x(2, 4, 5, 16)
REFUSED = [
    ((Q, Q, None), {}, TypeError, "value must be a torch.Tensor"),
    ((Q.int(), Q, Q), {}, TypeError, "query must be floating point"),
    ((Q[0], Q, Q), {}, ValueError, "query must have shape"),
    ((Q, Q.half(), Q), {}, TypeError, "share one device and one dtype"),
    ((Q.to(torch.float8_e5m2),) * 3, {}, TypeError, "one dtype of float16"),
    ((Q, Q, x(2, 4, 6, 16)), {}, ValueError, r"key and value .*value \(2, 4, 6, 16\)"),
    ((Q, *[x(2, 4, 5, 8)] * 2), {}, ValueError, "share a head dimension"),
    ((x(1, 1, 2, 257),) * 3, {}, ValueError, "1 to 256"),
    ((Q, *[x(1, 4, 5, 16)] * 2), {}, ValueError, r"batch size B.*query \(2.*key \(1,"),
    ((Q, *[x(2, 2, 5, 16)] * 2), {}, ValueError, "set enable_gqa=True"),
    ((Q, *[x(2, 3, 5, 16)] * 2), {"enable_gqa": True}, ValueError, "multiple of the key's"),
    ((Q, Q, Q), {"causal_alignment": "bottom"}, ValueError, "did you mean 'bottom_right'"),
    ((Q, Q, Q), {"scale": 0.0}, ValueError, "scale must be a finite number above 0"),
    ((Q, Q, Q), {"softcap": -1.0}, ValueError, "softcap must be"),
    ((Q, Q, Q), {"window": (-1, 0)}, ValueError, r"window.*\(-1, 0\)"),
    ((Q, Q, Q), {"window": 3}, ValueError, "window must be a tuple"),
    ((Q, Q, Q), {"backend": "cuda"}, ValueError, "backend must be one of"),
    ((Q.double(),) * 3, {"backend": "triton"}, ValueError, "got float64"),
    ((Q, Q, Q), {"dropout_p": 1.0}, ValueError, "dropout_p must be at least 0 and below 1"),
    ((Q, Q, Q), {"attn_mask": x(5, 4)}, ValueError, r"broadcast to \[B, H, T, S\]"),
    ((Q, Q, Q), {"attn_mask": x(5, 5).int()}, TypeError, "attn_mask.*torch.int32"),
    ((Q, Q, Q), {"attn_mask": x(5, 5).to("meta")}, ValueError, "query's device"),
    ((Q, Q, Q), {"tree": x(2, 5)}, TypeError, "tree must be a tensor of int32"),
    ((Q, Q, Q), {"tree": x(2, 4).int()}, ValueError, "a parent for each query"),
    ((Q, Q[:, :, :4], Q[:, :, :4]), {"tree": x(2, 5).int()}, ValueError, "the last T keys"),
    ((Q, Q, Q), {"tree": x(2, 5).int()}, ValueError, "order the nodes"),
    ((Q, Q, Q), {"tree": x(2, 5).int(), "attn_mask": x(5, 5)}, ValueError, "parents come first"),
    ((Q, Q, Q), {"tree": torch.tensor([[-1, -2, 1, -2, -2]] * 2)}, ValueError, "padding last"),
    ((Q, Q, Q), {"tree": x(2, 5).int(), "is_causal": True}, ValueError, "tree.*is_causal"),
]


@pytest.mark.parametrize("tensors, keywords, kind, words", REFUSED, ids=[r[3] for r in REFUSED])
def test_the_door_says_what_does_not_fit(tensors, keywords, kind, words) -> None:
    with pytest.raises(kind, match=words):
        flash_attention(*tensors, **keywords)


def cu(*ends: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(ends, dtype=dtype)


@pytest.mark.parametrize(
    "lengths, keywords, kind, words",
    [
        ((cu(0, 3, 7), cu(0, 3, 7).long()), {}, TypeError, "cu_seqlens_k.*torch.int64"),
        ((cu(0, 3, 7), cu(0, 7)), {}, ValueError, r"cu_seqlens_k.*\(3,\) and \(2,\)"),
        ((cu(0, 3, 7), cu(0, 3, 6)), {}, ValueError, "cu_seqlens_k must rise from 0 to the 7"),
        ((cu(1, 3, 7), cu(0, 3, 7)), {}, ValueError, "cu_seqlens_q must rise"),
        ((cu(0, 8, 7), cu(0, 3, 7)), {}, ValueError, "cu_seqlens_q must rise"),
        ((cu(0, 3, 7), cu(0, 3, 7)), {"max_seqlen_k": 3}, ValueError, "max_seqlen_k must be at"),
        ((cu(0, 3, 7), cu(0, 3, 7)), {"max_seqlen_q": 0}, ValueError, "max_seqlen_q must be at"),
    ],
    ids=str,
)
def test_the_packed_door_says_what_does_not_fit(lengths, keywords, kind, words) -> None:
    tensors = (x(7, 2, 16),) * 3
    flash_attention_varlen(*tensors, cu(0, 3, 7), cu(0, 3, 7))
    with pytest.raises(kind, match=words):
        flash_attention_varlen(*tensors, *lengths, **keywords)
    with pytest.raises(ValueError, match="query must have shape"):
        flash_attention_varlen(x(1, 7, 2, 16), *tensors[1:], *lengths)
