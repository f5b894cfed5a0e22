"""Training with weights and optimizer state in a lower tier: main memory below a GPU, or a disk.

"Above" is the memory where the model computes; "below" is the tier. A block's weights are above
while it computes, and the next block is fetched meanwhile, so there are never more than two blocks
above, however deep the model. One thread does all moves in the order requested. Forward and
backward don't change weights, so these are freed without being written. The optimizer step fetches
weights and state, updates them, and writes both.

The optimizer treats each block as it would treat the whole model: losses and weights are those of
training without offload, to the bit.
Sources: Ren et al., 2021, arXiv 2101.06840; Rajbhandari et al., 2021, arXiv 2104.07857.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from labcore.memory.accounting.breakdown import Breakdown
from labcore.memory.tiers import Key, Tier
from labcore.memory.zero import held

__all__ = ["Offload", "OffloadTraffic"]

Optimizers = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
REST = -1  # the number of the group with everything outside the blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadTraffic:
    """What was moved: bytes, the seconds spent moving, and the seconds that training waited."""

    read: int = 0
    written: int = 0
    moving_s: float = 0.0
    waited_s: float = 0.0

    @property
    def hidden(self) -> float:
        """The share of the moving time that computation hid, 0 to 1."""
        return max(0.0, 1 - self.waited_s / self.moving_s) if self.moving_s else 0.0


@dataclass(slots=True)
class _Group:
    """What moves together: one block, or what's outside the blocks (whose weights stay above)."""

    number: int
    weights: list[torch.UntypedStorage]
    optimizer: torch.optim.Optimizer

    def storages(self, *, state: bool) -> dict[Key, torch.UntypedStorage]:
        """Return the weights' storages and, with `state`, the optimizer state's after them."""
        kept = _storages(_tensors(list(self.optimizer.state.values()))) if state else []
        return {(self.number, n): storage for n, storage in enumerate([*self.weights, *kept])}


