"""Arrays and plain values as bytes that are safe to read from untrusted code: no pickle.

A frame is the header's length (8 bytes, big-endian), the header in JSON
(`{"value": tree, "arrays": [[library, dtype, shape], ...]}`), then the arrays' bytes in order.
In the tree, {"array": i} represents an array, and {"tuple": [...]} and {"dict": {...}} containers.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from labcore.processes.travel import tensor_from, tensor_to_bytes

HEADER_LIMIT = 1 << 20
LENGTH = struct.Struct(">Q")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "float32", "float64", "complex64", "complex128")
NUMPY = {name: np.dtype(name) for name in ("bool", *INTEGERS, *FLOATS)}
TORCH = {name: getattr(torch, name) for name in ("bool", *INTEGERS, *FLOATS, "bfloat16")}
PLAIN = (torch.Tensor, torch.nn.Parameter, np.ndarray)  # a subclass could lie about its numbers
ALLOWED = "arrays, numbers, text, None, and lists, tuples and dicts (with text as keys) of them"


class WireError(ValueError):
    """The bytes are not a frame, or the frame is larger than allowed."""


def pack(value: Any) -> bytes:
    """Pack `value` into a frame.

    Raises TypeError for anything but plain values and arrays of plain dtypes, and ValueError if
    the plain values alone need more than 1 MiB.
    """
    arrays: list[list[Any]] = []
    blobs: list[bytes] = []

    def array(library: str, dtype: str, shape: tuple[int, ...], data: bytes) -> dict[str, int]:
        arrays.append([library, dtype, list(shape)])
        blobs.append(data)
        return {"array": len(arrays) - 1}

    def tree(thing: Any) -> Any:
        if thing is None or type(thing) in (bool, int, float, str):
            return thing
        if isinstance(thing, np.generic):
            return tree(thing.item())
        if isinstance(thing, torch.Tensor | np.ndarray) and type(thing) not in PLAIN:
            base = "torch.Tensor" if isinstance(thing, torch.Tensor) else "np.ndarray"
            raise TypeError(f"only a plain {base} can be passed, got {type(thing).__name__}")
        if isinstance(thing, torch.Tensor):
            name = str(thing.dtype).removeprefix("torch.")
            if name in TORCH and thing.layout is torch.strided:
                return array("torch", name, tuple(thing.shape), tensor_to_bytes(thing))
            raise TypeError(f"cannot pass a {thing.layout} tensor of {thing.dtype}; use floats")
        if isinstance(thing, np.ndarray):
            if thing.dtype.name not in NUMPY:
                raise TypeError(f"cannot pass an array of {thing.dtype}; use {', '.join(NUMPY)}")
            data = np.ascontiguousarray(thing, dtype=NUMPY[thing.dtype.name]).tobytes()
            return array("numpy", thing.dtype.name, thing.shape, data)
        if type(thing) is list:
            return [tree(one) for one in thing]
        if type(thing) is tuple:
            return {"tuple": [tree(one) for one in thing]}
        if type(thing) is dict and all(type(key) is str for key in thing):
            return {"dict": {key: tree(one) for key, one in thing.items()}}
        raise TypeError(f"only {ALLOWED} can be passed, got {type(thing).__name__}")

    try:
        header = json.dumps({"value": tree(value), "arrays": arrays}).encode()
    except RecursionError:
        raise TypeError("cannot pass a value nested this deeply; use flat lists") from None
    if len(header) > HEADER_LIMIT:
        raise ValueError(
            f"plain values must fit in {HEADER_LIMIT} bytes, got {len(header)}; use arrays"
        )
    return b"".join((LENGTH.pack(len(header)), header, *blobs))


def _described(one: Any) -> tuple[str, str, tuple[int, ...], int]:
    """Validate one entry of "arrays" and return its (library, dtype, shape, bytes)."""
    if not (isinstance(one, list) and len(one) == 3 and isinstance(one[2], list)):
        raise WireError("an array must be described by [library, dtype, shape]")
    library, name, shape = one
    known = {"torch": TORCH, "numpy": NUMPY}.get(library) if isinstance(library, str) else None
    if known is None or not isinstance(name, str) or name not in known:
        raise WireError(f"an array of {library!r} with dtype {name!r} is not allowed")
    if len(shape) > 32 or not all(type(size) is int and 0 <= size < 2**48 for size in shape):
        raise WireError("an array's shape must be at most 32 sizes of at least 0")
    return library, name, tuple(shape), math.prod(shape) * known[name].itemsize


def _read_header(read: Callable[[int], bytes]) -> dict[str, Any]:
    (length,) = LENGTH.unpack(read(LENGTH.size))
    if length > HEADER_LIMIT:
        raise WireError(f"a header may have at most {HEADER_LIMIT} bytes, got {length}")
    try:
        header = json.loads(read(length))
    except (ValueError, RecursionError):
        raise WireError("the header is not JSON") from None
    if not (isinstance(header, dict) and header.keys() == {"value", "arrays"}):
        raise WireError("the header must hold value and arrays")
    if not isinstance(header["arrays"], list):
        raise WireError("the header's arrays must be a list")
    return header


def _array(library: str, name: str, shape: tuple[int, ...], data: bytes) -> Any:
    if library == "torch":
        return tensor_from(data, TORCH[name], shape)
    if name == "bool":
        return (np.frombuffer(data, np.uint8) != 0).reshape(shape)
    return np.frombuffer(bytearray(data), NUMPY[name]).reshape(shape)


def unpack(read: Callable[[int], bytes], limit: int) -> Any:
    """Read the next frame and return its value.

    read: returns exactly the requested number of bytes, or raises.
    limit: the bytes that all arrays together may have. A frame with more is rejected before its
    arrays are read.
    Raises WireError for anything that `pack` would not write.
    """
    header = _read_header(read)
    described = [_described(one) for one in header["arrays"]]
    total = sum(size for *_, size in described)
    if total > limit:
        raise WireError(f"arrays may have at most {limit} bytes in total, got {total}")
    arrays: list[Any] = []
    for library, name, shape, size in described:
        data = read(size)
        try:
            arrays.append(_array(library, name, shape, data))
        except (ValueError, RuntimeError) as problem:  # Sizes may overflow even if one is 0.
            raise WireError(f"an array of shape {shape} is impossible: {problem}") from None

    def value(node: Any) -> Any:
        if isinstance(node, list):
            return [value(one) for one in node]
        if not isinstance(node, dict):
            return node
        if len(node) != 1:
            raise WireError("a node of the value must have one key")
        ((kind, inside),) = node.items()
        if kind == "array" and type(inside) is int and 0 <= inside < len(arrays):
            return arrays[inside]
        if kind == "tuple" and isinstance(inside, list):
            return tuple(value(one) for one in inside)
        if kind == "dict" and isinstance(inside, dict):
            return {key: value(one) for key, one in inside.items()}
        raise WireError("a node of the value must be an array, a tuple or a dict")

    try:
        return value(header["value"])
    except RecursionError:
        raise WireError("the value is nested too deeply") from None
