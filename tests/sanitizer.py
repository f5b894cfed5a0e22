"""Triton's interpreter with every address checked: one outside its kernel's tensors is an error.

The hooks are into the interpreter of Triton 3.6 and 3.7.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

import numpy as np
import torch

from labcore import device

SIZES = {"fp32": 4, "bf16": 2, "fp16": 2, "uint8": 1}


def spans(arguments: dict) -> list[tuple[int, int]]:
    """Return the addresses that a launch may touch: its tensors' storages, first and past the last.

    An optimizer's kernel finds its tensors in a table of addresses, which isn't checked itself.
    """
    found = []
    for value in arguments.values():
        value = getattr(value, "base", value)
        if torch.is_tensor(value):
            storage = value.untyped_storage()
            found.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    if "blocks_ptr" in arguments:
        *rows, numels = arguments["table_ptr"].tolist()
        dtypes = [arguments[name].name for name in "PGSS"] + ["fp32"]
        for dtype, row in zip(dtypes, rows, strict=True):
            found += [(a, a + n * SIZES[dtype]) for a, n in zip(row, numels, strict=True) if a]
    if "scales_ptr" in arguments:
        *rows, counts = arguments["scales_ptr"].tolist()
        found += [(a, a + 4 * n) for row in rows for a, n in zip(row, counts, strict=True) if a]
    return found


@contextlib.contextmanager
def in_bounds() -> Iterator[None]:
    """Raise IndexError for a load, store or atomic outside the tensors of its launch."""
    if not device.interpreting():
        yield
        return
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    live: list[tuple[int, int]] = []
    call = executor.__call__

    def remember(self, *args, **kwargs):
        live[:] = spans({**dict(zip(self.arg_names, args, strict=False)), **kwargs})
        return call(self, *args, **kwargs)

    def checked(name: str, pointer_place: int, mask_place: int):
        method = getattr(builder, name)

        def access(self, *args, **named):
            pointers, mask = args[pointer_place], args[mask_place]
            touched = pointers.data[mask.data]
            size = pointers.get_element_ty().primitive_bitwidth // 8
            inside = np.zeros(touched.shape, bool)
            for low, high in live:
                inside |= (touched >= low) & (touched + size <= high)
            if not inside.all():
                raise IndexError(f"{name}: {int((~inside).sum())} addresses are out of bounds")
            return method(self, *args, **named)

        return mock.patch.object(builder, name, access)

    with (
        mock.patch.object(executor, "__call__", remember),
        checked("create_masked_load", 0, 1),
        checked("create_masked_store", 0, 2),
        checked("create_atomic_rmw", 1, 3),
    ):
        yield
