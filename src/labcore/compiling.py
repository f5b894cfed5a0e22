"""Compile a function for a CPU ahead of its calls, by torch.compile, where a compiler works."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["ahead"]

OPTIONS: dict[str, Any] = {
    "cpp.dynamic_threads": True,  # the number of threads is torch's at each call
    "size_asserts": False,
}


def ahead(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    others: tuple[Any, ...],
    **options: Any,
) -> Callable[..., Any] | None:
    """Return `function` as C++ made by inductor, or None with a warning where that fails.

    The compiled function takes tensors like those in `arguments`, each dimension of any length
    above one, and doesn't check them: that would take a third of a short call. Inductor keeps what
    it compiled in its cache on disk.

    arguments, others: examples of the arguments, with other lengths in all dimensions that vary,
    and no tensor twice. `function` is run once on `others`. options: inductor's.
    Raises ValueError if a tensor appears twice in `others`: the compiled code would then use one
    tensor for both arguments in every call.
    """
    tensors = [id(one) for one in tree_leaves(others) if isinstance(one, torch.Tensor)]
    if len(set(tensors)) < len(tensors):
        raise ValueError("no tensor may be there twice in `others`; make one for each argument")
    settings = {"enable_aot_compile": True, "specialize_float": True}
    try:
        with torch.no_grad(), torch._dynamo.config.patch(settings):
            lazy: Any = torch.compile(
                function, fullgraph=True, dynamic=True, options=OPTIONS | options
            )
            run = lazy.aot_compile((arguments, {}))
            run(*others)  # refused if it was compiled for the first lengths alone
    except (AttributeError, OSError, RuntimeError) as error:  # the first: compiling is off
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        warnings.warn(
            "fused=True on a CPU needs a C++ compiler that torch.compile can use, and runs "
            f"as fused=False without one: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    run.disable_guard_check()
    compiled: Callable[..., Any] = run
    return compiled
