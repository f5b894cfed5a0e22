"""Adafactor: stores a matrix's second moments as the means of its rows and columns."""

from collections.abc import Iterable, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from labcore import checks
from labcore.optim.chunked import CHUNK
from labcore.optim.rules import Scalar, State
from labcore.optim.shell import Item, Layout, is_plain, layout_bytes
from labcore.optim.tensorwise import TensorShell, state_dtype

__all__ = ["Adafactor", "adafactor"]

Piece = tuple[slice, slice]  # which matrices of a batch, which of their rows


def adafactor(
    param: Tensor,
    grad: Tensor,
    state: State,
    *,
    lr: Scalar = 1e-2,
    beta2_decay: float = -0.8,
    eps1: float | None = None,
    eps2: float = 1e-3,
    d: float = 1.0,
    weight_decay: float = 0.0,
) -> tuple[Tensor, State]:
    """Divide by a rank-one second moment, scale the step by the weights, and clip the update.

    At step t, with `w = t^beta2_decay` (1 on the first step) and RMS the root mean square:

    - `r ← r + w (mean of g² over columns − r)`, `c ← c + w (mean of g² over rows − c)`,
      `v = r c / mean(r)`; a tensor with fewer than two dimensions keeps v itself;
    - `u = g / √v`, then `u ← u / max(1, RMS(u) / d)`;
    - `p ← (1 − lr weight_decay) p − max(eps2, RMS(p)) min(lr, 1/√t) u`.

    With more than two dimensions, the last two are the matrix. As in torch, `mean(r)` and √v are at
    least eps1; None means the machine epsilon of the dtype. The paper adds 1e-30 to g² instead. A
    small eps1 works as well, because v is never below the smallest normal number.

    Args: param and grad, with the same shape and at least one element; lr, the largest relative
    step and the unit of weight_decay; beta2_decay, at most 0; eps1, in units of the gradient; eps2,
    the floor of RMS(p); d, the largest RMS of an update.
    State: `step`, and `row_var` [..., n, 1] with `col_var` [..., 1, m], or `variance`.
    Source: Shazeer and Stern, "Adafactor: adaptive learning rates with sublinear memory cost",
    arXiv 1804.04235.
    """
    step = state.get("step", 0) + 1
    weight = step**beta2_decay
    eps1, floor = _floors(eps1, param.dtype)
    size = _rms(param).clamp(min=eps2) * min(lr, step**-0.5)
    square = grad * grad
    kept: State = {"step": step}
    if param.dim() > 1:
        kept["row_var"] = row = _blend(state.get("row_var"), square.mean(-1, keepdim=True), weight)
        kept["col_var"] = col = _blend(state.get("col_var"), square.mean(-2, keepdim=True), weight)
        # Divide first, because r c would leave the range of float32 long before v does.
        second = row / row.mean(-2, keepdim=True).clamp(min=eps1) * col
    else:
        kept["variance"] = second = _blend(state.get("variance"), square, weight)
    update = grad * second.clamp(min=floor).rsqrt()
    update = update / (_rms(update) / d).clamp(min=1)
    return param * (1 - lr * weight_decay) - size * update, kept