class Offload:
    """Trains a model with at most two blocks above at a time.

        with Offload(model, model.layers, torch.optim.AdamW, Disk()) as offload:
            offload.zero_grad()
            loss(model, tokens).backward()
            offload.step()

    model: on one device. blocks: its modules whose weights go below, in the order in which a
    forward calls them, each once; two blocks may not share a weight. All other weights stay above,
    but their optimizer state goes below too; gradients and buffers stay above.
    optimizer: called with a list of parameters, once per block. One that uses all parameters
    together gives other results per block; clip by a global norm before `step`.
    prefetch: False fetches each block only when it's needed.
    `models.train` accepts an Offload as its optimizer. Weights that are below have no memory: read
    them after the `with` block, when everything is back and `optimizers` have their state. An
    Offload can be used only once. A failed read is tried again at the end. What still can't be read
    is lost, and the error says which block it belonged to; everything else comes back.
    peak: the most that weights, gradients and state held at a time. traffic: what was moved.
    Raises ValueError for blocks that share weights, have none, or aren't the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Iterable[nn.Module],
        optimizer: Optimizers,
        tier: Tier,
        *,
        prefetch: bool = True,
    ) -> None:
        self._model, self._blocks, self._tier, self._prefetch = model, list(blocks), tier, prefetch
        self._groups = _grouped(model, self._blocks, optimizer)
        self._thread: ThreadPoolExecutor | None = None
        # Groups above or on their way up; None means arrived.
        self._above: dict[int, Future[float] | None] = {}
        self._going: list[Future[float]] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._sizes: dict[Key, int] = {}  # of what is below
        self.peak, self.traffic = Breakdown(), OffloadTraffic()

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """One for the weights outside the blocks, if there are any, then one per block."""
        return [group.optimizer for group in self._groups.values()]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers, where a schedule sets the learning rates."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def held(self) -> Breakdown:
        """Bytes above now: weights and buffers, gradients, optimizer state."""
        return held(self._model, *self.optimizers)

    # Training -------------------------------------------------------------

    def __enter__(self) -> Offload:
        if self._thread is not None:
            raise RuntimeError("an Offload is used once, got a second `with`; make a new one")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offload")
        try:
            for group in self._groups.values():
                self._send(group)
            self._arrive()
        except BaseException as error:  # A full disk, say: bring back what was sent.
            self.__exit__(type(error), error, None)
            raise
        for place, block in enumerate(self._blocks):
            self._hooks.append(block.register_forward_pre_hook(partial(self._before, place)))
            self._hooks.append(block.register_forward_hook(partial(self._after, place)))
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for hook in self._hooks:
            hook.remove()
        try:
            if error is None:
                self._arrive()
            self._work.submit(int).result()  # In order, so all that could be written is below now.
            for number in list(self._above):
                with suppress(Exception):  # `_back` tries a failed read again.
                    self._drop(number)
            self._back()
        finally:
            self._work.shutdown()
            self._tier.close()

    def _back(self) -> None:
        """Bring everything back; a group that can't be read doesn't affect the others."""
        fault: Exception | None = None
        for group in self._groups.values():
            try:
                self._fetch(group, state=True)
                self._wait(group)
            except Exception as error:
                whose = "no block" if group.number == REST else f"block {group.number}"
                fault = fault or error
                fault.add_note(f"what belongs to {whose} could not be read back and is lost")
        if fault is not None:
            raise fault

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as an optimizer does."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def step(self) -> None:
        """Step the optimizers, one group at a time, and fetch the next group meanwhile."""
        self._drop(*self._above)
        groups = list(self._groups.values())
        for place, group in enumerate(groups):
            self._arrive()  # The previous group is below, so at most two are above.
            self._fetch(group, state=True)
            self._wait(group)
            if self._prefetch and place + 1 < len(groups):
                self._fetch(groups[place + 1], state=True)
            group.optimizer.step()
            self._note()
            del self._above[group.number]
            self._send(group)
        self._arrive()

    def _before(self, place: int, *_: object) -> None:
        self._bring(place, -1 if _in_backward() else 1)

    def _after(self, place: int, _block: nn.Module, _args: object, output: Any) -> None:
        if _in_backward():
            return  # A recomputation: the backward needs the weights next.
        tracked = [x for x in _tensors(output) if x.requires_grad]
        for tensor in tracked:
            tensor.register_hook(lambda _: self._bring(place, -1))
        if not (tracked and place == len(self._blocks) - 1):  # A backward begins with the last.
            self._drop(place)

    # Moving ---------------------------------------------------------------

    @property
    def _work(self) -> ThreadPoolExecutor:
        if self._thread is None:
            raise RuntimeError("an Offload moves nothing before its `with` block; enter it first")
        return self._thread

    def _bring(self, place: int, direction: int) -> None:
        """Get a block above, free those it no longer needs, and start fetching the next."""
        following = place + direction
        self._drop(*(self._above.keys() - {place, following}))
        self._fetch(self._groups[place])
        if self._prefetch and following in range(len(self._blocks)):
            self._fetch(self._groups[following])
        self._note()
        self._wait(self._groups[place])

    def _fetch(self, group: _Group, *, state: bool = False) -> None:
        """Make room and request what is below, unless it's already requested."""
        if group.number in self._above:
            return
        known = group.storages(state=state)
        wanted = {key: storage for key, storage in known.items() if not storage.nbytes()}
        for key, storage in wanted.items():
            storage.resize_(self._sizes[key])
        self._above[group.number] = self._move(wanted, self._tier.read)
        moved = sum(storage.nbytes() for storage in wanted.values())
        self.traffic = replace(self.traffic, read=self.traffic.read + moved)

    def _send(self, group: _Group) -> None:
        """Write a group's weights and state, and free them once they're below."""
        known = group.storages(state=True)
        self._sizes |= {key: storage.nbytes() for key, storage in known.items()}
        moved = sum(storage.nbytes() for storage in known.values())
        self.traffic = replace(self.traffic, written=self.traffic.written + moved)
        self._going.append(self._move(known, self._tier.write, free=True))

    def _move(
        self,
        storages: dict[Key, torch.UntypedStorage],
        move: Callable[[Key, Tensor], None],
        *,
        free: bool = False,
    ) -> Future[float]:
        """Have the thread move storages, and free each one moved if `free`; returns its seconds."""
        # On a GPU, the thread first waits for the work queued so far.
        devices = {s.device for s in storages.values() if s.device.type == "cuda"}
        events = [torch.cuda.current_stream(device).record_event() for device in devices]

        def work() -> float:
            begin = time.perf_counter()
            for event in events:
                event.synchronize()
            try:
                for key, storage in storages.items():
                    move(key, _bytes(storage))
                    if free:
                        storage.resize_(0)
            except BaseException:
                if not free:  # Half a group is useless; the copy below is whole.
                    for storage in storages.values():
                        storage.resize_(0)
                raise
            return time.perf_counter() - begin

        return self._work.submit(work)

    def _wait(self, group: _Group) -> None:
        self._count(self._above.pop(group.number))
        self._above[group.number] = None

    def _arrive(self) -> None:
        """Wait for all pending writes."""
        while self._going:
            self._count(self._going.pop())

    def _count(self, future: Future[float] | None) -> None:
        if future is None:
            return
        begin = time.perf_counter()
        moving = future.result()
        self.traffic = replace(
            self.traffic,
            moving_s=self.traffic.moving_s + moving,
            waited_s=self.traffic.waited_s + time.perf_counter() - begin,
        )

    def _drop(self, *numbers: int) -> None:
        """Free the weights of groups; the copies below are the same."""
        for number in numbers:
            self._count(self._above.pop(number))
            for storage in self._groups[number].weights:
                storage.resize_(0)

    def _note(self) -> None:
        self.peak = max(self.peak, self.held, key=lambda held: held.total)


def _grouped(model: nn.Module, blocks: list[nn.Module], optimizer: Optimizers) -> dict[int, _Group]:
    """Group the parameters: those outside the blocks under REST, then the blocks by position."""
    owners: dict[int, int] = {}
    for place, block in enumerate(blocks):
        for storage in _storages(block.parameters()):
            if owners.setdefault(storage._cdata, place) != place:
                raise ValueError(
                    f"a weight must belong to one block, got one in {owners[storage._cdata]} and "
                    f"{place}; leave one of the two out of blocks"
                )
    split: dict[int, list[nn.Parameter]] = {place: [] for place in range(REST, len(blocks))}
    for parameter in model.parameters():
        split[owners.get(parameter.untyped_storage()._cdata, REST)].append(parameter)
    for place, block in enumerate(blocks):
        if {id(p) for p in block.parameters()} != {id(p) for p in split[place]} or not split[place]:
            raise ValueError(
                f"a block must be a module of the model with weights of its own, got "
                f"{type(block).__name__} at {place}; pass for example model.layers"
            )
    return {
        number: _Group(number, [] if number == REST else _storages(own), optimizer(own))
        for number, own in split.items()
        if own
    }


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the distinct storages of tensors, in order."""
    found = [tensor.untyped_storage() for tensor in tensors]
    return list({storage._cdata: storage for storage in found}.values())


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """Return a whole storage as uint8 [n]. Autograd doesn't notice writes through it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _in_backward() -> bool:
    # The only sign of a running backward; torch.utils.checkpoint uses it too.
    return torch._C._current_graph_task_id() != -1
