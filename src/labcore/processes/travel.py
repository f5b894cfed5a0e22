"""Pickling of the user's functions, arguments and results, to pass them between processes.

cloudpickle passes closures and functions defined in a notebook by value. Tensors are copied to the
CPU as bytes, because torch's shared memory would leave files behind when a process dies.
"""

from __future__ import annotations

import io
from typing import Any

import cloudpickle
import torch


def tensor_to_bytes(tensor: torch.Tensor) -> bytes:
    """Return the elements of a strided tensor of any dtype and device, in row-major order."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # torch cannot view a tensor without dimensions or elements as bytes.
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def tensor_from(
    data: bytes | bytearray, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """Build a CPU tensor of `shape` from these bytes. It owns its memory."""
    if not data:
        return torch.empty(shape, dtype=dtype)
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    # torch's behavior is undefined for a bool stored as a byte other than 0 or 1.
    return (raw != 0 if dtype is torch.bool else raw.view(dtype)).reshape(shape)


def _rebuild(
    data: bytes, dtype: torch.dtype, shape: tuple[int, ...], parameter: bool, needs_grad: bool
) -> torch.Tensor:
    tensor = tensor_from(data, dtype, shape)
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad=needs_grad)
    return tensor.requires_grad_() if needs_grad else tensor


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj).__name__ == "DTensor":
            raise TypeError(
                "a DTensor cannot leave its process group; return x.full_tensor() or x.to_local()"
            )
        plain = type(obj) in (torch.Tensor, torch.nn.Parameter)
        if not plain or obj.layout is not torch.strided or obj.is_quantized:
            return super().reducer_override(obj)
        parameter = type(obj) is torch.nn.Parameter
        needs_grad = obj.requires_grad and obj.is_leaf
        shape = tuple(obj.shape)
        return _rebuild, (tensor_to_bytes(obj), obj.dtype, shape, parameter, needs_grad)


def dumps(thing: Any) -> bytes:
    """Pickle `thing`, with its tensors as bytes (on the CPU, detached from their graph).

    Raises TypeError with the reason if something in it cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(thing)
    except Exception as problem:
        raise TypeError(
            f"this object cannot be passed between processes: {problem}; "
            "pass and return tensors, arrays, plain values and functions of them"
        ) from problem
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """Unpickle what `dumps` returned. Only for trusted bytes: unpickling can run any code."""
    return cloudpickle.loads(data)