class Adafactor(TensorShell):
    """Adafactor (Shazeer and Stern, arXiv 1804.04235), with the arguments of torch.optim.Adafactor.

    See `adafactor` for the rule. The state of an n by m matrix is n + m numbers. For bfloat16 and
    float16 parameters, the state and the update are in float32, so eps[0] = None is 1.2e-7. torch
    uses bfloat16's epsilon, 0.0078, there, and shrinks every update with a smaller gradient. Apart
    from that, state dicts are interchangeable with torch's.

    A single NaN or infinite gradient makes the whole tensor NaN, because its RMS is unknown.

    Args:
        params: parameters, named parameters, or parameter groups.
        lr: the largest relative step, and the unit of weight_decay. A one-element tensor is read
            at every step.
        beta2_decay: step t enters the second moment with weight t^beta2_decay; at most 0.
        eps: (eps1, eps2): the floor of the second moment's root (None: the machine epsilon of the
            computing dtype), and the floor of the weights' RMS.
        d: the largest RMS of an update, at least 1.
        weight_decay: decoupled weight decay λ, per unit of lr.
        maximize: maximize the objective. The gradient itself never changes.
        foreach: None or True uses blocks for big tensors on a CPU and batches of torch's _foreach
            operations for others, which on a GPU don't wait for norms. False uses a plain loop.
        master_weights: keep a float32 copy of bfloat16 and float16 parameters in the state.
        stochastic_rounding: round bfloat16 parameters stochastically, without bias.
        generator: the random generator for rounding, on the parameters' device; None for torch's
            default. The caller must save its state.
        nonfinite: what to do about a NaN or infinite gradient. "propagate" makes weights NaN,
            "raise" raises RuntimeError before any weight changes, and "skip" skips the parameter's
            step and counts it in `optimizer.skipped`.

    Errors: ValueError and TypeError for settings and complex parameters, RuntimeError for sparse
    gradients. As in torch, there is no first moment, and capturable and differentiable are not
    supported.
    """

    rule = staticmethod(adafactor)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
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
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
            "weight_decay": weight_decay,
            "foreach": foreach,
            "maximize": maximize,
            "master_weights": master_weights,
            "stochastic_rounding": stochastic_rounding,
            "nonfinite": nonfinite,
        }
        super().__init__(params, defaults, generator)

    @staticmethod
    def state_bytes(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        """Return the bytes of state for a parameter of this shape and dtype, without a master."""
        return layout_bytes(_layout(tuple(shape), dtype))

    def _check_group(self, group: dict[str, Any]) -> None:
        if not group["beta2_decay"] <= 0:
            raise ValueError(f"beta2_decay must be at most 0, got {group['beta2_decay']}; use -0.8")
        if len(group["eps"]) != 2:
            raise ValueError(f"eps must be (eps1, eps2), got {len(group['eps'])} numbers")
        eps1, eps2 = group["eps"]
        if eps1 is not None:
            checks.non_negative("eps[0]", eps1)
        checks.non_negative("eps[1]", eps2)
        if not checks.positive("d", group["d"]) >= 1:
            raise ValueError(f"d must be at least 1, got {group['d']}; 1 clips the most")
        super()._check_group(group)

    def _layout(self, _group: dict[str, Any], param: Tensor) -> Layout:
        return _layout(tuple(param.shape), param.dtype)

    def _hyperparameters(self, group: dict[str, Any], *, tensors: bool = False) -> dict[str, Any]:
        eps1, eps2 = group["eps"]
        same = {name: group[name] for name in ("beta2_decay", "d", "weight_decay")}
        return {
            "lr": group["lr"] if tensors else float(group["lr"]),
            "eps1": eps1,
            "eps2": eps2,
            **same,
        }

    def _block_step(
        self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        if param.dim() > 3 and not param.is_contiguous():
            self._by_rule(group, param, grad, state)  # its matrices can't be one 3-D view
            return
        hyper = self._hyperparameters(group)
        state["step"] += 1
        step = state["step"].item()
        dtype = state_dtype(param.dtype)
        eps1, floor = _floors(hyper["eps1"], dtype)
        source = state.get("master", param)
        size = _python_rms(source, dtype)
        size = hyper["eps2"] if size <= hyper["eps2"] else size  # NaN is kept, as in `excess`
        size *= min(hyper["lr"], step**-0.5)
        if param.dim() > 1:
            shape = (-1, *param.shape[-2:])
            update: _Update = _Factored(grad.reshape(shape), state, step, hyper, eps1, floor, dtype)
            param, source = param.view(shape), source.view(shape)
        else:
            update = _Whole(grad, state["variance"], step, hyper, floor, dtype)
        excess = sqrt(update.energy() / param.numel()) / hyper["d"]
        size = -size / (1.0 if excess <= 1 else excess)
        keep = 1 - hyper["lr"] * hyper["weight_decay"]
        for where in update.pieces:
            weight = source[where].to(dtype)
            if keep != 1:
                weight.mul_(keep)
            update.add_to(weight, where, -size if group["maximize"] else size)
            if weight.dtype != param.dtype:
                self._store(group, param[where], weight)

    def _foreach(self, group: dict[str, Any], items: list[Item]) -> bool:
        if not is_plain(items):
            return False
        for factored in (True, False):
            part = [item for item in items if (item[0].dim() > 1) == factored]
            if part:
                self._foreach_part(group, part, factored)
        return True

    def _foreach_part(self, group: dict[str, Any], items: list[Item], factored: bool) -> None:
        hyper = self._hyperparameters(group)
        params, states = [item[0] for item in items], [item[2] for item in items]
        grads = [item[1] for item in items]
        if group["maximize"]:
            grads = list(torch._foreach_neg(grads))
        eps1, floor = _floors(hyper["eps1"], params[0].dtype)
        counts = [state["step"] for state in states]
        torch._foreach_add_(counts, 1)
        steps = torch.stack(counts).tolist()
        weights = [step ** hyper["beta2_decay"] for step in steps]
        # Keep norms on the parameters' device, so the host doesn't wait for them.
        roots = params[0].new_tensor([param.numel() for param in params]).sqrt_()
        shares = params[0].new_tensor([min(hyper["lr"], step**-0.5) for step in steps])
        sizes = (torch.stack(torch._foreach_norm(params)) / roots).clamp_(min=hyper["eps2"])
        if factored:
            squares = torch._foreach_mul(grads, grads)
            for name, dim in (("row_var", -1), ("col_var", -2)):
                means = [square.mean(dim, keepdim=True) for square in squares]
                torch._foreach_lerp_([state[name] for state in states], means, weights)
            del squares, means  # free them before the updates, which are as large
            rows = [state["row_var"] for state in states]
            tops = [row.mean(-2, keepdim=True) for row in rows]
            torch._foreach_clamp_min_(tops, eps1)
            ratios = torch._foreach_div(rows, tops)
            updates = [row * state["col_var"] for row, state in zip(ratios, states, strict=True)]
            torch._foreach_clamp_min_(updates, floor)
        else:
            variances = [state["variance"] for state in states]
            torch._foreach_lerp_(variances, torch._foreach_mul(grads, grads), weights)
            updates = list(torch._foreach_clamp_min(variances, floor))
        torch._foreach_rsqrt_(updates)
        torch._foreach_mul_(updates, grads)
        excess = torch.stack(torch._foreach_norm(updates)) / (roots * hyper["d"])
        factors = sizes * shares / excess.clamp_(min=1)
        torch._foreach_mul_(updates, list(factors.unbind()))
        if hyper["weight_decay"]:
            torch._foreach_mul_(params, 1 - hyper["lr"] * hyper["weight_decay"])
        torch._foreach_sub_(params, updates)


class _Whole:
    """The update of a tensor with fewer than two dimensions, as one piece."""

    def __init__(
        self,
        grad: Tensor,
        variance: Tensor,
        step: float,
        hyper: dict[str, Any],
        floor: float,
        dtype: torch.dtype,
    ) -> None:
        grad = grad.to(dtype)
        self._update = grad * grad
        variance.lerp_(self._update, step ** hyper["beta2_decay"])
        torch.clamp(variance, min=floor, out=self._update).rsqrt_().mul_(grad)
        self.pieces: list[Any] = [...]  # all of it

    def energy(self) -> float:
        """Sum of the squares of the update."""
        return torch.linalg.vector_norm(self._update).item() ** 2

    def add_to(self, weight: Tensor, _: Any, size: float) -> None:
        """Add `size` times the update."""
        weight.add_(self._update, alpha=size)


class _Factored:
    """The update of a batch of matrices [B, n, m], computed one block of rows at a time.

    If no v is below the floor, u is `g a b` with one factor a per row and one factor b per column.
    The sum of its squares is `aᵀ (g²) b` with the squared factors. Neither needs √v itself.
    """

    def __init__(
        self,
        grad: Tensor,
        state: dict[str, Tensor],
        step: float,
        hyper: dict[str, Any],
        eps1: float,
        floor: float,
        dtype: torch.dtype,
    ) -> None:
        batch, n, m = grad.shape
        self._grad, self._floor, self._dtype = grad, floor, dtype
        self.pieces = _pieces(batch, n, m)
        first = self.pieces[0]
        self._scratch = torch.empty(grad[first].numel(), dtype=dtype)
        row = torch.empty(batch, n, 1, dtype=dtype)
        col = torch.zeros(batch, 1, m, dtype=dtype)
        for where in self.pieces:
            square = self._square(where)
            torch.sum(square, -1, keepdim=True, out=row[where])
            col[where[0]] += square.sum(-2, keepdim=True)
        weight = step ** hyper["beta2_decay"]
        row = state["row_var"].view_as(row).lerp_(row.div_(m), weight)
        self._col = state["col_var"].view_as(col).lerp_(col.div_(n), weight)
        self._row = row / row.mean(-2, keepdim=True).clamp_(min=eps1)
        self._row_scale, self._col_scale = self._row.rsqrt(), self._col.rsqrt()
        self._plain = self._above_the_floor(self._row, self._col)

    def _above_the_floor(self, row: Tensor, col: Tensor) -> bool:
        return row.amin().item() * col.amin().item() >= self._floor  # False for NaN

    def _out(self, grad: Tensor) -> Tensor:
        return self._scratch[: grad.numel()].view(grad.shape)

    def _square(self, where: Piece) -> Tensor:
        grad = self._grad[where].to(self._dtype)
        return torch.mul(grad, grad, out=self._out(grad))

    def _separable(self, where: Piece) -> bool:
        return self._plain or self._above_the_floor(self._row[where], self._col[where[0]])

    def _clamped(self, where: Piece) -> Tensor:
        grad = self._grad[where].to(self._dtype)
        second = torch.mul(self._row[where], self._col[where[0]], out=self._out(grad))
        return second.clamp_(min=self._floor).rsqrt_().mul_(grad)

    def energy(self) -> float:
        """Sum of the squares of the update."""
        total = torch.zeros((), dtype=self._dtype)
        rows, cols = self._row_scale.square(), self._col_scale.square().mT
        for where in reversed(self.pieces):  # the last pieces are still in the cache
            if self._separable(where):
                total += (torch.matmul(self._square(where), cols[where[0]]) * rows[where]).sum()
            else:
                total += self._clamped(where).square_().sum()
        return total.item()

    def add_to(self, weight: Tensor, where: Piece, size: float) -> None:
        """Add `size` times the update of one piece to its weights."""
        if not self._separable(where):
            weight.add_(self._clamped(where), alpha=size)
            return
        grad = self._grad[where].to(self._dtype)
        scaled = torch.mul(grad, self._col_scale[where[0]], out=self._out(grad))
        weight.addcmul_(scaled, self._row_scale[where], value=size)


_Update = _Whole | _Factored


def _layout(shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
    count: Layout = {"step": ((), torch.float32)}
    kept = state_dtype(dtype)
    if len(shape) < 2:
        return {**count, "variance": (shape, kept)}
    row, col = (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])
    return {**count, "row_var": (row, kept), "col_var": (col, kept)}


def _floors(eps1: float | None, dtype: torch.dtype) -> tuple[float, float]:
    """Return eps1 and the smallest second moment, a normal number whose root has an inverse."""
    info = torch.finfo(dtype)
    eps1 = info.eps if eps1 is None else eps1
    return max(eps1, info.tiny), max(eps1 * eps1, info.tiny)


def _pieces(batch: int, n: int, m: int) -> list[Piece]:
    """Split into blocks of about `CHUNK` elements: rows of a big matrix, or small matrices."""
    if n * m < CHUNK:
        some = CHUNK // (n * m)
        return [(slice(b, b + some), slice(None)) for b in range(0, batch, some)]
    rows = max(1, CHUNK // m)
    return [(slice(b, b + 1), slice(i, i + rows)) for b in range(batch) for i in range(0, n, rows)]


def _blend(old: Tensor | None, new: Tensor, weight: Scalar) -> Tensor:
    return torch.lerp(torch.zeros_like(new) if old is None else old, new, weight)


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def _python_rms(x: Tensor, dtype: torch.dtype) -> float:
    return torch.linalg.vector_norm(x, dtype=dtype).item() / sqrt(x.numel())
