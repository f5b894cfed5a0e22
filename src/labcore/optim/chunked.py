"""The foreach path on a CPU: all operations of a step run on a piece that stays in the cache.

torch's CPU `_foreach` operations stream through all of memory once per operation. Here, a big
tensor is processed in pieces of `CHUNK` elements with one scratch buffer. Small tensors are
gathered into one flat bucket, where a thousand of them cost a few operations, not a few thousand.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from labcore.optim.precision import compute_dtype

CHUNK = 1 << 18  # 1 MiB of float32: the pieces of a step stay in the cache
SMALL = 1 << 16  # below this, copying into a bucket costs less than calls
State: TypeAlias = dict[str, Tensor]
# (param, grad, moments, scratch, steps before this one): in place, one-dimensional, one dtype
Chunk: TypeAlias = Callable[[Tensor, Tensor, tuple[Tensor, ...], Tensor, float], None]
# (param, grad, state, steps before this one): any shape and mix of dtypes
ByRule: TypeAlias = Callable[[Tensor, Tensor, State, float], None]
# (param, new value in the computing dtype): rounds the value into the parameter
Store: TypeAlias = Callable[[Tensor, Tensor], None]
Flat: TypeAlias = tuple[Tensor, Tensor, State]  # contiguous vectors
# (tensors of equal dtypes, steps before this one): one compiled pass, or False if it cannot
Whole: TypeAlias = Callable[[list[Flat], float], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """How to update tensors: by `whole` if it is given and can, or else in pieces by `chunk`.

    `by_rule` takes its place if there is no `chunk`, or if strides differ.
    """

    whole: Whole | None
    chunk: Chunk | None
    by_rule: ByRule
    store: Store
    maximize: bool


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill one block of memory, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


class ChunkedStep:
    """One group's step over a fixed list of CPU parameters and their state.

    Building it moves the state of small tensors into flat buffers, and `state[name]` becomes a view
    of one. It can be reused while `fits` returns True. If a gradient appears or disappears, or
    state is replaced, a new one is needed.
    """

    def __init__(self, params: list[Tensor], states: list[State]) -> None:
        cohorts: dict[tuple[object, ...], tuple[list[Tensor], list[State]]] = {}
        for param, state in zip(params, states, strict=True):
            step = float(state["step"]) if "step" in state else 0.0
            grad = param.grad.dtype if param.grad is not None else None
            dtypes = [(name, value.dtype) for name, value in state.items()]
            members = cohorts.setdefault((step, param.dtype, grad, *dtypes), ([], []))
            members[0].append(param)
            members[1].append(state)
        self._cohorts = [_Cohort(*members) for members in cohorts.values()]
        # Compared by id. References are kept so that no id is reused for another tensor.
        self._held = [*params, *(value for state in states for value in state.values())]
        self._ids = [id(tensor) for tensor in self._held]

    def fits(self, params: list[Tensor], states: list[State]) -> bool:
        """Return whether this step was built for exactly these parameter and state tensors."""
        ids = [id(param) for param in params]
        ids += [id(value) for state in states for value in state.values()]
        if ids != self._ids:
            return False
        return all(cohort.in_step() for cohort in self._cohorts)

    def step(self, update: Update) -> None:
        """Update all parameters."""
        for cohort in self._cohorts:
            cohort.step(update)


class _Cohort:
    """Parameters with the same step count and dtypes: big ones, and a bucket of the rest."""

    def __init__(self, params: list[Tensor], states: list[State]) -> None:
        self._steps: Tensor | None = None
        if "step" in states[0]:
            self._steps = torch.full((len(params),), float(states[0]["step"]), dtype=torch.float32)
            for state, count in zip(states, self._steps.unbind(), strict=True):
                state["step"] = count
        pairs = list(zip(params, states, strict=True))
        self._big = [(p, s) for p, s in pairs if p.numel() >= SMALL and is_dense(p)]
        small = [(p, s) for p, s in pairs if not (p.numel() >= SMALL and is_dense(p))]
        self._bucket = _Bucket([p for p, _ in small], [s for _, s in small]) if small else None
        total = sum(_real(p).numel() for p in params)
        dtype = compute_dtype(_real_dtype(params[0].dtype))
        self._scratch = torch.empty(2, min(CHUNK, total), dtype=dtype)
        arrays = _arrays(states[0])
        tensors = [params[0], *arrays.values()]
        tensors += [grad for grad in [params[0].grad] if grad is not None]
        self._mixed = "master" in arrays or any(_real_dtype(t.dtype) != dtype for t in tensors)

    def in_step(self) -> bool:
        """Return whether all members still have the same step count."""
        if self._steps is None:
            return True
        low, high = self._steps.aminmax()
        return bool(low == high)

    def step(self, update: Update) -> None:
        count = 0.0
        if self._steps is not None:
            count = float(self._steps[0])
            self._steps += 1
        flats = self._flats(update, count)
        if update.whole is not None:
            whole = list(flats)
            flats = iter([] if not whole or update.whole(whole, count) else whole)
        for param, grad, state in flats:
            self._walk(param, grad, state, count, update)
        if self._bucket is not None:
            self._bucket.scatter()

    def _flats(self, update: Update, count: float) -> Iterator[Flat]:
        """Yield the tensors as vectors; update those whose strides differ from their state's."""
        for param, state in self._big:
            if param.grad is None:
                continue
            weight, grad = _real(param), _real(param.grad)
            arrays = {name: _real(value) for name, value in _arrays(state).items()}
            strides = weight.stride()
            if not is_dense(weight) or any(v.stride() != strides for v in arrays.values()):
                update.by_rule(weight, grad, arrays, count)  # param.data now has another layout
                continue
            if grad.stride() != strides:
                grad = torch.empty_like(weight, dtype=grad.dtype).copy_(grad)
            yield _flat(weight), _flat(grad), {n: _flat(value) for n, value in arrays.items()}
        if self._bucket is not None:
            self._bucket.gather()
            yield self._bucket.param, self._bucket.grad, self._bucket.state

    def _walk(
        self, param: Tensor, grad: Tensor, state: State, count: float, update: Update
    ) -> None:
        pieces = [param.split(CHUNK), grad.split(CHUNK), *(v.split(CHUNK) for v in state.values())]
        if update.chunk is None:
            for p, g, *values in zip(*pieces, strict=True):
                update.by_rule(p, g, dict(zip(state, values, strict=True)), count)
            return
        scratch, negated = self._scratch
        for p, g, *values in zip(*pieces, strict=True):
            n, kept, moments = p.numel(), p, tuple(values)
            if self._mixed:
                arrays = dict(zip(state, values, strict=True))
                # `to` returns a tensor of the same dtype unchanged, to be updated in place.
                p = arrays.pop("master", p).to(scratch.dtype)
                moments = tuple(moment.to(scratch.dtype) for moment in arrays.values())
                g = g.to(scratch.dtype)
            if update.maximize:  # not in place, because the gradient belongs to the caller
                g = torch.neg(g, out=negated[:n])
            update.chunk(p, g, moments, scratch[:n], count)
            if self._mixed:
                for moment, new in zip(arrays.values(), moments, strict=True):
                    if new is not moment:
                        moment.copy_(new)
                if p is not kept:
                    update.store(kept, p)


