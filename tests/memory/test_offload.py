"""Offload changes where weights and state are, and nothing else: to the bit, two blocks above."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from labcore.memory import Disk, Host, Offload, offloaded
from labcore.models import Llama, LlamaConfig, train, windows
from tests.memory.steps import AWKWARD, OPTIMIZERS, Stretch

GROUPED = LlamaConfig(**AWKWARD["grouped"])


def trained(
    model: nn.Module,
    inputs: list[Tensor],
    make: Callable[..., torch.optim.Optimizer],
    offload: Callable[[], Offload] | None = None,
    accumulate: int = 1,
) -> list[Tensor]:
    """Losses, weights and state after a step for every `accumulate` inputs."""
    found = []

    def run(optimizer: torch.optim.Optimizer | Offload) -> None:
        for at in range(0, len(inputs), accumulate):
            optimizer.zero_grad()
            for x in inputs[at : at + accumulate]:
                loss = model(x).square().sum()
                loss.backward()
                found.append(loss.detach())
            optimizer.step()

    if offload is None:
        optimizer = make(list(model.parameters()))
        run(optimizer)
        optimizers = [optimizer]
    else:
        with offload() as used:
            run(used)
        optimizers = used.optimizers
    state = {p: s for optimizer in optimizers for p, s in optimizer.state.items()}
    found += [p.detach() for p in model.parameters()]
    for p in model.parameters():
        found += [v for v in state.get(p, {}).values() if isinstance(v, Tensor)]
    return found


def above(tensors: Iterable[Tensor]) -> bool:
    """Reading what is below would end the process."""
    return all(tensor.untyped_storage().nbytes() for tensor in tensors)


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    assert above(one) and above(other)
    return len(one) == len(other) and all(map(torch.equal, one, other))


class Deep(nn.Module):
    """Awkward blocks: strided weights, a frozen one, tuples out, buffers, recomputation."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(Block(n) for n in (11, 3, 130))
        self.last = nn.Linear(7, 1)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x, _ = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.last(x)


class Block(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, wide), nn.Linear(wide, 7)
        self.up.weight = nn.Parameter(torch.randn(7, wide).t() / 3)
        self.down.bias.requires_grad_(False)
        self.register_buffer("scale", torch.rand(7))

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return x + self.down(torch.tanh(self.up(x))) * self.scale, 3


@pytest.mark.parametrize("recompute", ["", "until enough", "to the end"])
@pytest.mark.parametrize("prefetch", [False, True], ids=["asked", "ahead"])
def test_awkward_blocks_train_to_the_same_bits(
    recompute: str, prefetch: bool, seed: int, tmp_path: Path
) -> None:
    results = []
    for offload in (False, True):
        torch.manual_seed(seed)
        model = Deep(bool(recompute))
        inputs = [torch.randn(4, 5) for _ in range(6)]
        make = functools.partial(torch.optim.AdamW, lr=0.01)

        def used(model: Deep = model, make: Callable[..., torch.optim.Optimizer] = make) -> Offload:
            return Offload(model, model.blocks, make, Disk(tmp_path), prefetch=prefetch)

        with set_checkpoint_early_stop(recompute == "until enough"):
            results.append(trained(model, inputs, make, used if offload else None, accumulate=2))
    assert equal(*results)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_s_state_comes_back(name: str, seed: int) -> None:
    results = []
    for offload in (False, True):
        torch.manual_seed(seed)
        model = Deep(False)
        inputs = [torch.randn(4, 5) for _ in range(3)]
        used = functools.partial(Offload, model, model.blocks, OPTIMIZERS[name], Host())
        results.append(trained(model, inputs, OPTIMIZERS[name], used if offload else None))
    assert equal(*results)


