"""The fused path of a GPU: one launch, right for any strides, the same as the rule."""

import math
import subprocess
import sys

import pytest
import torch

from labcore import device
from labcore.optim import AdamW, Lion, fused
from tests.optim.lists import (
    awkward,
    far,
    largest_difference,
    nothing_outside,
    run,
    states,
    use_triton,
)

SHAPES = ((3, 5), (20_001,), (), (1,), (0,), (17, 3, 5))
BOTH = pytest.mark.parametrize("cls", [Lion, AdamW])
CHOICES = [
    {},
    {"maximize": True, "weight_decay": 0.3},
    {"master_weights": True},
    {"state_dtype": torch.float32},
    {"state_dtype": torch.bfloat16},
    {"state_dtype": torch.float16},
    {"capturable": True},
]
# Weights and moments are below 8: one unit in the last place of 4 to 8, in float32 two of them.
ULP = {torch.float32: 2**-20, torch.float16: 2**-8, torch.bfloat16: 2**-5}
# With capturable a float32 step rounds the decay, the decayed weight and the update: two units each
# of four steps.
CAPTURED = 2**-18


@pytest.fixture(autouse=True)
def kernels(monkeypatch) -> None:
    """See `use_triton`; nothing is left to what a CPU runs, which reads the learning rate."""
    use_triton(monkeypatch)
    for cls in (AdamW, Lion):
        monkeypatch.delattr(cls, "cpu_update")


def launches(monkeypatch: pytest.MonkeyPatch) -> list[fused.Launch]:
    seen: list[fused.Launch] = []
    original = fused._run

    def counted(kernel, launch, *arguments, **keywords) -> None:
        seen.append(launch)
        original(kernel, launch, *arguments, **keywords)

    monkeypatch.setattr(fused, "_run", counted)
    return seen


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_fused_is_the_loop(cls, dtype, choice, seed: int, monkeypatch) -> None:
    seen = launches(monkeypatch)
    loop, ours = awkward(dtype, seed, SHAPES), awkward(dtype, seed, SHAPES)
    settings = {"lr": 1e-2, "weight_decay": 0.1, **choice}

    def missing(step: int, index: int) -> bool:
        return step == 1 and index == 3

    one = run(
        loop, lambda p: cls(p, foreach=False, **settings), seed=seed, steps=4, missing=missing
    )
    assert not seen
    two = run(ours, lambda p: cls(p, fused=True, **settings), seed=seed, steps=4, missing=missing)
    assert len(seen) >= 4  # the kernels did the work
    # A moment that rounds to its other neighbor moves the weight by lr times the moment's step.
    state = ULP[settings.get("state_dtype", dtype)]
    apart = ULP[dtype] + 1e-2 * state
    if choice.get("capturable") and dtype == torch.float32:
        apart = CAPTURED
    assert far(loop, ours, apart) <= (4 if cls is Lion else 0)
    assert largest_difference(states(one), states(two)) <= max(ULP[dtype], state)


@BOTH
def test_a_list_of_one_dtype_takes_one_launch(cls, monkeypatch) -> None:
    seen = launches(monkeypatch)
    params = [torch.nn.Parameter(torch.ones(n)) for n in (4, 20_000, 7, 1)]
    run(params, lambda p: cls(p, fused=True), seed=0, steps=1)
    assert [len(launch.operands) for launch in seen] == [4]
    assert seen[0].aligned
    odd = torch.ones(9)[1:].requires_grad_()
    run([*params, odd], lambda p: cls(p, fused=True), seed=0, steps=1)
    assert sorted(launch.aligned for launch in seen[1:]) == [False, True]


@BOTH
def test_nothing_is_written_outside_the_tensors(cls, seed: int) -> None:
    nothing_outside(lambda params: cls(params, fused=True), (1, 31, 1000, 16_385), seed)


