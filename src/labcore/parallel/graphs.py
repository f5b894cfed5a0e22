"""Decode steps as CUDA graphs: captured once per batch size, then replayed with one launch.

A graph removes the launches of a step, which the host makes one by one. The time that collectives
need on the wire remains. A replay uses the addresses of the capture, so everything it reads and
writes must stay in place.

Letters: B rows, V vocabulary.
"""

from __future__ import annotations

import atexit
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labcore.checks import positive_int
from labcore.models.cache import KVCache
from labcore.models.llama import Llama
from labcore.parallel.addresses import Addresses, first_rows
from labcore.parallel.recording import (
    Launch,
    PeerError,
    RankAgreement,
    SyncError,
    launch_sequence,
    place_of,
    refuse_shared_gpus,
    refuse_what_nccl_cannot,
)
from labcore.parallel.regions import rank_and_size

__all__ = ["GraphedDecoder", "refuse_shared_gpus"]

_AGAIN = "call capture() again"


class GraphedDecoder:
    """Decode steps of one token per row, captured for some batch sizes.

    model: a `Llama`, whole or divided by `parallelize`, on one device. cache: the rows' cache,
    already holding their prompts; row b of the tokens is row b of the cache. A cache other than
    `DenseCache` must not read from the device in a step, captured or not. To run fewer rows than it
    has, it needs `first_rows(n) -> KVCache`, a view of its first n rows. The tensors in its
    `buffers()` must not move.
    batches: sizes to capture. A step of B rows uses the next larger size; the extra rows don't
    advance (their cache and lengths don't change). Sizes above the cache's rows count as its rows.
    warmup: steps before a capture, at least one. group: the ranks that run the same steps; None is
    the model's own group, or else the default one.

    Sizes are captured when first needed, or all at once by `capture()`, largest first, in one
    memory pool. On several ranks, all must make the same calls. Before a capture, the launches of
    all ranks are compared. A CPU can't capture anything: there, the same steps run operation by
    operation through the same buffers, and misuse raises as it does on a GPU.

    close() destroys the graphs. Call it, or leave the `with` block, before the process group is
    destroyed; a communicator that graphs still use makes the program hang.
    Raises ValueError or TypeError for invalid arguments. Raises RuntimeError for several ranks on
    one GPU (NCCL needs one GPU per process), for a step that waits for the device, for ranks whose
    launches differ, for weights or a cache that moved since the capture, and after close().
    """

    def __init__(
        self,
        model: Llama,
        cache: KVCache,
        *,
        batches: Sequence[int] = (1, 2, 4, 8, 16),
        warmup: int = 3,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not batches:
            raise ValueError("batches must hold at least one size, got none")
        self._asked = tuple(positive_int("a size in batches", size) for size in batches)
        self._warmup = positive_int("warmup", warmup)
        self._asked_group = group
        self._grouped = dist.is_available() and dist.is_initialized()
        self._closed = False
        self._graphs: dict[int, _Captured] = {}
        self._prepare(model, cache)
        self._release = weakref.finalize(self, _destroy, self._graphs)
        # Exit handlers run last in, first out, so this runs before the process group ends.
        atexit.register(self._release)

    def _prepare(self, model: Llama, cache: KVCache) -> None:
        """Make buffers and cache views, record addresses, and destroy existing graphs."""
        asked = self._asked_group
        group = getattr(model, "group", None) if asked is None else asked
        rank_and_size(group)  # raises if this process isn't in the group
        device = next(model.parameters()).device
        if cache.lengths.device != device:
            raise ValueError(
                f"model and cache must be on one device, got {device} and "
                f"{cache.lengths.device}; make the cache with device={str(device)!r}"
            )
        if device.type == "cuda" and self._grouped:
            with torch.cuda.device(device):  # the collectives use the current device
                refuse_what_nccl_cannot(device, group)
        rows = cache.lengths.shape[0]
        sizes = tuple(sorted({min(size, rows) for size in self._asked}))
        views = {size: first_rows(cache, size) for size in sizes}
        _destroy(self._graphs)
        self._model, self._cache, self._device, self._group = model, cache, device, group
        self._sizes, self._rows = sizes, views
        self._tokens = torch.zeros(sizes[-1], dtype=torch.int64, device=device)
        self._counts = torch.zeros(sizes[-1], dtype=torch.int32, device=device)
        self._addresses = Addresses(model, cache)
        self._pool: Any = None
        self._aside: Any = None  # the stream of all captures, so that graphs can share memory
        self._longest = 0  # an upper bound on the lengths, valid for one version of the tensor
        self._version = -1

    @property
    def model(self) -> Llama:
        """The model whose steps are captured; `capture(model=…)` replaces it."""
        return self._model

    @property
    def cache(self) -> KVCache:
        """The cache that the steps write to; `capture(cache=…)` replaces it."""
        return self._cache

    @property
    def device(self) -> torch.device:
        """The device that runs the steps."""
        return self._device

    @property
    def batches(self) -> tuple[int, ...]:
        """The sizes that steps are padded to, in ascending order."""
        return self._sizes

    @property
    def captured(self) -> tuple[int, ...]:
        """The sizes that are captured now, in ascending order."""
        return tuple(sorted(self._graphs))

    def __call__(self, tokens: Tensor, *, active: Tensor | None = None) -> Tensor:
        """Append tokens, integers [B], to their rows; return logits [B, V] of the next tokens.

        active: bool [B]; rows that are False don't advance, and their logits are meaningless. None:
        all rows are active. The cache advances by one token.
        Returns a new tensor. Raises ValueError if a row of the cache is full.
        """
        self._check_open()
        batch = self._checked(tokens, active)
        self._check_addresses()
        size = self._size(batch)
        if size not in self._graphs:
            self._capture(size)
        self._make_room(batch, active)
        self._fill(tokens, active, size)
        logits = self._replay(size)
        lengths = self._cache.lengths
        if not lengths.is_inference():
            # torch doesn't see a replay's writes, but another decoder with this cache must.
            torch.autograd.graph.increment_version(lengths)
            self._version = lengths._version
        return logits[:batch].clone()  # the next step overwrites the graph's output

    def capture(self, *, model: Llama | None = None, cache: KVCache | None = None) -> None:
        """Capture all sizes, largest first, and replace what was captured before.

        model, cache: used from now on; None keeps the current one.
        """
        self._check_open()
        self._prepare(
            self._model if model is None else model, self._cache if cache is None else cache
        )
        for size in reversed(self._sizes):
            self._capture(size)

    def launches(self, batch: int) -> tuple[str, ...]:
        """Return the launch sequence of a step of `batch` rows: operations with dtypes and shapes.

        It's the sequence of the size that the step is padded to, which is captured now if
        necessary.
        """
        return tuple(map(str, self.recorded(batch)))

    def recorded(self, batch: int) -> tuple[Launch, ...]:
        """Return the same sequence as `launches`, each operation as a `Launch`."""
        self._check_open()
        size = self._size(positive_int("batch", batch))
        if size not in self._graphs:
            self._capture(size)
        return self._graphs[size].launches

    def close(self) -> None:
        """Destroy the graphs; call it before destroying the process group they communicate in."""
        self._closed = True
        self._release()
        atexit.unregister(self._release)

    def __enter__(self) -> GraphedDecoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("a GraphedDecoder must not be used after close(); make a new one")
        if self._grouped and not dist.is_initialized():
            raise RuntimeError(
                "the process group must outlive the graphs, but it was destroyed; call close() "
                "before dist.destroy_process_group()"
            )

    def _check_addresses(self) -> None:
        if moved := self._addresses.moved():
            raise RuntimeError(
                f"what a graph reads must stay where it was captured, but {moved}; {_AGAIN}"
            )

    def _checked(self, tokens: Tensor, active: Tensor | None) -> int:
        integers = not (tokens.is_floating_point() or tokens.dtype == torch.bool)
        if tokens.dim() != 1 or not len(tokens) or not integers:
            raise ValueError(
                f"tokens must be integers [B], one per row, got {tokens.dtype} "
                f"{tuple(tokens.shape)}"
            )
        fits = active is None or (active.dtype == torch.bool and active.shape == tokens.shape)
        if active is not None and not fits:
            raise ValueError(
                f"active must be bool {tuple(tokens.shape)} for these tokens, got {active.dtype} "
                f"{tuple(active.shape)}"
            )
        return len(tokens)

    def _size(self, batch: int) -> int:
        for size in self._sizes:
            if size >= batch:
                return size
        raise ValueError(
            f"a step must have at most {self._sizes[-1]} rows, got {batch}; add a larger size to "
            "batches, and make a cache with at least as many rows"
        )

    def _make_room(self, batch: int, active: Tensor | None) -> None:
        """Raise ValueError if a row is full.

        Waits for the device only if others changed the lengths, or near the end.
        """
        capacity = getattr(self._cache, "capacity", None)
        if capacity is None:
            return
        lengths = self._cache.lengths
        if lengths.is_inference() or lengths._version != self._version:
            self._longest = int(lengths.max())
        if self._longest >= capacity:
            growing = 1 if active is None else active.to(lengths)
            longest = int((lengths[:batch] + growing).max())
            if longest > capacity:
                raise ValueError(
                    f"a row must hold at most {capacity} tokens, got {longest}; make a cache with "
                    "a larger capacity, or truncate it"
                )
        self._longest += 1

    @torch.inference_mode()
    def _fill(self, tokens: Tensor, active: Tensor | None, size: int) -> None:
        batch = len(tokens)
        self._tokens[:batch].copy_(tokens)
        if active is None:
            self._counts[:batch].fill_(1)
        else:
            self._counts[:batch].copy_(active)
        self._counts[batch:size].zero_()

    def _replay(self, size: int) -> Tensor:
        captured = self._graphs[size]
        if captured.graph is None:
            return self._step(size)
        captured.graph.replay()
        return captured.logits

    def _resting_step(self, batch: int, *, graphed: bool) -> Callable[[], Tensor]:
        """Return a step in which no row advances, for timing."""
        self._check_addresses()
        self._rest()
        return partial(self._replay if graphed else self._step, self._size(batch))

    @torch.inference_mode()
    def _rest(self) -> None:
        self._counts.zero_()

    @torch.inference_mode()
    def _step(self, size: int) -> Tensor:
        """Run one step of `size` rows on the buffers' contents; returns logits [size, V]."""
        out = self._model(
            self._tokens[:size, None], counts=self._counts[:size], cache=self._rows[size]
        )
        return out.logits[:, 0]

    def _capture(self, size: int) -> None:
        self._rest()  # so that warm-up leaves the cache as it is
        with self._on_device():
            # Find what would hang or break a capture before capturing anything, because torch
            # doesn't always recover from a capture that CUDA itself broke.
            launches = self._compared(size)
            self._graphs[size] = (
                self._captured_on_gpu(size) if self._on_gpu else _Captured(launches=launches)
            )

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def _on_device(self) -> AbstractContextManager[Any]:
        """Make the device current: streams are created on it, and collectives of objects use it."""
        return torch.cuda.device(self._device) if self._on_gpu else nullcontext()

    def _compared(self, size: int) -> tuple[Launch, ...]:
        """Run a step and return its launches; each collective waits until all ranks reach it."""
        agreement = RankAgreement(self._group)
        try:
            _, launches = launch_sequence(
                lambda: self._step(size), before_collective=agreement.check
            )
        except PeerError:
            raise
        except Exception as problem:
            agreement.fail(problem)
            raise
        agreement.check(launches)
        return launches

    def _captured_on_gpu(self, size: int) -> _Captured:
        here = torch.cuda.current_stream()
        if self._aside is None:
            self._aside = torch.cuda.Stream()
        self._aside.wait_stream(here)
        with torch.cuda.stream(self._aside):
            for _ in range(self._warmup):
                self._step(size)
        here.wait_stream(self._aside)
        agreement = RankAgreement(self._group)
        try:
            captured = self._recorded_graph(size)
        except Exception as problem:
            self._pool = None  # torch may think that the failed capture is still using it
            agreement.fail(problem)
            raise
        finally:
            torch.cuda.set_stream(here)  # a broken capture leaves another stream current
        agreement.check(captured.launches)
        return captured

    def _recorded_graph(self, size: int) -> _Captured:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, cause = torch.cuda.CUDAGraph(), None
        try:
            # thread_local: GPU work on other threads can't break this capture.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._aside, capture_error_mode="thread_local"
            ):
                try:
                    logits, launches = launch_sequence(lambda: self._step(size))
                except Exception as problem:
                    cause = problem  # ending a broken capture raises another error
                    raise
        except Exception as problem:
            cause = cause or problem
            if isinstance(cause, SyncError):
                raise cause from None
            frames = reversed([*traceback.walk_tb(cause.__traceback__)])
            raise RuntimeError(
                f"a step of {size} rows must be possible to capture, got {cause}"
                f"{place_of(frames)}; nothing in it may wait for the device or allocate memory "
                "outside of torch"
            ) from cause
        return _Captured(launches=launches, graph=graph, logits=logits)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Captured:
    launches: tuple[Launch, ...]
    graph: Any = None  # torch.cuda.CUDAGraph; None on a CPU
    logits: Any = None  # [size, V], where a replay leaves them


def _destroy(graphs: dict[int, _Captured]) -> None:
    held = [captured for captured in graphs.values() if captured.graph is not None]
    graphs.clear()
    # The garbage collector may call this during another decoder's capture, which a wait breaks.
    if held and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize(held[0].logits.device)
    for captured in held:
        captured.graph.reset()
