"""The fused path of a CPU: one compiled pass, right for any list, the same as the rule."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from labcore.optim import AdamW, Lion, compiled, elementwise
from labcore.optim.chunked import SMALL
from tests.optim.lists import (
    awkward,
    far,
    largest_difference,
    needs_compiler,
    nothing_outside,
    run,
    states,
)

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
# As in test_fused: weights and moments are below 8.
ULP = {F32: 2**-20, F16: 2**-8, BF16: 2**-5}
BOTH = pytest.mark.parametrize("cls", [Lion, AdamW])
COMPILED, FUSED = "apply_compiled", "_fused_adamw_"
INSIDE = {"eps_mode": "inside", "eps": 1e-3}


@pytest.fixture(autouse=True)
def compiler() -> None:
    """See `needs_compiler`."""
    needs_compiler()


@pytest.fixture
def taken(monkeypatch) -> list[str]:
    """Which form took each step."""
    seen = []

    def note(module, name: str) -> None:
        original = getattr(module, name)

        def noted(*arguments, **keywords):
            done = original(*arguments, **keywords)
            seen.append(name if done is not False else "none")
            return done

        monkeypatch.setattr(module, name, noted)

    note(elementwise, COMPILED)
    note(torch, FUSED)
    return seen


def big(dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Awkward tensors, and more that no bucket takes: oddly addressed, transposed, sliced."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    size = SMALL + seed % 100
    return [
        *awkward(dtype, seed),
        draw(size + 3)[3:].requires_grad_(),
        torch.nn.Parameter(draw(257, 263).t()),
        draw(300, 301)[:, 1:290].requires_grad_(),
        torch.nn.Parameter(draw(2, 3, 105, 107).to(memory_format=torch.channels_last)),
    ]


@pytest.mark.parametrize(
    ("cls", "dtype", "choice", "form"),
    [
        (Lion, F32, {}, COMPILED),
        (Lion, F32, {"maximize": True, "weight_decay": 0.3}, COMPILED),
        (Lion, BF16, {"state_dtype": F32}, COMPILED),
        (Lion, F16, {"master_weights": True, "maximize": True}, COMPILED),
        (AdamW, F32, {}, FUSED),
        (AdamW, F32, {"maximize": True, "capturable": True}, FUSED),
        (AdamW, BF16, {}, FUSED),
        (AdamW, F16, {}, COMPILED),
        (AdamW, F32, INSIDE, COMPILED),
        (AdamW, BF16, {"master_weights": True, "eps_root": 1e-3}, COMPILED),
    ],
    ids=str,
)
def test_fused_is_the_loop(cls, dtype, choice, form: str, seed: int, taken) -> None:
    loop, ours = big(dtype, seed), big(dtype, seed)
    settings = {"lr": 1e-2, "weight_decay": 0.1, **choice}

    def missing(step: int, index: int) -> bool:
        return step == 1 and index in (1, 3)

    loops = {**settings, "foreach": False, "capturable": False}
    one = run(loop, lambda p: cls(p, **loops), seed=seed, steps=4, missing=missing)
    assert not taken
    two = run(ours, lambda p: cls(p, fused=True, **settings), seed=seed, steps=4, missing=missing)
    assert set(taken) == {form}
    state = ULP[settings.get("state_dtype", dtype)]
    assert far(loop, ours, ULP[dtype] + 1e-2 * state) <= (4 if cls is Lion else 0)
    assert largest_difference(states(one), states(two)) <= max(ULP[dtype], state)


@BOTH
def test_nothing_is_written_outside_the_tensors(cls, seed: int) -> None:
    nothing_outside(
        lambda params: cls(params, fused=True), (1, 31, 1000, SMALL, SMALL + 5, SMALL + 31), seed
    )


@pytest.mark.parametrize("shapes", [[()], [(1,), (0,)], [(0,)], [(SMALL,), ()]], ids=str)
def test_lists_of_almost_nothing(shapes, seed: int) -> None:
    ends = []
    for choice in ({"foreach": False}, {"fused": True}):
        generator = torch.Generator().manual_seed(seed)
        params = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
        run(params, lambda p: Lion(p, lr=0.1, **choice), seed=seed, steps=2)  # noqa: B023
        ends.append(params)
    assert far(*ends, ULP[F32]) == 0


@pytest.mark.parametrize(("cls", "choice"), [(Lion, {}), (AdamW, {}), (AdamW, INSIDE)], ids=str)
def test_any_number_of_threads_gives_the_same_bits(cls, choice, seed: int) -> None:
    ends, threads = [], torch.get_num_threads()
    try:
        for count in (1, 3, 2, 1):
            torch.set_num_threads(count)
            generator = torch.Generator().manual_seed(seed)
            params = [torch.nn.Parameter(torch.randn(300_007, generator=generator))]
            optimizer = run(params, lambda p: cls(p, fused=True, **choice), seed=seed, steps=3)
            ends.append([*params, *states(optimizer)])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for end in ends[1:] for a, b in zip(ends[0], end, strict=True))


@BOTH
def test_autograd_hears_of_the_change(cls) -> None:
    param = torch.nn.Parameter(torch.ones(SMALL))
    loss = (param**2).sum()  # keeps the weight for its backward
    optimizer = cls([param], fused=True)
    param.grad = torch.ones(SMALL)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_whole_group_and_a_part_of_one(seed: int, monkeypatch) -> None:
    monkeypatch.undo()  # what the library compiles, not what `conftest` does
    ends = []
    for choice in ({"foreach": False}, {"fused": True}):
        params = awkward(F32, seed, [(SMALL + k,) for k in range(compiled.GROUP + 2)])
        run(params, lambda p: Lion(p, lr=1e-2, **choice), seed=seed, steps=2)  # noqa: B023
        ends.append(params)
    assert far(*ends, ULP[F32]) <= 4


def test_stochastic_rounding_stays_with_the_pieces(seed: int, taken) -> None:
    for cls in (Lion, AdamW):
        ends = []
        for fused in (None, True):
            params = awkward(BF16, seed)
            generator = torch.Generator().manual_seed(seed)
            settings = {"stochastic_rounding": True, "generator": generator, "fused": fused}
            run(params, lambda p: cls(p, **settings), seed=seed, steps=2)  # noqa: B023
            ends.append(params)
        assert largest_difference(*ends) == 0
    assert not taken


@BOTH
def test_it_needs_no_foreach_and_counts_steps_exactly(cls, seed: int, taken) -> None:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        param = torch.nn.Parameter(torch.ones(SMALL, dtype=F32))
        optimizer = cls([param], lr=1e-3, fused=True, foreach=False)
        for _ in range(300):
            param.grad = torch.ones_like(param)
            optimizer.step()
    finally:
        torch.set_default_dtype(default)
    assert set(taken) == {COMPILED if cls is Lion else FUSED}
    if cls is AdamW:
        assert optimizer.state[param]["step"] == 300  # bfloat16 would stop at 256


def test_a_subclass_of_tensor_is_not_read_as_plain_memory(seed: int, taken) -> None:
    class Own(Tensor):
        pass

    ends = []
    for fused in (None, True):
        generator = torch.Generator().manual_seed(seed)
        param = torch.nn.Parameter(torch.randn(SMALL, generator=generator))
        param.grad = torch.randn(SMALL, generator=generator).as_subclass(Own)
        Lion([param], fused=fused).step()
        ends.append([param])
    assert far(*ends, ULP[F32]) == 0 and taken == ["none"]


@pytest.mark.parametrize("lack", [{"CXX": "no-such-compiler"}, {"TORCHDYNAMO_DISABLE": "1"}])
def test_without_a_compiler_it_says_so_and_runs_all_the_same(lack, tmp_path, monkeypatch) -> None:
    for name, value in lack.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    program = (
        "import sys, torch\nfrom labcore.optim import Lion\n"
        "assert 'torch._inductor.codecache' not in sys.modules\n"  # importing compiles nothing
        "for fused in (None, True):\n"
        "    p = torch.nn.Parameter(torch.arange(5.0)); p.grad = torch.ones(5)\n"
        "    optimizer = Lion([p], lr=0.5, fused=fused)\n"
        "    optimizer.step(); optimizer.step(); print(p.tolist())\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[-1.0, 0.0, 1.0, 2.0, 3.0]\n" * 2
    assert done.stderr.count("fused=True on a CPU needs a C++ compiler") == 1
