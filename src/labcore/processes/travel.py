"""How functions, arguments and results of the user's own code cross between processes.

cloudpickle carries functions of a notebook and closures by value. Tensors are copied as bytes to
the CPU: torch's own way through shared memory would leave files behind where a process dies.
"""

from __future__ import annotations

import io
from typing import Any

import cloudpickle
import torch


def tensor_to_bytes(tensor: torch.Tensor) -> bytes:
    """The elements of a strided tensor of any dtype and device, in row-major order."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # torch cannot view a tensor without dimensions or elements as bytes.
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def tensor_from(
    data: bytes | bytearray, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """The CPU tensor of `shape` with these bytes; it owns its memory."""
    if not data:
        return torch.empty(shape, dtype=dtype)
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    # A byte other than 0 and 1 is no bool: what torch does with one is undefined.
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
                "a DTensor belongs to its process group and cannot leave it; "
                "return x.full_tensor() or x.to_local()"
            )
        plain = type(obj) in (torch.Tensor, torch.nn.Parameter)
        if not plain or obj.layout is not torch.strided or obj.is_quantized:
            return super().reducer_override(obj)
        parameter = type(obj) is torch.nn.Parameter
        needs_grad = obj.requires_grad and obj.is_leaf
        shape = tuple(obj.shape)
        return _rebuild, (tensor_to_bytes(obj), obj.dtype, shape, parameter, needs_grad)


def dumps(thing: Any) -> bytes:
    """`thing` by cloudpickle, its tensors as bytes (on the CPU, cut from their graph).

    Raises TypeError with the reason where something in it cannot travel.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(thing)
    except Exception as problem:
        raise TypeError(
            f"this cannot travel between processes: {problem}; "
            "pass and return tensors, arrays, plain values and functions over them"
        ) from problem
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """What `dumps` packed. For trusted bytes only: unpickling runs what they say."""
    return cloudpickle.loads(data)
