"""A rule compiled to one pass over memory: what `fused=True` runs on a CPU.

`torch.compile` generates vectorized C++ from `precision.apply_rule`, parallel over torch's threads.
Each combination of rule, settings and dtypes is compiled once per process, for vectors of any
length above one, when a step first needs it. Inductor keeps the result in its cache on disk.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from labcore.compiling import ahead
from labcore.optim.precision import Rule, apply_rule

Flat: TypeAlias = tuple[Tensor, Tensor, dict[str, Tensor]]  # contiguous vectors
# How many tensors a call updates. A call costs some 80 µs, because the tensors updated before
# it have pushed Python out of the cache; but each additional tensor lengthens compilation.
GROUP = 8


def apply_compiled(
    rule: Rule,
    flats: Sequence[Flat],
    *,
    maximize: bool,
    choices: tuple[str, ...],
    **hyperparameters: Any,
) -> bool:
    """Do what `apply_rule` does to each of `flats`, or return False if it cannot be compiled.

    All have the same dtypes and names of state. choices: the names of the hyperparameters that are
    compiled in, because the rule branches on them.
    """
    vectors = [[param, grad, *state.values()] for param, grad, state in flats]
    if any(type(one) is not Tensor or one.is_neg() for vector in vectors for one in vector):
        return False  # compiled code would mistake a DTensor's part for the whole
    param, grad, state = flats[0]
    fixed = tuple((name, hyperparameters[name]) for name in choices)
    numbers = tuple(name for name in hyperparameters if name not in choices)
    dtypes = (param.dtype, grad.dtype, *(value.dtype for value in state.values()))
    compiled = _compiled(rule, tuple(state), dtypes, maximize, numbers, fixed, GROUP)
    if compiled is None:
        return False
    run, fillers = compiled
    values = torch.tensor([hyperparameters[name] for name in numbers], dtype=torch.float64)
    for param, grad, state in flats:
        if param.numel() == 1:  # compiled code works for any other length
            apply_rule(rule, param, grad, state, maximize=maximize, **hyperparameters)
    vectors = [vector for vector in vectors if vector[0].numel() > 1]
    for start in range(0, len(vectors), GROUP):
        group = vectors[start : start + GROUP]
        run(group + fillers[len(group) :], values)
    return True


@functools.cache
def _compiled(
    rule: Rule,
    names: tuple[str, ...],
    dtypes: tuple[torch.dtype, ...],
    maximize: bool,
    numbers: tuple[str, ...],
    fixed: tuple[tuple[str, Any], ...],
    group: int,
) -> tuple[Callable[..., None], list[list[Tensor]]] | None:
    """Compile a step of `group` tensors, and return it with tensors to fill up a smaller group.

    Return None where it cannot be compiled.
    """

    def step(vectors: list[list[Tensor]], values: Tensor) -> None:
        hyperparameters = dict(zip(numbers, values.unbind(), strict=True)) | dict(fixed)
        for param, grad, *state in vectors:
            arrays = dict(zip(names, state, strict=True))
            apply_rule(rule, param, grad, arrays, maximize=maximize, **hyperparameters)

    # Different lengths, because the compiler takes equal ones for the same variable.
    examples, fillers = (
        [
            [torch.zeros(length + k, dtype=dtype, device="cpu") for dtype in dtypes]
            for k in range(group)
        ]
        for length in (100, 200)
    )
    values = torch.zeros(len(numbers), dtype=torch.float64, device="cpu")
    # Otherwise, inductor computes beta^t, which is one number, again for each element.
    run = ahead(step, (examples, values), (fillers, values), realize_opcount_threshold=3)
    return None if run is None else (run, fillers)
