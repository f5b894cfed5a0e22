"""The launch sequence says what runs, and finds what waits; ranks that differ are named."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from labcore.parallel import recording
from labcore.parallel.recording import Divergence, Launch, first_difference, launch_sequence

WAITS: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "item": (lambda x: x[0].item(), "_local_scalar_dense"),
    "if": (lambda x: x if x.sum() > 0 else -x, "_local_scalar_dense"),
    "int": (lambda x: torch.zeros(int(x[0])), "_local_scalar_dense"),
    "tolist": (lambda x: x.tolist(), "Tensor.tolist"),
    "numpy": (lambda x: x.numpy(), "Tensor.numpy"),
    "cpu": (lambda x: x.cpu(), "Tensor.cpu"),
    "nonzero": (lambda x: x.nonzero(), "aten::nonzero"),
    "boolean index": (lambda x: x[x > 0], "aten::index"),
    "put by a boolean index": (lambda x: x.index_put((x > 0,), x[:3]), "index_put"),
    "masked_select": (lambda x: x.masked_select(x > 0), "masked_select"),
    "unique": (lambda x: x.unique(), "unique"),
    "equal": (lambda x: torch.equal(x, x + 1), "aten::equal"),
}
MODES = {
    "gradients": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WAITS)
def test_what_waits_for_the_device_is_found(name: str, mode: str) -> None:
    read, op = WAITS[name]
    x = torch.tensor([3.0, 1.0, 2.0])
    with MODES[mode]():
        expected = rf"must not wait .*({op}).*test_recording.py, line \d+"
        with pytest.raises(RuntimeError, match=expected):
            launch_sequence(lambda: read(x))
        launch_sequence(lambda: read(x), strict=False)


def masked_fill(x: Tensor) -> Tensor:
    x = x.clone()
    x[x > 1] = 0.0  # torch makes a masked_fill of it
    return x


@pytest.mark.parametrize("mode", MODES)
def test_what_does_not_wait_may_stay(mode: str) -> None:
    x = torch.tensor([3.0, 1.0, 2.0])
    with MODES[mode]():
        for step in (
            masked_fill,
            lambda x: x[torch.tensor([2, 0, 0])],
            lambda x: x.index_put((torch.tensor([2, 0]),), x[:2]),
            lambda x: torch.where(x > 1, x, -x),
            lambda x: F.embedding(torch.tensor([1, 2]), x[:, None]),
        ):
            expected = step(x)
            assert torch.equal(launch_sequence(lambda step=step: step(x))[0], expected)


@pytest.mark.parametrize("mode", MODES)
def test_the_sequence_is_that_of_the_kernels(mode: str) -> None:
    x, w = torch.randn(3, 5), torch.randn(7, 5)
    with MODES[mode]():
        y, launches = launch_sequence(lambda: F.relu(F.linear(x, w)).view(-1)[4:].reshape(17))
    assert torch.equal(y, F.relu(x @ w.T).flatten()[4:])
    assert [str(one) for one in launches] == [
        "aten.mm(float32[3, 5], float32[5, 7])",
        "aten.relu(float32[3, 7])",
    ]
    assert not any(one.collective for one in launches)


def test_a_launch_says_dtype_and_shape() -> None:
    launch = Launch(op="c10d.allreduce_", shapes=((2, 1), ()), dtypes=(torch.bfloat16, torch.int64))
    assert launch.collective
    assert str(launch) == "c10d.allreduce_(bfloat16[2, 1], int64[])"


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_the_rank_that_differs_is_named(ranks: int, seed: int) -> None:
    dice = random.Random(seed)
    common = [f"op{dice.randrange(5)}" for _ in range(dice.randint(1, 20))]
    assert first_difference([common] * ranks) is None
    sequences = [list(common) for _ in range(ranks)]
    odd, place = dice.randrange(1, ranks), dice.randrange(len(common))
    sequences[odd][place] = "other"
    told = Divergence(rank=odd, place=place, op="other", expected=common[place])
    assert first_difference(sequences) == told
    sequences[odd] = common[:place]
    assert first_difference(sequences) == Divergence(
        rank=odd, place=place, op="nothing", expected=common[place]
    )
    sequences[odd] = [*common, "more"]
    assert first_difference(sequences) == Divergence(
        rank=odd, place=len(common), op="more", expected="nothing"
    )


def test_most_ranks_are_believed_and_the_lower_of_two() -> None:
    most = first_difference(["ab", "aa", "aa"])
    assert most == Divergence(rank=0, place=1, op="b", expected="a")
    assert first_difference(["ab", "aa"]) == Divergence(rank=1, place=1, op="a", expected="b")


HOST, PINNED, GPU = (
    SimpleNamespace(
        device=torch.device(where), is_cuda=where == "cuda:1", dtype=torch.int64,
        is_pinned=lambda pinned=pinned: pinned,
    )
    for where, pinned in (("cpu", False), ("cpu", True), ("cuda:1", False))
)  # fmt: skip
TO_HOST, TO_GPU = recording._ON_THE_DEVICE, recording._MADE_BEFORE


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "remedy"),
    [
        ("aten._to_copy", (GPU,), {"device": "cpu"}, TO_HOST),
        ("aten._to_copy", (GPU,), {"device": torch.device("cpu"), "non_blocking": True}, TO_HOST),
        ("aten._to_copy", (HOST,), {"device": "cuda"}, TO_GPU),
        ("aten._to_copy", (GPU,), {"device": "cuda:0"}, ""),
        ("aten._to_copy", (GPU,), {"dtype": torch.float64}, ""),
        ("aten._to_copy", (HOST,), {"device": "cpu"}, ""),
        ("aten.copy_", (HOST, GPU), {}, TO_HOST),
        ("aten.copy_", (GPU, HOST), {}, TO_GPU),
        ("aten.copy_", (GPU, HOST, True), {}, TO_GPU),
        ("aten.copy_", (GPU, PINNED, False), {}, TO_GPU),
        ("aten.copy_", (GPU, PINNED, True), {}, ""),
        ("aten.copy_", (PINNED, GPU), {"non_blocking": True}, ""),
        ("aten.copy_", (GPU, GPU), {}, ""),
        ("aten.index", (GPU, [None, HOST]), {}, TO_GPU),
        ("aten.index", (GPU, [GPU]), {}, ""),
        ("aten.index", (HOST, [HOST]), {}, ""),
    ],
)
def test_copies_between_host_and_gpu_are_found(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], remedy: str
) -> None:
    func = SimpleNamespace(tags=())
    assert recording._waits(func, name, args, kwargs) == remedy


def test_numbers_of_the_host_on_a_gpu_are_found() -> None:
    x = torch.ones(3)
    for step in (
        lambda: torch.tensor([1, 2], device="cuda:1"),
        lambda: torch.as_tensor(data=2.0, device=torch.device("cuda")),
        lambda: x.new_tensor([1.0], device="cuda"),
    ):
        expected = r"must not wait.*tensor in <lambda> \(test_recording.py, line .*before"
        with torch.inference_mode(), pytest.raises(RuntimeError, match=expected):
            launch_sequence(step)
    assert launch_sequence(lambda: x.new_tensor([2.0]) * torch.tensor(3.0))[0] == 6
