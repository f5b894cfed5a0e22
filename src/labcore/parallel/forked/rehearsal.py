"""Rehearse a capture on a CPU: stand-ins for torch.cuda's streams, events and graphs check it.

The operations run for real, one after another, in a capture too; a replay runs those of its capture
again. The stand-ins follow which operations each stream has waited for, as a GPU would, and raise
where its order would be wrong or its capture would break. They don't model time, memory pools, or
NCCL, and they are stricter than torch in one thing: they refuse any allocation in a capture, where
torch takes it from the graph's own pool.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

__all__ = ["Rehearsal"]

_ALLOCATES = {"aten.empty", "aten.new_empty", "aten.empty_like", "aten.empty_strided"}


class _Stream:
    def __init__(self, stage: Rehearsal, name: str, priority: int = 0) -> None:
        self.stage, self.name, self.priority = stage, name, priority
        self.after: set[int] = set()  # operations that came before whatever this stream runs next
        stage.streams.append(self)

    def wait_event(self, event: _Event) -> None:
        self.stage.log.append(f"{self.name} waits for {event.name}")
        self.after |= event.after

    def wait_stream(self, other: _Stream) -> None:
        self.stage.log.append(f"{self.name} waits for {other.name}")
        self.after |= other.after

    def synchronize(self) -> None:
        self.stage.refuse_sync("a stream's synchronize()")


class _Event:
    def __init__(self, stage: Rehearsal) -> None:
        self.stage, self.name, self.after = stage, "nothing", frozenset[int]()

    def record(self, stream: _Stream | None = None) -> None:
        stream = self.stage.current if stream is None else stream
        self.after = frozenset(stream.after)
        last = max(stream.after, default=0)
        self.name = f"operation {last} on {stream.name}"

    def synchronize(self) -> None:
        self.stage.refuse_sync("an event's synchronize()")


class _Graph:
    def __init__(self, stage: Rehearsal) -> None:
        self.stage = stage
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def replay(self) -> None:
        self.stage.log.append("replay")
        with _disable_current_modes():
            for func, args, kwargs in self.operations:
                done = func(*args, **kwargs)
                if func.namespace == "c10d":
                    dist.Work.unbox(done[-1]).wait()


class Rehearsal(TorchDispatchMode):
    """Use it as `with Rehearsal() as stage:`, and read `stage.log` afterwards.

    log: what was launched on which stream, and which stream waited for what.
    Raises RuntimeError for an operation that doesn't wait for the one that wrote its data, and, in
    a capture, for a wait of the host, an allocation, or a stream that isn't joined at the end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.streams: list[_Stream] = []
        self.current = _Stream(self, "default")
        self._count, self._began = 0, -1  # operations; where the capture began, -1 outside
        self._graph: _Graph | None = None  # under capture
        self._wrote: dict[int, int] = {}  # the last operation on each tensor, by address
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Rehearsal:
        stands = {
            "Event": lambda: _Event(self),
            "CUDAGraph": lambda: _Graph(self),
            "Stream": self._stream,
            "current_stream": lambda: self.current,
            "is_available": lambda: True,
            "graph": self._capture,
            "stream": self._on,
            "synchronize": lambda *_: self.refuse_sync("torch.cuda.synchronize()"),
        }
        for name, stand in stands.items():
            self._patches.enter_context(mock.patch.object(torch.cuda, name, stand))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def refuse_sync(self, what: str) -> None:
        """Raise RuntimeError if a capture is under way."""
        if self._began >= 0:
            raise RuntimeError(f"a capture must not wait for the device, got {what}")

    def _stream(self, *, priority: int = 0) -> _Stream:
        return _Stream(self, ("main", "wire")[min(len(self.streams), 2) - 1], priority)

    @contextlib.contextmanager
    def _on(self, stream: _Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def _capture(self, graph: _Graph, *, stream: _Stream, **_how: Any) -> Iterator[None]:
        self.log.append("capture begins")
        self._began, self._graph, before = self._count, graph, dict(self._wrote)
        try:
            with self._on(stream):
                yield
            captured = set(range(self._began + 1, self._count + 1))
            if missing := captured - stream.after:
                raise RuntimeError(
                    "every stream of a capture must be joined before its end, but operation "
                    f"{min(missing)} isn't; let the first stream wait for the others"
                )
        finally:
            self._began, self._graph = -1, None
            self._wrote = before  # on a GPU, nothing has run yet
        self.log.append("capture ends")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = f"{func.namespace}.{func._opname}"
        if self._began >= 0 and name in _ALLOCATES:
            raise RuntimeError(f"this capture must not allocate, got {name}; allocate before it")
        if name in _ALLOCATES or func.is_view:
            return func(*args, **(kwargs or {}))
        if torch.Tag.data_dependent_output in func.tags:
            self.refuse_sync(name)
        self._launched(
            name, [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        )
        if self._graph is not None:
            self._graph.operations.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _launched(self, name: str, tensors: list[Tensor]) -> None:
        for one in tensors:
            writer = self._wrote.get(one.data_ptr())
            if writer is not None and writer not in self.current.after:
                raise RuntimeError(
                    f"{name} on {self.current.name} must wait for operation {writer}, which uses "
                    "the same tensor on another stream; record an event there and wait for it"
                )
        self._count += 1
        self.current.after.add(self._count)
        self.log.append(f"operation {self._count} on {self.current.name}: {name.split('.')[1]}")
        for one in tensors:
            self._wrote[one.data_ptr()] = self._count