class _Bucket:
    """Flat buffers for small or oddly strided parameters. Their moments stay in the buffers."""

    def __init__(self, params: list[Tensor], states: list[State]) -> None:
        self._params = params
        shapes = [_real(p).shape for p in params]
        sizes = [shape.numel() for shape in shapes]
        total = sum(sizes)
        grad = params[0].grad
        grad_dtype = params[0].dtype if grad is None else grad.dtype
        self.param = torch.empty(total, dtype=_real_dtype(params[0].dtype))
        self.grad = torch.empty(total, dtype=_real_dtype(grad_dtype))
        self._param_views = _shaped(self.param, sizes, shapes)
        self._grad_views = _shaped(self.grad, sizes, shapes)
        self._complex = params[0].is_complex()
        self._lines = all(len(shape) == 1 for shape in shapes)
        self.state: State = {}
        for name, example in _arrays(states[0]).items():
            flat = torch.empty(total, dtype=_real_dtype(example.dtype))
            views = _shaped(flat, sizes, shapes)
            torch._foreach_copy_(views, [_real(state[name]) for state in states])
            for state, view in zip(states, views, strict=True):
                state[name] = torch.view_as_complex(view) if example.is_complex() else view
            self.state[name] = flat

    def gather(self) -> None:
        """Copy parameters and gradients, of any strides, into the flat buffers."""
        params = self._real_params()
        grads = [p.grad for p in self._params if p.grad is not None]
        if self._complex:
            grads = [_real(grad) for grad in grads]
        if self._lines:  # biases and norms: one cat takes a third of the time
            torch.cat(params, out=self.param)
            torch.cat(grads, out=self.grad)
        else:
            torch._foreach_copy_(self._param_views, params)
            torch._foreach_copy_(self._grad_views, grads)

    def scatter(self) -> None:
        """Copy the updated weights back to the parameters."""
        torch._foreach_copy_(self._real_params(), self._param_views)

    def _real_params(self) -> list[Tensor]:
        return [_real(p) for p in self._params] if self._complex else self._params


def _arrays(state: State) -> State:
    return {name: value for name, value in state.items() if name != "step"}


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _real_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _flat(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


def _shaped(flat: Tensor, sizes: list[int], shapes: list[torch.Size]) -> list[Tensor]:
    return [piece.view(s) for piece, s in zip(flat.split(sizes), shapes, strict=True)]