def test_tables_follow_gradients_that_move(seed: int) -> None:
    ours, loop = awkward(torch.float32, seed), awkward(torch.float32, seed)
    fast, slow = Lion(ours, lr=0.1, fused=True), Lion(loop, lr=0.1, foreach=False)
    generator = torch.Generator().manual_seed(seed)
    keep = []
    for _ in range(3):
        for a, b in zip(ours, loop, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
            keep.append(a.grad)  # the next gradients get other addresses
        fast.step()
        slow.step()
    assert largest_difference(ours, loop) < 1e-6


def one_launch(*operands: dict[str, torch.Tensor]) -> fused.Launch:
    return fused.Launch(key=0, operands=list(operands), steps=[], returns=[], aligned=True)


def test_tables_stay_where_they_are_when_gradients_move() -> None:
    tables, param = fused.Tables(), torch.zeros(5000)
    grads = [torch.zeros(5000), torch.zeros(5000)]
    table, blocks = tables.get(one_launch({"param": param, "grad": grads[0]}), 1024)
    assert table.tolist() == [[param.data_ptr()], [grads[0].data_ptr()], [0], [0], [0], [5000]]
    assert blocks.tolist() == [[0, block] for block in range(5)]
    again, same = tables.get(one_launch({"param": param, "grad": grads[1]}), 1024)
    assert again.data_ptr() == table.data_ptr() and same.data_ptr() == blocks.data_ptr()
    assert table[1].item() == grads[1].data_ptr()
    more = [{"param": param}, {"param": param[:7]}]
    assert tables.get(one_launch(*more), 1024)[1].tolist() == [*blocks.tolist(), [1, 0]]


def test_seven_billion_weights_take_a_small_table() -> None:
    from labcore.optim.kernels import BLOCK

    width, hidden, layers = 4096, 11008, 32
    shapes = [(32_000, width)] * 2
    shapes += [(width, width)] * 4 * layers + [(hidden, width)] * 3 * layers + [(width,)] * 65
    operands = [{"param": torch.empty(shape, device="meta")} for shape in shapes]
    numel = sum(o["param"].numel() for o in operands)
    assert 6.7e9 < numel < 6.8e9
    _, blocks = fused.Tables().get(one_launch(*operands), BLOCK)
    assert blocks.numel() * blocks.element_size() < 7e6
    assert len(blocks) == sum(-(-o["param"].numel() // BLOCK) for o in operands)


@BOTH
def test_autograd_hears_of_the_change(cls) -> None:
    param = torch.nn.Parameter(torch.ones(5))
    loss = (param**2).sum()  # keeps the weight for its backward
    optimizer = cls([param], fused=True)
    param.grad = torch.ones(5)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@BOTH
def test_fused_stochastic_rounding_is_unbiased(cls, seed: int) -> None:
    n = 40_000
    weight = torch.nn.Parameter(torch.ones(n, dtype=torch.bfloat16))
    generator = torch.Generator().manual_seed(seed)
    settings = {"lr": 1e-3, "weight_decay": 0.0, "fused": True, "generator": generator}
    optimizer = cls([weight], stochastic_rounding=True, **settings)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    # 1 − 0.001 lies 0.256 of the way from 1 to its neighbor 1 − 2^-8: a binomial count, and six
    # standard deviations are exceeded with probability 2e-9.
    share = 1e-3 * 2**8
    down = int((weight == 1 - 2**-8).sum())
    assert down + int((weight == 1).sum()) == n
    assert abs(down - n * share) < 6 * math.sqrt(n * share * (1 - share))
    again = torch.nn.Parameter(torch.ones(n, dtype=torch.bfloat16))
    settings["generator"] = torch.Generator().manual_seed(seed)
    other = cls([again], stochastic_rounding=True, **settings)
    again.grad = torch.ones_like(again)
    other.step()
    assert torch.equal(weight, again)  # the generator decides


def test_what_no_kernel_can_update_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(device, "interpreting", lambda: False)
    with pytest.raises(ValueError, match="fused=True cannot run; use fused=False: Lion: "):
        Lion([torch.nn.Parameter(torch.ones(2))], fused=True)


def test_without_triton_every_step_works_on_a_cpu() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\nfrom labcore.optim import AdamW, Lion\n"
        "p = torch.nn.Parameter(torch.ones(2)); p.grad = torch.ones(2)\n"
        "Lion([p], lr=0.5).step(); print(p.tolist())\n"
        "AdamW([p], lr=0.5, weight_decay=0, fused=True).step()\n"
        "print([round(x, 6) for x in p.tolist()])\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[0.5, 0.5]\n[0.0, 0.0]\n"