@pytest.mark.parametrize("every", [None, 2, "selective"])
def test_a_llama_trains_to_the_same_bits(every: int | str | None, seed: int) -> None:
    draw = windows(list(range(96)) * 3, batch=2, length=9, seed=seed)
    curves, weights = [], []
    for offload in (False, True):
        model = Llama(GROUPED, generator=torch.Generator().manual_seed(seed))
        layers = list(model.layers)
        if every is not None:
            stretch = 1 if every == "selective" else every
            model.layers = nn.ModuleList(
                Stretch(layers[at : at + stretch], every == "selective")
                for at in range(0, len(layers), stretch)
            )
        settings = {
            "steps": 3,
            "accumulate": 2,
            "progress": False,
            "schedule": lambda s: 1 / (s + 1),
        }
        if offload:
            with Offload(model, layers, torch.optim.AdamW, Disk()) as used:
                curves.append(train(model, draw, used, **settings))  # type: ignore[arg-type]
        else:
            steps = torch.optim.AdamW(model.parameters())
            curves.append(train(model, draw, steps, **settings))
        weights.append(list(model.parameters()))
    assert curves[0] == curves[1]
    assert equal(*weights)


def test_two_blocks_are_above_and_the_prediction_is_exact(seed: int) -> None:
    model = Llama(GROUPED)
    size = sum(p.numel() for p in model.layers[0].parameters()) * 4
    rest = sum(p.numel() for p in model.parameters()) * 4 - 3 * size
    above = []

    def look(*_: object) -> None:
        above.append((offload.held.parameters - rest) // size)

    draw = windows(list(range(96)) * 3, batch=2, length=9, seed=seed)
    with Offload(model, model.layers, torch.optim.AdamW, Disk()) as offload:
        assert offload.held.parameters == rest
        for layer in model.layers:
            layer.mlp.register_forward_hook(look)
            layer.mlp.down_proj.weight.register_hook(look)
        train(model, draw, offload, steps=2, progress=False)  # type: ignore[arg-type]
        # A forward's last block has none after it; nor has a backward's.
        assert above == [2, 2, 1, 2, 2, 1] * 2
        assert offload.held.parameters == rest and offload.held.optimizer == 0
    assert offload.peak == offloaded(GROUPED)
    assert offload.held.parameters == rest + 3 * size


def test_the_next_block_comes_while_this_one_computes() -> None:
    """The second block's bytes are read before the first block's forward ends."""
    model = Deep(False)
    came = threading.Event()

    class Watched(Host):
        def read(self, key: tuple[int, int], data: Tensor) -> None:
            super().read(key, data)
            if key[0] == 1:
                came.set()

    with Offload(model, model.blocks, torch.optim.SGD, Watched()) as offload:
        seen = []
        model.blocks[0].up.register_forward_hook(lambda *_: seen.append(came.wait(60)))
        model(torch.ones(2, 5)).sum().backward()
        offload.step()
    assert seen == [True]


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_traffic_is_counted_and_nothing_comes_in_vain(recompute: bool) -> None:
    model = Llama(GROUPED)
    size = sum(p.numel() for p in model.layers[0].parameters()) * 4
    layers = list(model.layers)
    if recompute:
        model.layers = nn.ModuleList(Stretch([layer], False) for layer in layers)
    with Offload(model, layers, torch.optim.SGD, Disk()) as offload:
        start = offload.traffic
        model(torch.ones(1, 3, dtype=torch.int64)).logits.sum().backward()
        offload.step()
        read, written = offload.traffic.read - start.read, offload.traffic.written - start.written
    # A forward brings three layers, a backward the first two again, the step all.
    assert (read, written) == (8 * size, 3 * size)
    assert start.written == 3 * size and 0 <= offload.traffic.hidden <= 1


def test_without_gradients_nothing_stays_above() -> None:
    model = Llama(GROUPED)
    tokens = torch.randint(96, (2, 7))
    with torch.no_grad():
        expected = model(tokens).logits
        with Offload(model, model.layers, torch.optim.SGD, Host()) as offload:
            low = offload.held.parameters
            assert torch.equal(model(tokens).logits, expected)
            assert offload.held.parameters == low


def test_an_error_leaves_the_weights_as_they_were(seed: int) -> None:
    torch.manual_seed(seed)
    model = Deep(False)
    before = [p.detach().clone() for p in model.parameters()]

    def stop(*_: object) -> None:
        raise KeyError("the planted fault")

    model.blocks[1].down.register_forward_hook(stop)
    with (
        pytest.raises(KeyError, match="planted"),
        Offload(model, model.blocks, torch.optim.AdamW, Disk()),
    ):
        model(torch.ones(2, 5))
    assert equal(before, [p.detach() for p in model.parameters()])
    assert not model.blocks[0]._forward_pre_hooks


@pytest.mark.parametrize(("fit", "change"), [(5, 0.0), (13, 1.0)], ids=["entering", "in a step"])
def test_a_full_disk_leaves_every_weight_somewhere(fit: int, change: float, seed: int) -> None:
    """Twelve weights go down, then the step begins to write: its own weights may have changed."""
    torch.manual_seed(seed)
    model = Deep(False)
    before = [p.detach().clone() for p in model.parameters()]

    class Full(Host):
        writes = 0

        def write(self, key: tuple[int, int], data: Tensor) -> None:
            self.writes += 1
            if self.writes > fit:
                raise OSError("no space left: the planted fault")
            super().write(key, data)

    with (
        pytest.raises(OSError, match="no space left"),
        Offload(model, model.blocks, torch.optim.SGD, Full()) as offload,
    ):
        model(torch.ones(2, 5)).sum().backward()
        offload.step()
    assert above(model.parameters())
    for old, new in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(new.detach(), old, rtol=0, atol=change)


@pytest.mark.parametrize("prefetch", [False, True], ids=["asked", "ahead"])
@pytest.mark.parametrize("at", range(16))
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "for good"])
def test_a_failed_read_costs_no_more_than_its_block(
    at: int, prefetch: bool, lasting: bool, seed: int
) -> None:
    """In forward, backward or step: what is read again at the end is whole, or said to be lost."""
    torch.manual_seed(seed)
    model = Deep(False)
    before = [p.detach().clone() for p in model.parameters()]
    broken: list[tuple[int, int]] = []

    class Flawed(Host):
        reads = 0

        def read(self, key: tuple[int, int], data: Tensor) -> None:
            self.reads += 1
            if self.reads == at + 1:
                broken.append(key)
            if broken == [key] and (lasting or self.reads == at + 1):
                raise OSError("cannot be read: the planted fault")
            super().read(key, data)

    make = functools.partial(torch.optim.SGD, lr=0.0, momentum=0.9)
    with (
        pytest.raises(OSError, match="cannot be read") as caught,
        Offload(model, model.blocks, make, Flawed(), prefetch=prefetch) as offload,
    ):
        model(torch.ones(2, 5)).sum().backward()
        offload.step()
    lost = {id(p) for p in model.blocks[broken[0][0]].parameters()} if lasting else set()
    for old, new in zip(before, model.parameters(), strict=True):
        if id(new) in lost:
            assert not new.untyped_storage().nbytes()
        else:
            assert equal([old], [new.detach()])
    notes = getattr(caught.value, "__notes__", [])
    assert [f"block {broken[0][0]} could not be" in one for one in notes] == [True] * lasting


