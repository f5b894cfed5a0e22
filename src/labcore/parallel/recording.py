"""The launch sequence of a function: what it gives the device to do, operation by operation.

A CUDA graph replays exactly that sequence, so it must be the same at every step and on every rank,
and nothing in it may wait for the device.
"""

from __future__ import annotations

import hashlib
import linecache
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labcore.parallel.regions import rank_and_size

__all__ = ["Agreement", "Difference", "Launch", "first_difference", "launch_sequence"]

# They move no data: memory is reserved, or the same memory is seen in another shape.
_NO_LAUNCH = {
    "aten._unsafe_view",
    "aten.empty",
    "aten.empty_like",
    "aten.empty_strided",
    "aten.new_empty",
    "aten.new_empty_strided",
    "aten.resize_",
}
_SILENT_NAMESPACES = ("prim", "profiler")
_COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional")
_NO_COLLECTIVE = {"_c10d_functional.wait_tensor", "c10d.monitored_barrier_"}
_INDEXING = {"aten.index", "aten.index_put", "aten.index_put_", "aten._index_put_impl_"}
# Methods that read a tensor on the host without an operation that a dispatcher would see.
_HOST_READS = {
    Tensor.__array__: "Tensor.__array__",
    Tensor.cpu: "Tensor.cpu",
    Tensor.numpy: "Tensor.numpy",
    Tensor.tolist: "Tensor.tolist",
}
# Functions that copy numbers of the host, past the dispatcher too.
_FROM_HOST = {
    torch.as_tensor: "torch.as_tensor",
    torch.tensor: "torch.tensor",
    Tensor.new_tensor: "Tensor.new_tensor",
}
_IN_A_TENSOR = (
    "keep the number in a tensor (torch.where in place of an if), or read it after the step"
)
_FIXED_SHAPE = "its result's shape depends on the data; use a form of fixed shape (torch.where)"
_ON_THE_DEVICE = "leave the tensor on the device, and read it after the step"
_MADE_BEFORE = "put it on the device once, before the steps"


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One operation: its name, and shape and dtype of each tensor that it was given.

    op: as torch's dispatcher knows it, "aten.mm" or "c10d.allreduce_".
    """

    op: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @property
    def collective(self) -> bool:
        """Whether all ranks must launch it together."""
        return self.op.split(".")[0] in _COLLECTIVE_NAMESPACES and self.op not in _NO_COLLECTIVE

    def __str__(self) -> str:
        operands = (
            f"{str(dtype).removeprefix('torch.')}{[*shape]}"
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )
        return f"{self.op}({', '.join(operands)})"


def launch_sequence(
    fn: Callable[[], Any],
    *,
    strict: bool = True,
    before_collective: Callable[[Sequence[Launch]], None] | None = None,
) -> tuple[Any, tuple[Launch, ...]]:
    """What fn() returns, and what it launched; views and reserved memory are no launches.

    strict: raise RuntimeError, naming the line, where fn waits for the device: `.item()`, an if on
    a tensor, `.tolist()`, a boolean index, `nonzero`. Such a step cannot be captured. On a CPU the
    same calls are found, though nothing there waits; what copies from the host to a GPU
    (`torch.tensor(…, device=…)`) is found on a GPU only.
    before_collective: called with the launches so far, the collective last, before it runs.
    """
    recorder = _Recorder(strict, before_collective)
    with _HostReads(recorder), recorder:
        result = fn()
    return result, tuple(recorder.launches)


class _Recorder(TorchDispatchMode):
    def __init__(
        self, strict: bool, before_collective: Callable[[Sequence[Launch]], None] | None
    ) -> None:
        super().__init__()
        self.strict = strict
        self.before_collective = before_collective
        self.launches: list[Launch] = []
        self.resting = False  # while the callback does work of its own

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.resting or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        name = f"{func.namespace}.{func._opname}"
        # Under inference mode operations arrive whole; their parts are what is launched.
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        if self.strict and (remedy := _waits(func, name, args, kwargs)):
            raise _sync_error(name, remedy)
        launches = not (func.is_view or name in _NO_LAUNCH or func.namespace in _SILENT_NAMESPACES)
        if launches:
            self._note(name, args, kwargs)
        return func(*args, **kwargs)

    def _note(self, name: str, args: tuple[Any, ...], kwargs: Any) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        launch = Launch(
            op=name,
            shapes=tuple(tuple(tensor.shape) for tensor in tensors),
            dtypes=tuple(tensor.dtype for tensor in tensors),
        )
        self.launches.append(launch)
        if launch.collective and self.before_collective is not None:
            self.resting = True
            try:
                self.before_collective(self.launches)
            finally:
                self.resting = False


class _HostReads(TorchFunctionMode):
    """Finds what reads a tensor's memory past the dispatcher."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.recorder.strict and not self.recorder.resting:
            if func in _HOST_READS:
                raise _sync_error(_HOST_READS[func], _ON_THE_DEVICE)
            if func in _FROM_HOST and _copied_to_gpu(func, args, kwargs):
                raise _sync_error(_FROM_HOST[func], _MADE_BEFORE)
        return func(*args, **kwargs)


