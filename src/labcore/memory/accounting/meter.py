"""Measures what a training step actually holds, storage by storage, at every moment.

A storage is the memory behind tensors. A view shares its base's storage, which counts once. Every
operation that torch runs passes through a dispatch mode, which sees new storages; a finalizer
reports when each is freed. FSDP and `Offload` keep the storages of the weights that they gather and
free, but resize them, which the meter follows through `UntypedStorage.resize_`. The purpose of a
storage is known from the model (parameters and their gradients), from the optimizer's state, and
from what autograd saves.

The meter doesn't see scratch memory inside a kernel, memory that libraries below torch allocate for
themselves, or tensors that another thread creates.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from labcore.memory.accounting.breakdown import Breakdown

__all__ = ["PHASES", "Meter", "Moment"]

PHASES = ("between", "forward", "backward", "step")
KINDS = ("parameters", "gradients", "optimizer", "activations", "workspace")


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """The moment at which a storage was allocated, freed or resized.

    phase: one of PHASES; "between" is the time between an optimizer step and the next forward.
    module: the name of the innermost running module, "" outside modules.
    """

    phase: str
    module: str
    held: Breakdown


@dataclass(slots=True)
class _Block:
    """One storage. Its kind may become known only later, and then applies from its creation on."""

    module: str
    bytes: int = 0  # now
    kind: str = "workspace"
    alive: bool = True
    shrunk: bool = False

    def waits(self) -> None:
        """Mark it as an activation, which the backward will read.

        A storage that shrinks meanwhile is a gathered weight instead, which comes and goes beside
        the resident ones.
        """
        if self.kind == "workspace" and not self.shrunk:
            self.kind = "activations"


@dataclass(frozen=True, slots=True)
class _Event:
    block: _Block
    change: int  # in bytes, negative for less
    phase: str
    module: str


@dataclass(slots=True)
class _Place:
    """The current position in a step."""

    phase: str = "between"
    module: str = ""
    inside: list[str] = field(default_factory=list)  # names of modules whose forward is running
    recomputes: bool = False


class _Watch(TorchDispatchMode):
    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._meter._locate()
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            self._meter._block(tensor)
        return out


class Meter:
    """Counts the bytes that training steps hold while it's open.

        with Meter(model, optimizer) as meter:
            for _ in range(2):
                optimizer.zero_grad()
                loss(model, tokens).backward()
                optimizer.step()
        meter.peak.total, meter.phases["backward"], meter.by_module

    model: its parameters and buffers, on any device; several devices are summed.
    optimizers: none, one, or several (`*offload.optimizers`). State that the first step creates is
    told apart from workspace once that step is over.
    Open it around at least two steps, because the first creates the optimizer state. Storages that
    already existed and belong to neither the model nor the optimizers count once an operation
    returns them.
    allocator_peak: on a GPU, the allocator's peak in bytes during the same steps, minus what it
    held for others when they began; None on a CPU, whose allocator keeps no record.
    The results are available after the block, and a meter can be used only once. Raises
    RuntimeError for a second `with`, and for results if no storage was seen.
    """

    def __init__(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        self._model, self._optimizers = model, optimizers
        self._place, self._stack = _Place(), ExitStack()
        self._blocks: dict[int, _Block] = {}  # keyed by the storage's C++ address
        self._finalizers: dict[int, weakref.finalize[..., Any]] = {}
        self._events: list[_Event] = []
        self._since = 0  # the event with which a forward or a recomputation began
        self._others = 0  # bytes on the GPUs that are not the model's or the optimizer's
        self.allocator_peak: int | None = None

    # While it is open -----------------------------------------------------

    def __enter__(self) -> Meter:
        if self._events:
            raise RuntimeError("a Meter measures once, got a second `with`; make a new one")
        self._owners()
        self._mark_state()
        for optimizer in self._optimizers:
            before = optimizer.register_step_pre_hook(self._before_step)
            after = optimizer.register_step_post_hook(self._after_step)
            self._stack.callback(before.remove)
            self._stack.callback(after.remove)
        for name, module in self._model.named_modules():
            enter = module.register_forward_pre_hook(functools.partial(self._enter_module, name))
            leave = module.register_forward_hook(self._leave_module, always_call=True)
            self._stack.callback(enter.remove)
            self._stack.callback(leave.remove)
        self._stack.enter_context(
            torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        )
        self._watch_resizes()
        self._stack.enter_context(_Watch(self))
        for device in self._gpus():
            torch.cuda.reset_peak_memory_stats(device)
            self._others += torch.cuda.memory_allocated(device)
        self._others -= sum(block.bytes for block in self._blocks.values())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
        for finalizer in self._finalizers.values():
            finalizer.detach()
        self._finalizers.clear()
        self.__dict__.pop("timeline", None)  # one read inside the block is incomplete
        if gpus := self._gpus():
            highest = sum(torch.cuda.max_memory_allocated(device) for device in gpus)
            self.allocator_peak = highest - self._others

    def _gpus(self) -> set[torch.device]:
        return {p.device for p in self._model.parameters() if p.device.type == "cuda"}

    def _watch_resizes(self) -> None:
        """Wrap `resize_`, which isn't a dispatched operation and which other threads call too."""
        plain = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            plain(storage, size)
            block = self._blocks.get(storage._cdata)
            if block is not None:
                self._resize(block, storage.nbytes())
            return storage

        torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment,method-assign]
        self._stack.callback(setattr, torch.UntypedStorage, "resize_", plain)

    def _owners(self) -> None:
        for name, tensor in [*self._model.named_parameters(), *self._model.named_buffers()]:
            owner = name.rpartition(".")[0]
            self._mark(tensor, "parameters", owner)
            if tensor.requires_grad:
                done = tensor.register_post_accumulate_grad_hook(
                    functools.partial(self._accumulated, owner)
                )
                self._stack.callback(done.remove)
        self._mark_gradients()

    def _accumulated(self, owner: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._mark(parameter.grad, "gradients", owner)

    def _mark_gradients(self) -> None:
        """Mark existing gradients: DistributedDataParallel moves them after autograd's hook."""
        for name, parameter in self._model.named_parameters():
            self._accumulated(name.rpartition(".")[0], parameter)

    def _mark_state(self) -> None:
        parameters = self._model.named_parameters()
        names: dict[Tensor, str] = {p: name.rpartition(".")[0] for name, p in parameters}
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                self._mark(state, "optimizer", names.get(parameter, ""))

    def _begin(self, phase: str) -> None:
        """Begin a phase with its own moment, even if nothing is allocated or freed in it."""
        self._place.phase, self._place.module = phase, ""
        self._note(_Block(""), 0)

    def _before_step(self, *_: Any) -> None:
        self._mark_gradients()
        self._begin("step")

    def _after_step(self, *_: Any) -> None:
        self._mark_state()
        self._begin("between")

    def _locate(self) -> None:
        """Update the phase before an operation; keep what a forward or recomputation left."""
        place, backward = self._place, _in_backward()
        recomputes = backward and torch.is_grad_enabled()  # a plain backward builds no graph
        if backward and place.phase != "backward":
            self._keep()
            self._begin("backward")
        elif place.recomputes and not recomputes:
            self._keep()
        if recomputes and not place.recomputes:
            self._since = len(self._events)
        place.recomputes = recomputes

    def _keep(self) -> None:
        """Mark what is alive of a forward or recomputation as waiting for the backward.

        The hooks on saved tensors don't see all of it: torch.utils.checkpoint itself keeps the
        inputs of its regions and what it recomputes.
        """
        for event in self._events[self._since :]:
            if event.block.alive:
                event.block.waits()

    def _enter_module(self, name: str, *_: Any) -> None:
        if self._place.phase != "forward" and not _in_backward():
            self._begin("forward")
            self._since = len(self._events)
        self._place.inside.append(name)
        self._place.module = name

    def _leave_module(self, *_: Any) -> None:
        inside = self._place.inside
        inside.pop()
        self._place.module = inside[-1] if inside else ""

    def _pack(self, tensor: Tensor) -> tuple[Tensor, str]:
        for part in _tensors(tensor):
            self._block(part).waits()
        # Detached, so that it keeps the memory but not the graph.
        return tensor.detach(), self._place.module

    def _unpack(self, kept: tuple[Tensor, str]) -> Tensor:
        tensor, module = kept
        if not self._place.inside:
            self._place.module = module
        return tensor

    def _mark(self, tree: Any, kind: str, owner: str) -> None:
        for tensor in _tensors(tree):
            block = self._block(tensor)
            if block.kind != "parameters":
                block.kind, block.module = kind, owner

    def _block(self, tensor: Tensor) -> _Block:
        """Return the record of a tensor's storage, created at first sight."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = _Block(self._place.module, size)
            self._note(block, size)
            self._finalizers[key] = weakref.finalize(storage, self._freed, key)
        elif size != block.bytes:  # by an operation such as Tensor.resize_
            self._resize(block, size)
        return block

    def _resize(self, block: _Block, size: int) -> None:
        self._note(block, size - block.bytes)
        if size < block.bytes:
            block.shrunk = True
            if block.kind == "activations":
                block.kind = "workspace"
        block.bytes = size

    def _freed(self, key: int) -> None:
        del self._finalizers[key]
        block = self._blocks.pop(key)
        block.alive = False
        self._locate()
        self._note(block, -block.bytes)

    def _note(self, block: _Block, change: int) -> None:
        self._events.append(_Event(block, change, self._place.phase, self._place.module))

    # What it found --------------------------------------------------------

    @functools.cached_property
    def timeline(self) -> tuple[Moment, ...]:
        """A moment for each storage that was allocated, freed or resized, in order."""
        held = dict.fromkeys(KINDS, 0)
        moments = []
        for event in self._events:
            held[event.block.kind] += event.change
            moments.append(Moment(phase=event.phase, module=event.module, held=Breakdown(**held)))
        return tuple(moments)

    @property
    def _moments(self) -> tuple[Moment, ...]:
        if not self.timeline:
            raise RuntimeError("the Meter saw no storage; run a training step inside its block")
        return self.timeline

    def _highest(self) -> int:
        totals = [moment.held.total for moment in self._moments]
        return totals.index(max(totals))

    @property
    def peak(self) -> Breakdown:
        """The breakdown when the total was highest."""
        return self.timeline[self._highest()].held

    @property
    def phases(self) -> dict[str, Breakdown]:
        """The breakdown when the total was highest, for each phase that occurred."""
        found: dict[str, Breakdown] = {}
        for moment in self._moments:
            before = found.get(moment.phase)
            if before is None or moment.held.total > before.total:
                found[moment.phase] = moment.held
        return found

    @property
    def most(self) -> Breakdown:
        """Each part's own maximum; these need not occur at the same moment."""
        held = [moment.held for moment in self._moments]
        return Breakdown(**{name: max(getattr(h, name) for h in held) for name in KINDS})

    @property
    def by_module(self) -> dict[str, Breakdown]:
        """The peak by module: the one that owns the weights, or that ran at the allocation.

        "" is the loss and whatever else ran outside modules. The parts add up to `peak`.
        """
        found: dict[str, dict[str, int]] = {}
        for event in self._events[: self._highest() + 1]:
            held = found.setdefault(event.block.module, dict.fromkeys(KINDS, 0))
            held[event.block.kind] += event.change
        parts = {name: Breakdown(**held) for name, held in found.items()}
        return {name: part for name, part in parts.items() if part.total}


def _in_backward() -> bool:
    # The only sign of a running backward; torch.utils.checkpoint uses it too.
    return torch._C._current_graph_task_id() != -1


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Yield every plain tensor in a tree, and those inside wrappers (DTensor, quantized ones)."""
    for leaf in tree_leaves(tree):
        if is_traceable_wrapper_subclass(leaf):
            names, _ = leaf.__tensor_flatten__()
            yield from _tensors([getattr(leaf, name) for name in names])
        elif isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            yield leaf