def test_an_interrupt_leaves_every_weight_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    before = [p.detach().clone() for p in model.parameters()]
    calls = itertools.count()

    class Slow(Host):
        def write(self, key: tuple[int, int], data: Tensor) -> None:
            time.sleep(0.02)
            super().write(key, data)

    def arrive() -> None:
        if next(calls) == 1:  # The first block goes down.
            offload._going.pop()
            raise KeyboardInterrupt
        Offload._arrive(offload)

    with (
        pytest.raises(KeyboardInterrupt),
        Offload(model, model, torch.optim.SGD, Slow()) as offload,
    ):
        model(torch.ones(2, 5)).sum().backward()
        monkeypatch.setattr(offload, "_arrive", arrive)
        offload.step()
    assert above(model.parameters())
    for old, new in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(new.detach(), old, rtol=0, atol=1.0)


def test_what_does_not_fit_is_refused() -> None:
    model = Deep(False)
    make = torch.optim.AdamW
    with pytest.raises(ValueError, match="must belong to one block, got one in 0 and 1"):
        Offload(model, [model.blocks[0], model.blocks[0].up], make, Host())
    for stranger in (nn.Linear(2, 2), nn.Tanh()):
        with pytest.raises(ValueError, match="a module of the model with weights of its own"):
            Offload(model, [stranger], make, Host())
    with Offload(model, model.blocks, make, Host()) as offload:
        pass
    with pytest.raises(RuntimeError, match="is used once"):
        offload.__enter__()
