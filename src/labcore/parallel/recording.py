"""Record the launch sequence of a function: the operations it gives the device.

A CUDA graph replays exactly that sequence. It must be the same at every step and on every rank, and
nothing in it may wait for the device.
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

__all__ = ["Divergence", "Launch", "RankAgreement", "first_difference", "launch_sequence"]

# These move no data: they allocate memory or return a view.
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
# Methods that read a tensor on the host without going through the dispatcher.
_HOST_READS = {
    Tensor.__array__: "Tensor.__array__",
    Tensor.cpu: "Tensor.cpu",
    Tensor.numpy: "Tensor.numpy",
    Tensor.tolist: "Tensor.tolist",
}
# Functions that copy numbers from the host, also without going through the dispatcher.
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
    """One operation: its name, and the shape and dtype of each tensor argument.

    op: the dispatcher's name, such as "aten.mm" or "c10d.allreduce_".
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
    """Return what fn() returns and what it launches; views and allocations don't count as launches.

    strict: raise RuntimeError, naming the line, if fn waits for the device: `.item()`, an if on a
    tensor, `.tolist()`, a boolean index, `nonzero`. Such a step can't be captured. The same calls
    are found on a CPU, though nothing waits there. Copies from the host to a GPU
    (`torch.tensor(…, device=…)`) are found on a GPU only.
    before_collective: called before each collective runs, with all launches so far; the collective
    is the last of them.
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
        self.resting = False  # True while the callback runs, whose operations don't count

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.resting or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        name = f"{func.namespace}.{func._opname}"
        # Under inference mode composite operations arrive whole; their parts are what is launched.
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
    """Finds reads of a tensor's memory that bypass the dispatcher."""

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
    """Return whether a call of one of _FROM_HOST copies host numbers to a GPU."""
    like = args[0] if func is Tensor.new_tensor else None
    data = args[1:] if like is not None else args
    device = kwargs.get("device")
    if device is None and like is not None:
        device = like.device
    made_of_tensor = any(isinstance(one, Tensor) for one in (*data[:1], kwargs.get("data")))
    return device is not None and torch.device(device).type == "cuda" and not made_of_tensor


