"""FlashAttention as PyTorch custom operators, for autograd, torch.compile and opcheck.

The operators are opaque to a tracer, so this module selects the implementation and does all checks
that read a tensor's values. Packed sequences are a batch of 1: [1, H, total, D] and their
cumulative lengths.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from labcore.attention.arguments import check_parents
from labcore.attention.launch import new_heads, new_lse
from labcore.attention.online import tiled_backward, tiled_forward
from labcore.attention.pattern import Pattern
from labcore.device import choose_backend

__all__ = ["Settings", "backward", "forward"]

# The fields of `Settings` as a PyTorch operator schema.
SETTINGS = (
    "Tensor? tree, Tensor? cu_q, Tensor? cu_k, SymInt? max_q, SymInt? max_k, float scale, "
    "float? softcap, bool is_causal, bool bottom_right, SymInt? left, SymInt? right, str backend"
)


class Settings(NamedTuple):
    """The operators' arguments besides query, key and value; includes the fields of a Pattern."""

    tree: Tensor | None  # int32 [B, N]
    cu_q: Tensor | None  # int32 [sequences + 1]
    cu_k: Tensor | None
    max_q: int | None  # the longest sequence; None computes it from cu_q
    max_k: int | None
    scale: float
    softcap: float | None
    is_causal: bool
    bottom_right: bool
    left: int | None
    right: int | None
    backend: str

    def pattern(self) -> Pattern:
        """Return these settings' pattern."""
        return Pattern(
            scale=self.scale,
            softcap=self.softcap,
            is_causal=self.is_causal,
            bottom_right=self.bottom_right,
            window=(self.left, self.right),
            tree=self.tree,
        )

    def arguments(self, query: Tensor, key: Tensor, form: str) -> dict[str, Any]:
        """Return the keyword arguments of an implementation's forward and backward."""
        lengths: dict[str, Any] = {"cu_q": self.cu_q, "cu_k": self.cu_k}
        if form == "triton":
            for name, cu, longest, x in (
                ("max_q", self.cu_q, self.max_q, query),
                ("max_k", self.cu_k, self.max_k, key),
            ):
                lengths[name] = x.shape[2] if cu is None else longest
                if lengths[name] is None:
                    lengths[name] = int(cu.diff().max())  # type: ignore[union-attr]
        return {"pattern": self.pattern(), **lengths}

    def form(self, query: Tensor) -> str:
        """Return "triton" or "torch"; raises ValueError if "triton" is set but can't run."""
        if query.dtype != torch.float64:
            return choose_backend(self.backend, query, op="flash_attention")
        if self.backend == "triton":
            raise ValueError(
                "flash_attention: the kernels take float16, bfloat16 and float32, got float64; "
                "use backend='torch'"
            )
        return "torch"


@torch.library.custom_op(
    "labcore::flash_attention",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, {SETTINGS}) -> (Tensor, Tensor)",
)
def forward(query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    """Return out [B, H, T, D] and lse [B, H, T].

    query: [B, H, T, D]; key, value: [B, Hkv, S, D].
    """
    chosen = Settings(*settings)
    form = chosen.form(query)
    _check_values(query, key, chosen)
    if query.numel() == 0 or key.numel() == 0:
        return new_heads(query).zero_(), new_lse(query).fill_(-torch.inf)
    arguments = chosen.arguments(query, key, form)
    # Autocast must not change the precision of the products.
    with torch.autocast(query.device.type, enabled=False):
        if form == "torch":
            return tiled_forward(query, key, value, **arguments)
        from labcore.attention.forward import flash_forward

        return flash_forward(query, key, value, **arguments)


@forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return new_heads(query), new_lse(query)


@torch.library.custom_op(
    "labcore::flash_attention_backward",
    mutates_args=(),
    schema=(
        "(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, "
        f"Tensor lse, {SETTINGS}) -> (Tensor, Tensor, Tensor)"
    ),
)
def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, as described in `online.tiled_backward`."""
    chosen = Settings(*settings)
    form = chosen.form(query)
    if query.numel() == 0 or key.numel() == 0:
        query, key, value = (new_heads(x).zero_() for x in (query, key, value))
        return query, key, value
    if grad_lse is not None:
        grad_lse = grad_lse.masked_fill(lse == -torch.inf, 0)  # such an lse depends on no key
    arguments = chosen.arguments(query, key, form)
    with torch.autocast(query.device.type, enabled=False):
        if form == "torch":
            return tiled_backward(
                grad_out, query, key, value, out, lse, grad_lse=grad_lse, **arguments
            )
        from labcore.attention.backward import flash_backward

        return flash_backward(grad_out, query, key, value, out, lse, grad_lse=grad_lse, **arguments)


@backward.register_fake
def _(
    grad_out: Tensor,  # noqa: ARG001
    grad_lse: Tensor | None,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *others: Any,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:
    return new_heads(query), new_heads(key), new_heads(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, *settings = inputs
    tree, cu_q, cu_k, *ctx.settings = settings
    ctx.save_for_backward(query, key, value, *output, tree, cu_q, cu_k)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    *saved, tree, cu_q, cu_k = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(saved[3])
    grads = backward(grad_out, grad_lse, *saved, tree, cu_q, cu_k, *ctx.settings)
    return (*grads, *[None] * len(Settings._fields))


def _refuse(ctx: Any, *grads: Tensor) -> None:  # noqa: ARG001
    raise RuntimeError(
        "flash_attention can be differentiated at most once, got a request for the gradient of a "
        "gradient; use labcore.attention.safe_attention, which stores all scores"
    )


forward.register_autograd(_differentiate, setup_context=_keep)
backward.register_autograd(_refuse)


def _check_values(query: Tensor, key: Tensor, chosen: Settings) -> None:
    """Raise ValueError for invalid parents or lengths; skipped on a GPU to avoid a sync."""
    if chosen.tree is not None:
        check_parents(chosen.tree)
    if query.device.type != "cpu":
        return
    for name, cu, longest, x in (
        ("q", chosen.cu_q, chosen.max_q, query),
        ("k", chosen.cu_k, chosen.max_k, key),
    ):
        if cu is None:
            continue
        lengths = cu.diff()
        if int(cu[0]) != 0 or int(cu[-1]) != x.shape[2] or bool((lengths < 0).any()):
            raise ValueError(
                f"cu_seqlens_{name} must rise from 0 to the {x.shape[2]} packed tokens, "
                f"got {cu.tolist()}; pass the cumulative sum of the lengths, starting with 0"
            )
        if longest is not None and lengths.numel() and int(lengths.max()) > longest:
            raise ValueError(
                f"max_seqlen_{name} must be at least the longest sequence, {int(lengths.max())}, "
                f"got {longest}; leave it out to have it computed"
            )
