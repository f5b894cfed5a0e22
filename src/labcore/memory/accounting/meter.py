"""What a training step really holds, storage by storage, at every moment.

A storage is the memory behind tensors: a view has that of its base and counts once. Every operation
that torch runs passes a dispatch mode, which sees the storages that come; a finalizer tells when
each is freed. One that stays but is resized, as FSDP and `Offload` do with weights that they bring
and let go, is followed through `UntypedStorage.resize_`. What a storage is for is known from the
model (parameters, and their gradients), from the optimizer's state, and from what autograd saves.

Not seen: scratch memory inside a kernel, what libraries below torch take for themselves, and
tensors that another thread makes.
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
    """A storage has come, gone, or changed its size.

    phase: one of PHASES; "between" is what stands between a step of the optimizer and the next
    forward. module: the name of the innermost module at work, "" outside of them.
    """

    phase: str
    module: str
    held: Breakdown


@dataclass(slots=True)
class _Block:
    """One storage. Its kind may become known after it was made, and then holds from its birth."""

    module: str
    bytes: int = 0  # now
    kind: str = "workspace"
    alive: bool = True
    shrunk: bool = False

    def waits(self) -> None:
        """The backward will read it; what shrinks meanwhile is no activation but a gathered weight,
        which comes and goes beside those at rest.
        """
        if self.kind == "workspace" and not self.shrunk:
            self.kind = "activations"


@dataclass(frozen=True, slots=True)
class _Event:
    block: _Block
    change: int  # bytes more, or less
    phase: str
    module: str


@dataclass(slots=True)
class _Place:
    """Where a step stands."""

    phase: str = "between"
    module: str = ""
    inside: list[str] = field(default_factory=list)  # names of modules whose forward runs
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
    """Counts the bytes that steps of training hold while it is open.

        with Meter(model, optimizer) as meter:
            for _ in range(2):
                optimizer.zero_grad()
                loss(model, tokens).backward()
                optimizer.step()
        meter.peak.total, meter.phases["backward"], meter.by_module

    model: its parameters and buffers, on any device; several devices are added up.
    optimizers: none, one, or several (`*offload.optimizers`); state that a first step makes is told
    apart from workspace once that step is over.
    Open it around two steps or more: the first makes the optimizer's state. What the process held
    before, and belongs to neither model nor optimizers, counts once an operation returns it.
    allocator_peak: on a GPU the allocator's own record of the same steps, in bytes, less what it
    held for others when they began; None on a CPU, whose allocator keeps no record.
    The results stand ready after the block; a meter is used once. RuntimeError for a second `with`,
    and for results where no storage was seen.
    """

    def __init__(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        self._model, self._optimizers = model, optimizers
        self._place, self._stack = _Place(), ExitStack()
        self._blocks: dict[int, _Block] = {}  # by the address of the storage's own record
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
        self.__dict__.pop("timeline", None)  # one that was read inside ends there
        if gpus := self._gpus():
            highest = sum(torch.cuda.max_memory_allocated(device) for device in gpus)
            self.allocator_peak = highest - self._others

    def _gpus(self) -> set[torch.device]:
        return {p.device for p in self._model.parameters() if p.device.type == "cuda"}

    def _watch_resizes(self) -> None:
        """`resize_` is no operation, and other threads call it too."""
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
        """Those that stand: DistributedDataParallel moves them after autograd's hook has run."""
        for name, parameter in self._model.named_parameters():
            self._accumulated(name.rpartition(".")[0], parameter)

    def _mark_state(self) -> None:
        parameters = self._model.named_parameters()
        names: dict[Tensor, str] = {p: name.rpartition(".")[0] for name, p in parameters}
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                self._mark(state, "optimizer", names.get(parameter, ""))

    def _begin(self, phase: str) -> None:
        """A phase is a moment of its own, even if nothing comes or goes in it."""
        self._place.phase, self._place.module = phase, ""
        self._note(_Block(""), 0)

    def _before_step(self, *_: Any) -> None:
        self._mark_gradients()
        self._begin("step")

    def _after_step(self, *_: Any) -> None:
        self._mark_state()
        self._begin("between")

    def _locate(self) -> None:
        """Where this operation stands; what a forward or a recomputation left is kept from then."""
        place, backward = self._place, _in_backward()
        recomputes = backward and torch.is_grad_enabled()  # a plain backward makes no graph
        if backward and place.phase != "backward":
            self._keep()
            self._begin("backward")
        elif place.recomputes and not recomputes:
            self._keep()
        if recomputes and not place.recomputes:
            self._since = len(self._events)
        place.recomputes = recomputes

    def _keep(self) -> None:
        """What is alive of a forward or a recomputation waits for the backward.

        The hooks on saved tensors do not see all of it: torch.utils.checkpoint keeps the inputs of
        its regions, and what it recomputes, by itself.
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
        # Detached: what is kept holds memory and no graph.
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
        """The record of a tensor's storage, made at the first sight of it."""
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
        """A moment for each storage that came, went or changed its size, in their order."""
        held = dict.fromkeys(KINDS, 0)
        moments = []
        for event in self._events:
            held[event.block.kind] += event.change
            moments.append(Moment(phase=event.phase, module=event.module, held=Breakdown(**held)))
        return tuple(moments)

    @property
    def _moments(self) -> tuple[Moment, ...]:
        if not self.timeline:
            raise RuntimeError("the Meter saw no storage; run a step of training inside its block")
        return self.timeline

    def _highest(self) -> int:
        totals = [moment.held.total for moment in self._moments]
        return totals.index(max(totals))

    @property
    def peak(self) -> Breakdown:
        """What was held when most was held."""
        return self.timeline[self._highest()].held

    @property
    def phases(self) -> dict[str, Breakdown]:
        """What was held when most was held, in each phase that occurred."""
        found: dict[str, Breakdown] = {}
        for moment in self._moments:
            before = found.get(moment.phase)
            if before is None or moment.held.total > before.total:
                found[moment.phase] = moment.held
        return found

    @property
    def most(self) -> Breakdown:
        """The highest that each part was on its own: these need not belong to one moment."""
        held = [moment.held for moment in self._moments]
        return Breakdown(**{name: max(getattr(h, name) for h in held) for name in KINDS})

    @property
    def by_module(self) -> dict[str, Breakdown]:
        """The peak, by the module that owns the weights or ran when the storage was made.

        "" stands for the loss and whatever else ran outside of modules. The parts add up to `peak`.
        """
        found: dict[str, dict[str, int]] = {}
        for event in self._events[: self._highest() + 1]:
            held = found.setdefault(event.block.module, dict.fromkeys(KINDS, 0))
            held[event.block.kind] += event.change
        parts = {name: Breakdown(**held) for name, held in found.items()}
        return {name: part for name, part in parts.items() if part.total}


def _in_backward() -> bool:
    # The only sign of a running backward; torch.utils.checkpoint reads the same.
    return torch._C._current_graph_task_id() != -1


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Every plain tensor in a tree: of one that wraps others (DTensor, a quantized one) those."""
    for leaf in tree_leaves(tree):
        if is_traceable_wrapper_subclass(leaf):
            names, _ = leaf.__tensor_flatten__()
            yield from _tensors([getattr(leaf, name) for name in names])
        elif isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            yield leaf