def _copied_to_gpu(func: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
    """Whether one of _FROM_HOST is asked for numbers of the host on a GPU."""
    like = args[0] if func is Tensor.new_tensor else None
    data = args[1:] if like is not None else args
    device = kwargs.get("device")
    if device is None and like is not None:
        device = like.device
    made_of_tensor = any(isinstance(one, Tensor) for one in (*data[:1], kwargs.get("data")))
    return device is not None and torch.device(device).type == "cuda" and not made_of_tensor


def _waits(func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> str:
    """What to do in place of an operation that waits for the device; "" for others."""
    if name in _INDEXING:
        # torch tags every index, but an integer one has the shape that its tensors say.
        indices = [i for i in args[1] if i is not None]
        masks = [i for i in indices if i.dtype in (torch.bool, torch.uint8)]
        filled = name != "aten.index" and args[2].numel() == 1  # becomes masked_fill
        if masks and not filled:
            return _FIXED_SHAPE
        return _MADE_BEFORE if args[0].is_cuda and not all(i.is_cuda for i in indices) else ""
    if torch.Tag.data_dependent_output in func.tags:
        return _IN_A_TENSOR
    if torch.Tag.dynamic_output_shape in func.tags:
        return _FIXED_SHAPE
    return _crossing(name, args, kwargs)


def _crossing(name: str, args: tuple[Any, ...], kwargs: Any) -> str:
    """What to do in place of a copy between host and GPU; "" for other operations."""
    if name == "aten._to_copy" and kwargs.get("device") is not None:
        source, target = args[0].device, torch.device(kwargs["device"])
    elif name == "aten.copy_":
        source, target = args[1].device, args[0].device
        # A graph can hold a copy out of or into pinned memory.
        host = args[0] if source.type == "cuda" else args[1]
        asked = [*args[2:3], kwargs.get("non_blocking", False)]
        if source.type != target.type and any(asked) and host.is_pinned():
            return ""
    else:
        return ""
    if source.type == "cuda" and target.type == "cpu":
        return _ON_THE_DEVICE
    return _MADE_BEFORE if source.type == "cpu" and target.type == "cuda" else ""


class SyncError(RuntimeError):
    """Raised for a step that waits for the device, before it does."""


def _sync_error(name: str, remedy: str) -> SyncError:
    shown = name.replace(".", "::", 1) if name.startswith("aten") else name
    here = place_of(traceback.walk_stack(None))
    return SyncError(f"a captured step must not wait for the device, got {shown}{here}; {remedy}")


def place_of(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The first of the frames that is not torch's own, in words; "" if there is none."""
    for frame, line in frames:
        module = frame.f_globals.get("__name__", "")
        if module != __name__ and module.split(".")[0] != "torch":
            code = frame.f_code
            text = linecache.getline(code.co_filename, line).strip()
            shown = f": `{text}`" if text else ""
            return f" in {code.co_name} ({Path(code.co_filename).name}, line {line}{shown})"
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Where sequences part: the rank that left, the place (from 0), its op and that of the others.

    op, expected: "nothing" where a sequence has ended.
    """

    rank: int
    place: int
    op: str
    expected: str


def first_difference(sequences: Sequence[Sequence[str]]) -> Difference | None:
    """The first place where a rank's sequence is not that of most ranks; None where all agree.

    sequences: one for each rank. Where as many ranks say one thing as another, the lower rank is
    believed. Of several ranks that differ there, the lowest is named.
    """
    for place, ops in enumerate(zip_longest(*sequences, fillvalue="nothing")):
        expected = Counter(ops).most_common(1)[0][0]
        for rank, op in enumerate(ops):
            if op != expected:
                return Difference(rank=rank, place=place, op=op, expected=expected)
    return None


class Agreement:
    """Compares this rank's launches with those of the other ranks of a group.

    Every rank calls `check` before each of its collectives and once at the end, so the n-th call
    of one rank meets the n-th of the others, and what would have hung raises RuntimeError on all.
    group: None is the default group, and nothing is compared where none was made.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._ranks = rank_and_size(group)[1]
        self._told: list[str] = []
        self._hash = hashlib.sha256()

    def check(self, launches: Sequence[Launch]) -> None:
        """Raise RuntimeError, on every rank, that names a rank that differs and its first op.

        launches: all so far; those of the last call begin them.
        """
        if self._ranks == 1:
            return
        fresh = [str(launch) for launch in launches[len(self._told) :]]
        self._told += fresh
        for one in fresh:
            self._hash.update(f"{one}\n".encode())
        self._look(self._gathered((self._hash.hexdigest(), "")))

    def fail(self, problem: BaseException) -> None:
        """Tell the ranks that are in `check`, or will be, that this one cannot go on."""
        if self._ranks > 1:
            self._gathered(("", f"{type(problem).__name__}: {problem}"))

    def _look(self, answers: list[tuple[str, str]]) -> None:
        for rank, (_, problem) in enumerate(answers):
            if problem:
                raise PeerError(
                    f"every rank must run the step that is captured, rank {rank} could not: "
                    f"{problem}"
                )
        if len({digest for digest, _ in answers}) == 1:
            return
        difference = first_difference(self._gathered(self._told))
        if difference is None:
            raise PeerError("ranks disagree on what they launched before the last collective")
        raise PeerError(
            "all ranks must launch the same operations in one order, but rank "
            f"{difference.rank} launches {difference.op} as number {difference.place + 1} where "
            f"the others launch {difference.expected}; make the step the same on every rank"
        )

    def _gathered(self, mine: Any) -> list[Any]:
        found: list[Any] = [None] * self._ranks
        dist.all_gather_object(found, mine, group=self._group)
        return found


class PeerError(RuntimeError):
    """Raised on all ranks at once: none of them waits for another any more."""


def refuse_what_nccl_cannot(device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Raise RuntimeError where the group's collectives cannot be captured."""
    if rank_and_size(group)[1] == 1:
        return
    backend = dist.get_backend_config(group)
    if "nccl" not in backend:
        raise RuntimeError(
            f"a graph captures only NCCL's collectives, got a group of backend {backend}; make it "
            "with init_process_group('nccl')"
        )
    try:
        refuse_shared_gpus(str(torch.cuda.get_device_properties(device).uuid), group)
    except dist.DistBackendError as problem:
        if "Duplicate GPU" in str(problem):
            raise RuntimeError(_ONE_EACH.format("several ranks on one GPU")) from problem
        raise


_ONE_EACH = (
    "NCCL wants one GPU for each process, got {}; start as many processes as there are GPUs "
    "(torchrun --nproc-per-node)"
)


def refuse_shared_gpus(name: str, group: dist.ProcessGroup | None = None) -> None:
    """Raise RuntimeError, on all ranks, if two of them work on one GPU.

    name: of this rank's GPU, another for each GPU of all machines (its UUID).
    """
    names: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(names, name, group=group)
    for rank, one in enumerate(names):
        if (first := names.index(one)) != rank:
            raise RuntimeError(_ONE_EACH.format(f"ranks {first} and {rank} on {one}"))
