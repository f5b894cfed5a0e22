"""The foreach paths equal the loop, and the flat bucket follows every change of state."""

import pytest
import torch

from labcore.optim import AdamW, Lion
from labcore.optim.chunked import CHUNK, is_dense
from tests.optim.lists import awkward, far, largest_difference, run, states, train

BOTH = pytest.mark.parametrize("cls", [Lion, AdamW])
CHOICES = [
    {},
    {"maximize": True, "weight_decay": 0.3},
    {"master_weights": True},
    {"state_dtype": torch.float32},
    {"state_dtype": torch.bfloat16},
    {"capturable": True},
]
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-6,
    torch.float16: 2**-8,
    torch.bfloat16: 2**-5,
}


@BOTH
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_chunks_are_the_loop(cls, dtype, choice, seed: int) -> None:
    def missing(step: int, index: int) -> bool:
        return (step + index) % 5 == 0

    loop, ours = awkward(dtype, seed), awkward(dtype, seed)
    settings = {"lr": 1e-2, "weight_decay": 0.1, **choice}
    one = run(
        loop, lambda p: cls(p, foreach=False, **settings), seed=seed, steps=5, missing=missing
    )
    two = run(ours, lambda p: cls(p, foreach=True, **settings), seed=seed, steps=5, missing=missing)
    # capturable keeps the loop's bias correction in float32, as torch does.
    tolerance = max(TOLERANCE[dtype], 2e-6 if "capturable" in choice else 0)
    kept = settings.get("state_dtype", dtype)
    # Two right roundings of a moment in half precision: a sign that flips, an update one ulp off.
    rounded = kept in (torch.float16, torch.bfloat16)
    few = 40 if rounded else 4 if cls is Lion else 0  # of 160,000: see `far`
    reach = 0.021 if cls is Lion else 5 * 0.01 * 4 * torch.finfo(kept).eps
    masters = [
        [state["master"] for state in o.state.values() if "master" in state] for o in (one, two)
    ]
    for left, right in ((loop, ours), masters):
        assert far(left, right, tolerance) <= few
        assert largest_difference(left, right) <= tolerance + reach
    moments = [[state[n] for state in o.state.values() for n in cls.moments] for o in (one, two)]
    assert largest_difference(*moments) <= max(tolerance, TOLERANCE[kept])


@BOTH
@pytest.mark.parametrize("choice", [{}, {"capturable": True}, {"maximize": True}], ids=str)
def test_torchs_foreach_form_is_the_loop(cls, choice, seed: int, monkeypatch) -> None:
    # What a GPU runs, here on CPU tensors: only the choice of path is turned.
    taken = []
    original = cls._foreach
    monkeypatch.setattr(
        cls,
        "_chunked",
        lambda self, _index, group, items: taken.append(original(self, group, items)),
    )
    loop, ours = awkward(torch.float64, seed), awkward(torch.float64, seed)
    for weight_decay in (0.0, 0.1):
        lr = torch.tensor(0.01, dtype=torch.float64) if "capturable" in choice else 0.01
        settings = {"lr": lr, "weight_decay": weight_decay, **choice}
        run(loop, lambda p: cls(p, foreach=False, **settings), seed=seed, steps=3)  # noqa: B023
        run(ours, lambda p: cls(p, foreach=True, **settings), seed=seed, steps=3)  # noqa: B023
    assert taken == [True] * 6
    assert largest_difference(loop, ours) < (2e-6 if "capturable" in choice else 1e-12)


@pytest.mark.parametrize("choice", [{"eps_mode": "inside", "eps": 1e-3}, {"eps_root": 1e-3}])
def test_torchs_foreach_form_has_the_epsilon_choices(choice, seed: int) -> None:
    loop, ours = awkward(torch.float64, seed), awkward(torch.float64, seed)
    run(loop, lambda p: AdamW(p, foreach=False, **choice), seed=seed, steps=1)
    optimizer = AdamW(ours, foreach=True, **choice)
    generator = torch.Generator().manual_seed(seed)
    items = []
    for param in ours:
        grad = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        items.append((param, grad, optimizer._new_state(optimizer.param_groups[0], param)))
    with torch.no_grad():
        assert optimizer._foreach(optimizer.param_groups[0], items)
    assert largest_difference(loop, ours) < 1e-12


