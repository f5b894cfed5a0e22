"""The meter against the allocator's own record, and each of its parts against a count by hand."""

import functools
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.two_tensor import TwoTensor

from labcore.memory import Disk, Meter, Offload, estimate, offloaded
from labcore.models import Llama, next_token_loss
from tests.memory.steps import config, measured, model, train_step


def allocated_peak(profiler: profile) -> int:
    """The most that the CPU's allocator had given out at a time, above what it had before."""
    held = highest = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            highest = max(highest, held)
    return highest


@pytest.mark.parametrize("length", [41, 300])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_peak_is_the_allocators(dtype: str, length: int) -> None:
    llama = model(config("grouped"), dtype)
    optimizer = torch.optim.AdamW(llama.parameters())
    tokens = torch.randint(96, (2, length + 1))
    train_step(llama, optimizer, tokens)
    optimizer.zero_grad()
    before = sum(p.nbytes for p in llama.parameters()) + tokens.nbytes
    before += sum(t.nbytes for state in optimizer.state.values() for t in state.values())
    with (
        Meter(llama, optimizer) as meter,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        train_step(llama, optimizer, tokens)
    assert meter.peak.total == pytest.approx(before + allocated_peak(profiler), rel=0.02)


def test_each_part_is_what_a_count_by_hand_finds() -> None:
    llama = model(config("tied"), "float32")
    optimizer = torch.optim.AdamW(llama.parameters())
    tokens = torch.randint(8, (3, 18))
    own = {p.untyped_storage().data_ptr() for p in llama.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss, _ = next_token_loss(llama, tokens)
    by_hand = sum(saved.values())
    del loss
    with Meter(llama, optimizer) as meter:
        for _ in range(2):
            train_step(llama, optimizer, tokens)
    elements = sum(p.numel() for p in llama.parameters())
    count = len(list(llama.parameters()))
    assert meter.most.parameters == 4 * elements
    assert meter.most.gradients == 4 * elements
    assert meter.most.optimizer == 8 * elements + 4 * count
    kept = max(m.held.activations for m in meter.timeline if m.phase == "forward")
    assert abs(kept - by_hand) <= 64  # the loss itself waits too


def test_moments_and_modules_add_up() -> None:
    meter = measured(config("grouped"), batch=2, length=30)
    assert meter.peak.total == max(m.held.total for m in meter.timeline)
    assert max(p.total for p in meter.phases.values()) == meter.peak.total
    assert set(meter.phases) == {"between", "forward", "backward", "step"}
    for name, bytes_held in meter.peak.parts().items():
        assert sum(part.parts()[name] for part in meter.by_module.values()) == bytes_held
    for moment in meter.timeline:
        assert min(moment.held.parts().values()) >= 0
    last = meter.timeline[-1].held
    assert (last.parameters, last.gradients) == (meter.most.parameters, meter.most.gradients)
    assert "layers.1.mlp.gate_proj" in meter.by_module


def test_what_is_recomputed_counts_as_activations() -> None:
    def kept(every: int | None) -> dict[str, int]:
        meter = measured(config("tied"), batch=2, length=60, checkpointing=every)
        phases = ("forward", "backward")
        return {
            phase: max(m.held.activations for m in meter.timeline if m.phase == phase)
            for phase in phases
        }

    plain, again = kept(None), kept(1)
    # Four layers: their inputs stand at the end of the forward, and one layer again in a backward.
    assert again["forward"] < 0.35 * plain["forward"]
    assert again["backward"] - again["forward"] > 0.7 * plain["forward"] / 4


def test_a_view_counts_once_and_what_is_freed_is_gone() -> None:
    class Views(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            big = x.repeat(1000)
            return big.view(10, -1)[3:5].sum()

    layer = Views()
    x = torch.ones(25)
    with Meter(layer) as meter:
        layer(x)
    highest = max(moment.held.total for moment in meter.timeline)
    assert 100_000 <= highest <= 100_000 + 200
    assert meter.timeline[-1].held.total <= 200


def test_a_storage_that_is_resized_is_followed() -> None:
    """As FSDP does with gathered weights: emptied after the forward, filled for the backward."""
    shard = nn.Parameter(torch.ones(10))
    layer = nn.ParameterList([shard])
    with Meter(layer) as meter:
        for _ in range(2):
            whole = shard.detach().repeat(101)
            x = torch.ones(1000, requires_grad=True)
            loss = (x * whole[:1000]).sum()
            whole.untyped_storage().resize_(0)
            whole.untyped_storage().resize_(4040)
            loss.backward()
            del whole, x, loss
    # It comes and goes beside the weights: no activation, though autograd kept it.
    held = [moment.held.workspace for moment in meter.timeline]
    changes = [now - before for before, now in pairwise(held)]
    assert [change for change in changes if abs(change) == 4040] == [4040, -4040] * 4
    assert meter.timeline[-1].held.total == meter.most.parameters == 40


def test_resizing_is_followed_and_the_method_is_restored() -> None:
    plain = torch.UntypedStorage.resize_
    with Meter(nn.Linear(2, 2)) as meter:
        x = torch.zeros(100)
        x.resize_(301)
        x.untyped_storage().resize_(8)
    assert torch.UntypedStorage.resize_ is plain
    assert [m.held.workspace for m in meter.timeline] == [0, 0, 400, 1204, 8]


@pytest.mark.parametrize("ahead", [False, True])
def test_weights_and_state_that_wait_on_a_disk_are_not_counted(ahead: bool, tmp_path) -> None:
    shape = config("grouped")
    llama = model(shape, "float32")
    tokens = torch.randint(96, (2, 31))
    offload = Offload(llama, llama.layers, torch.optim.AdamW, Disk(tmp_path), prefetch=ahead)
    with offload, Meter(llama, *offload.optimizers) as meter:
        for _ in range(2):
            train_step(llama, offload, tokens)
    totals = [m.held.parameters + m.held.gradients + m.held.optimizer for m in meter.timeline]
    assert max(totals) == offload.peak.total
    assert meter.most.optimizer <= offload.peak.optimizer
    told = functools.partial(estimate, shape, batch=2, length=30)
    step, kept = told(moment="step"), told(moment="backward")
    assert meter.most.gradients == step.gradients and meter.most.activations >= kept.activations
    if ahead:
        assert offload.peak.total == offloaded(shape).total
        assert meter.phases["step"].total == pytest.approx(
            offload.peak.total + step.workspace, rel=0.05
        )
    assert meter.peak.total < 0.8 * measured(shape, batch=2, length=30).peak.total


def test_a_step_that_makes_nothing_is_a_phase() -> None:
    meter = measured(config("tied"), batch=1, length=5, optimizer="sgd")
    assert meter.phases["step"].gradients == meter.phases["step"].parameters
    assert meter.most.optimizer == 0


def test_accumulated_gradients_stand_in_the_next_forward() -> None:
    llama = model(config("tied"), "float32")
    tokens = torch.randint(8, (1, 9))
    with Meter(llama) as meter:
        for _ in range(2):
            loss, _ = next_token_loss(llama, tokens)
            loss.backward()
    assert meter.phases["forward"].gradients == meter.most.parameters


def test_a_tensor_that_wraps_others_is_counted_by_them() -> None:
    layer = nn.Linear(3, 5, bias=False)
    inner = torch.zeros(5, 3), torch.zeros(5, 3)
    layer.weight = nn.Parameter(TwoTensor(*inner))
    with Meter(layer) as meter:
        layer(torch.ones(2, 3))
    assert meter.most.parameters == 2 * 60


def test_measuring_changes_nothing(seed: int) -> None:
    def gradients(watched: bool) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        llama = Llama(config("grouped"))
        tokens = torch.randint(96, (2, 12))
        if watched:
            with Meter(llama) as meter:
                next_token_loss(llama, tokens)[0].backward()
            assert meter.peak.total
        else:
            next_token_loss(llama, tokens)[0].backward()
        for module in llama.modules():
            assert not module._forward_hooks and not module._forward_pre_hooks
        return [p.grad for p in llama.parameters()]

    for seen, unseen in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(seen, unseen, rtol=0, atol=0)


def test_an_error_inside_leaves_no_hook() -> None:
    llama = model(config("tied"), "float32")
    optimizer = torch.optim.SGD(llama.parameters())
    with pytest.raises(IndexError), Meter(llama, optimizer):
        llama(torch.full((1, 2), 10**6))
    assert not llama._forward_hooks and not llama._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    train_step(llama, optimizer, torch.randint(8, (1, 4)))


def test_a_meter_is_used_once_and_needs_something_to_see() -> None:
    meter = Meter(nn.Identity())
    with meter:
        pass
    for name in ("peak", "most", "phases", "by_module"):
        with pytest.raises(RuntimeError, match="saw no storage"):
            getattr(meter, name)
    used = Meter(nn.Linear(2, 2))
    with used:
        pass
    with pytest.raises(RuntimeError, match="make a new one"), used:
        pass


def test_results_that_are_read_too_early_do_not_stay() -> None:
    layer = nn.Linear(2, 2, bias=False)
    with Meter(layer) as meter:
        assert meter.peak.total == 16
        x = torch.zeros(100)
    assert meter.peak.total == 16 + x.nbytes


def test_a_gpu_is_asked_for_its_own_record(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    device = torch.device("cuda", 0)
    monkeypatch.setattr(Meter, "_gpus", lambda self: {device})
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda d: asked.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda d: 1_000_024)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda d: 1_500_024)
    layer = nn.Linear(2, 2)
    with Meter(layer) as meter:
        pass
    # 24 bytes of the million were the layer's.
    assert meter.allocator_peak == 500_024 and asked == ["reset"]
    with Meter(nn.Linear(2, 2)) as on_cpu:
        pass
    assert on_cpu.allocator_peak == 500_024
    monkeypatch.undo()
    with Meter(nn.Linear(2, 2)) as on_cpu:
        pass
    assert on_cpu.allocator_peak is None
