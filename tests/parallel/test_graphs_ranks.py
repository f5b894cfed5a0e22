"""Ranks decode together, and all of them hear which one does something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from labcore import processes
from labcore.models import Llama
from labcore.parallel import graphs, recording
from labcore.parallel.graphs import GraphedDecoder
from labcore.parallel.llama import parallelize
from tests.parallel.small import CONFIG, SIZES, made, plain, prefilled
from tests.parallel.test_graphs_captured import FakeGpu, OnFakeGpu


def error_of(fn: Callable[[], object]) -> str:
    try:
        fn()
    except RuntimeError as problem:
        return str(problem)
    return ""


def skip_a_sum(model: Llama) -> None:
    """The output projection without its all-reduce."""
    layer = model.layers[1].self_attn.o_proj
    layer.forward = lambda x: F.linear(x, layer.weight).clone()


def broken_in_a_capture(seed: int, ours: bool) -> tuple[str, bool]:
    """One rank's capture breaks, and all hear of it; then all capture."""
    model = parallelize(made(seed))
    tokens = torch.tensor([5, 2])
    with pytest.MonkeyPatch.context() as monkeypatch:
        gpu = FakeGpu().install(monkeypatch)
        decoder = OnFakeGpu(model, prefilled(model, seed), batches=(2,))
        # Behind the last collective: a real capture would run none of them.
        hook = model.register_forward_hook(gpu.breaks if ours else lambda *_: None)
        told = error_of(decoder.capture)
        hook.remove()
        gpu.broken = False
        again = decoder(tokens)
        decoder.close()
    return told, torch.allclose(again, plain(model, prefilled(model, seed, 2), tokens), atol=1e-5)


def divided(seed: int, odd: int) -> dict[str, Any]:
    """Everything that needs ranks, in one group. odd: the rank that does what others do not."""
    rank = dist.get_rank()
    model = parallelize(made(seed))
    tokens = torch.tensor([5, 2, 9])
    found: dict[str, Any] = {}
    with GraphedDecoder(model, prefilled(model, seed), batches=SIZES) as decoder:
        found["logits"] = torch.stack([decoder(tokens), decoder(tokens)])
        found["launches"] = decoder.launches(3)
        found["collectives"] = [one.op for one in decoder.recorded(3) if one.collective]
    ours = rank == odd
    hook = model.norm.register_forward_hook(lambda _, __, out: out + 0 if ours else out)
    decoder = GraphedDecoder(model, prefilled(model, seed), batches=(2,))
    found["another op"] = error_of(decoder.capture)
    hook.remove()
    hook = model.norm.register_forward_hook(lambda _, __, out: out * out[0, 0, 0].item()
                                            if ours else out)  # fmt: skip
    found["waits"] = error_of(decoder.capture)
    hook.remove()
    found["again"] = torch.stack([decoder(tokens[:2]), decoder(tokens[:2])])
    if ours:
        skip_a_sum(model)
    found["no sum"] = error_of(decoder.capture)
    decoder.close()
    found["broken"] = broken_in_a_capture(seed, ours)
    found["shared"] = error_of(lambda: graphs.refuse_shared_gpus(f"GPU-{rank // 2}"))
    found["own"] = error_of(lambda: graphs.refuse_shared_gpus(f"GPU-{rank}"))
    refuse = recording.refuse_what_nccl_cannot
    found["gloo"] = error_of(lambda: refuse(torch.device("cuda"), None))
    return found


@pytest.mark.parametrize(("ranks", "odd"), [(2, 1), (4, 0)])
def test_ranks_together(ranks: int, odd: int, seed: int) -> None:
    came = processes.run(divided, ranks, seed, odd)
    model, tokens = made(seed), torch.tensor([5, 2, 9])
    cache = prefilled(model, seed, 3)
    expected = torch.stack([plain(model, cache, tokens), plain(model, cache, tokens)])
    for rank, found in enumerate(came):
        torch.testing.assert_close(found["logits"], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found["again"], expected[:, :2], rtol=1e-5, atol=1e-5)
        assert found["launches"] == came[0]["launches"]
        sums = ["c10d.allreduce_"] * (2 * CONFIG.num_hidden_layers + 1)
        assert found["collectives"] == [*sums, "c10d.allgather_"]
        assert f"rank {odd} launches aten.add(float32[2, 1, 20]) as number" in found["another op"]
        assert f"rank {odd} launches aten.add(" in found["no sum"]
        assert "the others launch c10d.allreduce_(float32[2, 1, 20])" in found["no sum"]
        if rank == odd:
            assert "must not wait for the device" in found["waits"]
        else:
            assert f"rank {odd} could not: SyncError: " in found["waits"]
        told, again = found["broken"]
        assert "not permitted in breaks (test_graphs_captured.py" in told
        assert (f"rank {odd} could not: RuntimeError: a step of 2 rows" in told) == (rank != odd)
        assert again
        assert "got ranks 0 and 1 on GPU-0" in found["shared"]
        assert not found["own"]
        assert "only NCCL's collectives, got a group with backend" in found["gloo"]