def test_torchs_foreach_form_leaves_the_rest_to_the_loop() -> None:
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    for optimizer in (Lion([param]), AdamW([param]), AdamW([param], eps_mode="atan2")):
        group = optimizer.param_groups[0]
        item = (param, torch.ones_like(param), optimizer._new_state(group, param))
        assert not optimizer._foreach(group, [item])


def test_the_torch_form_shows_nan_in_the_weight() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = Lion([param], lr=0.1)
    group = optimizer.param_groups[0]
    grad = torch.tensor([1.0, float("nan"), float("inf")])
    with torch.no_grad():
        assert optimizer._foreach(group, [(param, grad, optimizer._new_state(group, param))])
    assert param.isnan().tolist() == [False, True, True]


@BOTH
def test_small_state_lives_in_one_buffer_and_big_state_does_not(cls, seed: int) -> None:
    params = awkward(torch.float32, seed, [(5,), (CHUNK + 1,), (3, 4)])
    optimizer = run(params, lambda p: cls(p), seed=seed, steps=1)
    storages = [optimizer.state[p]["exp_avg"].untyped_storage().data_ptr() for p in params]
    assert len({storages[0], *storages[2:]}) == 1
    assert storages[1] != storages[0]


@BOTH
def test_replaced_state_is_taken_up(cls, seed: int) -> None:
    loop, ours = awkward(torch.float64, seed), awkward(torch.float64, seed)
    slow = run(loop, lambda p: cls(p, foreach=False), seed=seed, steps=3)
    fast = run(ours, lambda p: cls(p, foreach=True), seed=seed, steps=3)
    for optimizer, params in ((slow, loop), (fast, ours)):
        optimizer.state[params[0]]["exp_avg"] = torch.full_like(params[0], 0.5)
        optimizer.state[params[2]] = {}  # a reset of one parameter
        if cls is AdamW:
            optimizer.state[params[3]]["step"].fill_(100.0)
    train(loop, slow, seed=seed + 1, steps=2)
    train(ours, fast, seed=seed + 1, steps=2)
    assert largest_difference(loop, ours) < 1e-12
    assert largest_difference(states(slow), states(fast)) < 1e-12


@BOTH
def test_a_group_added_between_steps_and_reloaded_state(cls, seed: int) -> None:
    loop, ours = awkward(torch.float64, seed), awkward(torch.float64, seed)
    ends = []
    for params, foreach in ((loop, False), (ours, True)):
        optimizer = run(params[:4], lambda p: cls(p, foreach=foreach), seed=seed, steps=2)  # noqa: B023
        optimizer.add_param_group({"params": params[4:], "lr": 3e-3})
        train(params, optimizer, seed=seed, steps=2)
        optimizer.load_state_dict(optimizer.state_dict())
        train(params, optimizer, seed=seed, steps=2)
        ends.append(optimizer)
    assert largest_difference(loop, ours) < 1e-12
    assert largest_difference(states(ends[0]), states(ends[1])) < 1e-12


@BOTH
def test_a_weight_whose_storage_is_replaced(cls, seed: int) -> None:
    loop, ours = (
        awkward(torch.float64, seed, [(300, 301)]),
        awkward(torch.float64, seed, [(300, 301)]),
    )
    slow = run(loop, lambda p: cls(p, foreach=False), seed=seed, steps=1)
    fast = run(ours, lambda p: cls(p, foreach=True), seed=seed, steps=1)
    for params in (loop, ours):
        params[0].data = params[0].data.t().clone().t()  # other strides too
        params[1].data = params[1].data.clone()
    train(loop, slow, seed=seed, steps=2)
    train(ours, fast, seed=seed, steps=2)
    assert largest_difference(loop, ours) < 1e-12


def test_is_dense_knows_a_block_of_memory() -> None:
    block = torch.zeros(4, 5, 6)
    assert (
        is_dense(block) and is_dense(block.permute(2, 0, 1)) and is_dense(block[:1].transpose(0, 2))
    )
    assert not is_dense(block[:, 1:]) and not is_dense(torch.zeros(5).expand(3, 5))
