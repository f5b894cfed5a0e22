"""SM3: bounds each weight's second moment with one number per row and one per column."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from labcore import checks
from labcore.optim.chunked import CHUNK
from labcore.optim.rules import Scalar, State
from labcore.optim.shell import Item, Layout, is_plain, layout_bytes
from labcore.optim.tensorwise import TensorShell, state_dtype

__all__ = ["SM3", "sm3"]


def sm3(
    param: Tensor,
    grad: Tensor,
    state: State,
    *,
    lr: Scalar,
    momentum: Scalar = 0.0,
    weight_decay: float = 0.0,
) -> tuple[Tensor, State]:
    """AdaGrad that keeps only the maxima of its sums of g² over slices (SM3-II).

    Each dimension has a cover, with one number per slice. A weight's bound v comes from the
    smallest number among the slices that contain it:

    - `v = min over dimensions of cover + g²`, at least the sum of all g² so far;
    - each cover becomes the maximum of v over its slice;
    - `u = g / √v` (0 where v is 0), `m ← momentum m + (1 − momentum) u`;
    - `p ← (1 − lr weight_decay) p − lr m`.

    With fewer than two dimensions, the only cover is v itself, which is AdaGrad.

    Args: param and grad, with the same shape and at least one element; lr, in units of param;
    momentum, in [0, 1), where 0 keeps no m; weight_decay, per unit of lr. State: `cover_0`
    [n, 1, ...], `cover_1` [1, m, ...] and so on, and `momentum_buffer` [shape of param] if momentum
    is not 0.
    Source: Anil, Gupta, Koren and Singer, "Memory-efficient adaptive optimization",
    arXiv 1901.11150.
    """
    names = _names(param.dim())
    bound = torch.zeros_like(param)
    if names[0] in state:  # read all covers before updating any
        bound = _least([state[name] for name in names], bound)
    bound = bound + grad * grad
    update = grad * bound.clamp(min=torch.finfo(param.dtype).tiny).rsqrt()
    kept: State = {name: _cover(bound, i) for i, name in enumerate(names)}
    before = state.get("momentum_buffer")
    if momentum or before is not None:
        before = torch.zeros_like(param) if before is None else before
        kept["momentum_buffer"] = update = momentum * before + (1 - momentum) * update
    return param * (1 - lr * weight_decay) - lr * update, kept


class SM3(TensorShell):
    """SM3-II (Anil et al., arXiv 1901.11150), with the slices along each dimension as covers.

    See `sm3` for the rule. The state of an n by m matrix is n + m numbers, plus n m more if
    momentum is not 0. It is float32 for bfloat16 and float16 parameters and float64 for float64
    parameters. As in AdaGrad, the bounds never decrease: use learning rate warmup; decay should not
    be needed.

    A NaN or infinite gradient makes its weight NaN and, starting with the next step, the slices
    that contain it.

    Args:
        params: parameters, named parameters, or parameter groups.
        lr: learning rate, at least 0. A one-element tensor is read at every step.
        momentum: the fraction of the averaged update that a step keeps, in [0, 1). The paper trains
            with 0.9; 0 keeps no state for it.
        weight_decay: decoupled weight decay λ, per unit of lr.
        maximize: maximize the objective. The gradient itself never changes.
        foreach: None or True uses blocks for big tensors on a CPU and batches of torch's _foreach
            operations for others. False uses a plain loop.
        master_weights: keep a float32 copy of bfloat16 and float16 parameters in the state.
        stochastic_rounding: round bfloat16 parameters stochastically, without bias.
        generator: the random generator for rounding, on the parameters' device; None for torch's
            default. The caller must save its state.
        nonfinite: what to do about a NaN or infinite gradient. "propagate" makes weights NaN,
            "raise" raises RuntimeError before any weight changes, and "skip" skips the parameter's
            step and counts it in `optimizer.skipped`.

    Errors: ValueError and TypeError for settings and complex parameters, RuntimeError for sparse
    gradients. capturable and differentiable are not supported.
    """

    rule = staticmethod(sm3)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        generator: torch.Generator | None = None,
        nonfinite: str = "propagate",
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "foreach": foreach,
            "maximize": maximize,
            "master_weights": master_weights,
            "stochastic_rounding": stochastic_rounding,
            "nonfinite": nonfinite,
        }
        super().__init__(params, defaults, generator)

    @staticmethod
    def state_bytes(
        shape: Sequence[int], dtype: torch.dtype = torch.float32, *, momentum: float = 0.0
    ) -> int:
        """Return the bytes of state for a parameter of this shape and dtype, without a master."""
        return layout_bytes(_layout(tuple(shape), dtype, momentum))

    def _check_group(self, group: dict[str, Any]) -> None:
        checks.fraction("momentum", group["momentum"])
        super()._check_group(group)

    def _layout(self, group: dict[str, Any], param: Tensor) -> Layout:
        return _layout(tuple(param.shape), param.dtype, group["momentum"])

    def _saved_layout(self, group: dict[str, Any], param: Tensor, entry: dict[str, Any]) -> Layout:
        # A schedule may have turned the momentum on or off since the state was made.
        return self._layout({**group, "momentum": float("momentum_buffer" in entry)}, param)

    def _loaded(
        self, group: dict[str, Any], param: Tensor, saved: dict[str, Any]
    ) -> dict[str, Tensor]:
        momentum = group["momentum"] or float("momentum_buffer" in saved)
        return super()._loaded({**group, "momentum": momentum}, param, saved)

    def _hyperparameters(self, group: dict[str, Any], *, tensors: bool = False) -> dict[str, Any]:
        return {
            "lr": group["lr"] if tensors else float(group["lr"]),
            "momentum": group["momentum"],
            "weight_decay": group["weight_decay"],
        }

    def _item(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Item:
        state = self.state[param]
        if state and group["momentum"] and "momentum_buffer" not in state:
            # A schedule turned the momentum on after the first step.
            state["momentum_buffer"] = torch.zeros_like(param, dtype=state["cover_0"].dtype)
        return super()._item(group, param, grad)

    def _block_step(
        self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        hyper = self._hyperparameters(group)
        momentum, lr = hyper["momentum"], hyper["lr"]
        source, buffer = state.get("master", param), state.get("momentum_buffer")
        first, *others = (state[name] for name in _names(param.dim()))
        if param.dim() == 0:
            param, grad, source, first = (t.unsqueeze(0) for t in (param, grad, source, first))
            buffer = None if buffer is None else buffer.unsqueeze(0)
        renewed = [torch.zeros_like(cover) for cover in others]
        rows = max(1, CHUNK * len(param) // param.numel())
        scratch = torch.empty(grad[:rows].shape, dtype=first.dtype)
        tiny, keep = torch.finfo(first.dtype).tiny, 1 - lr * hyper["weight_decay"]
        for start in range(0, len(param), rows):
            where = slice(start, start + rows)
            piece, cover, weight = grad[where].to(first.dtype), first[where], source[where]
            weight = weight.to(first.dtype)
            bound = _least([cover, *others], scratch[: len(piece)])
            bound.addcmul_(piece, piece)
            cover.copy_(_cover(bound, 0))
            for i, new in enumerate(renewed, 1):
                torch.maximum(new, _cover(bound, i), out=new)
            update = bound.clamp_(min=tiny).rsqrt_().mul_(piece)
            if group["maximize"]:
                update.neg_()
            if buffer is not None:
                update = buffer[where].lerp_(update, 1 - momentum)
            if keep != 1:
                weight.mul_(keep)
            weight.add_(update, alpha=-lr)
            if weight.dtype != param.dtype:
                self._store(group, param[where], weight)
        for old, new in zip(others, renewed, strict=True):
            old.copy_(new)

    def _foreach(self, group: dict[str, Any], items: list[Item]) -> bool:
        # After momentum is turned off, only parameters with earlier state have a buffer.
        buffered = {"momentum_buffer" in state for _, _, state in items}
        if not is_plain(items) or len(buffered) > 1:
            return False
        hyper = self._hyperparameters(group)
        params, grads = [item[0] for item in items], [item[1] for item in items]
        if group["maximize"]:
            grads = list(torch._foreach_neg(grads))
        covers = [[state[name] for name in _names(param.dim())] for param, _, state in items]
        bounds = [_least(c, torch.empty_like(p)) for c, p in zip(covers, params, strict=True)]
        torch._foreach_addcmul_(bounds, grads, grads)
        for bound, mine in zip(bounds, covers, strict=True):
            for i, cover in enumerate(mine):
                cover.copy_(_cover(bound, i))
        torch._foreach_clamp_min_(bounds, torch.finfo(params[0].dtype).tiny)
        torch._foreach_rsqrt_(bounds)
        torch._foreach_mul_(bounds, grads)
        if True in buffered:
            buffers = [state["momentum_buffer"] for _, _, state in items]
            torch._foreach_lerp_(buffers, bounds, 1 - hyper["momentum"])
            bounds = buffers
        if hyper["weight_decay"]:
            torch._foreach_mul_(params, 1 - hyper["lr"] * hyper["weight_decay"])
        torch._foreach_add_(params, bounds, alpha=-hyper["lr"])
        return True


def _names(dimensions: int) -> list[str]:
    return [f"cover_{i}" for i in range(max(1, dimensions))]


def _layout(shape: tuple[int, ...], dtype: torch.dtype, momentum: float) -> Layout:
    kept = state_dtype(dtype)
    layout: Layout = {
        name: (tuple(n if j == i else 1 for j, n in enumerate(shape)), kept)
        for i, name in enumerate(_names(len(shape)))
    }
    if momentum:
        layout["momentum_buffer"] = (shape, kept)
    return layout


def _least(covers: Sequence[Tensor], out: Tensor) -> Tensor:
    """Write the smallest cover of each weight into `out` [the weights' shape]."""
    *some, last = covers
    if not some:
        return out.copy_(last)
    return torch.minimum(functools.reduce(torch.minimum, some), last, out=out)


def _cover(bound: Tensor, dimension: int) -> Tensor:
    """Return the maximum of `bound` over each slice of one dimension; other sizes become 1."""
    over = [i for i in range(bound.dim()) if i != dimension]
    return bound.amax(over, keepdim=True) if over else bound