def _waits(func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> str:
    """Return what to do in place of an operation that waits for the device; "" for others."""
    if name in _INDEXING:
        # torch tags all indexing as dynamic, but integer indices give a shape known beforehand.
        indices = [i for i in args[1] if i is not None]
        masks = [i for i in indices if i.dtype in (torch.bool, torch.uint8)]
        filled = name != "aten.index" and args[2].numel() == 1  # torch turns it into masked_fill
        if masks and not filled:
            return _FIXED_SHAPE
        return _MADE_BEFORE if args[0].is_cuda and not all(i.is_cuda for i in indices) else ""
    if torch.Tag.data_dependent_output in func.tags:
        return _IN_A_TENSOR
    if torch.Tag.dynamic_output_shape in func.tags:
        return _FIXED_SHAPE
    return _crossing(name, args, kwargs)


def _crossing(name: str, args: tuple[Any, ...], kwargs: Any) -> str:
    """Return what to do in place of a copy between host and GPU; "" for other operations."""
    if name == "aten._to_copy" and kwargs.get("device") is not None:
        source, target = args[0].device, torch.device(kwargs["device"])
    elif name == "aten.copy_":
        source, target = args[1].device, args[0].device
        # A graph can contain copies from and to pinned memory.
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
    """Raised before a step waits for the device."""


def _sync_error(name: str, remedy: str) -> SyncError:
    shown = name.replace(".", "::", 1) if name.startswith("aten") else name
    here = place_of(traceback.walk_stack(None))
    return SyncError(f"a captured step must not wait for the device, got {shown}{here}; {remedy}")


def place_of(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Describe the first frame that isn't in torch; "" if there is none."""
    for frame, line in frames:
        module = frame.f_globals.get("__name__", "")
        if module != __name__ and module.split(".")[0] != "torch":
            code = frame.f_code
            text = linecache.getline(code.co_filename, line).strip()
            shown = f": `{text}`" if text else ""
            return f" in {code.co_name} ({Path(code.co_filename).name}, line {line}{shown})"
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """Where sequences diverge: the rank, the position (from 0), its op and the others' op.

    op, expected: "nothing" if a sequence has ended.
    """

    rank: int
    place: int
    op: str
    expected: str


def first_difference(sequences: Sequence[Sequence[str]]) -> Divergence | None:
    """Return the first position where a rank differs from most ranks; None if all agree.

    sequences: one per rank. In a tie, the lower rank counts as right. If several ranks differ at
    the same position, the lowest is named.
    """
    for place, ops in enumerate(zip_longest(*sequences, fillvalue="nothing")):
        expected = Counter(ops).most_common(1)[0][0]
        for rank, op in enumerate(ops):
            if op != expected:
                return Divergence(rank=rank, place=place, op=op, expected=expected)
    return None


class RankAgreement:
    """Compares this rank's launches with those of the other ranks in a group.

    Every rank calls `check` before each of its collectives and once at the end, so the n-th calls
    of all ranks meet. What would have hung raises RuntimeError on all ranks instead.
    group: None is the default group; without one nothing is compared.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._ranks = rank_and_size(group)[1]
        self._told: list[str] = []
        self._hash = hashlib.sha256()

    def check(self, launches: Sequence[Launch]) -> None:
        """Raise RuntimeError on all ranks if launches differ, with a rank and its first wrong op.

        launches: all launches so far, starting with those of the previous call.
        """
        if self._ranks == 1:
            return
        fresh = [str(launch) for launch in launches[len(self._told) :]]
        self._told += fresh
        for one in fresh:
            self._hash.update(f"{one}\n".encode())
        self._look(self._gathered((self._hash.hexdigest(), "")))

    def fail(self, problem: BaseException) -> None:
        """Tell the ranks that are in `check`, or will be, that this one can't continue."""
        if self._ranks > 1:
            self._gathered(("", f"{type(problem).__name__}: {problem}"))

    def _look(self, answers: list[tuple[str, str]]) -> None:
        for rank, (_, problem) in enumerate(answers):
            if problem:
                raise PeerError(
                    f"every rank must run the step that is captured, but rank {rank} could not: "
                    f"{problem}"
                )
        if len({digest for digest, _ in answers}) == 1:
            return
        difference = first_difference(self._gathered(self._told))
        if difference is None:
            raise PeerError(
                "all ranks must launch the same operations, but they differ before the last "
                "collective; make the step the same on every rank"
            )
        raise PeerError(
            "all ranks must launch the same operations in the same order, but rank "
            f"{difference.rank} launches {difference.op} as number {difference.place + 1} where "
            f"the others launch {difference.expected}; make the step the same on every rank"
        )

    def _gathered(self, mine: Any) -> list[Any]:
        found: list[Any] = [None] * self._ranks
        dist.all_gather_object(found, mine, group=self._group)
        return found


class PeerError(RuntimeError):
    """Raised on all ranks at once, so that none keeps waiting for another."""


def refuse_what_nccl_cannot(device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Raise RuntimeError if the group's collectives can't be captured."""
    if rank_and_size(group)[1] == 1:
        return
    backend = dist.get_backend_config(group)
    if "nccl" not in backend:
        raise RuntimeError(
            f"a graph captures only NCCL's collectives, got a group with backend {backend}; create "
            "it with init_process_group('nccl')"
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
    """Raise RuntimeError on all ranks if two of them use the same GPU.

    name: this rank's GPU, unique among the GPUs of all machines (its UUID).
    """
    names: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(names, name, group=group)
    for rank, one in enumerate(names):
        if (first := names.index(one)) != rank:
            raise RuntimeError(_ONE_EACH.format(f"ranks {first} and {rank} on {one}"))
