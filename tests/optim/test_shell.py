"""What the optimizers share: groups, flags, refusals, policies and the round trip of state."""

import copy
import inspect
import io
import pickle

import pytest
import torch

from labcore.optim import SM3, Adafactor, AdamW, AdamW8bit, Lion
from tests.optim.lists import COMPILED, TRITON, awkward, far, largest_difference, run, states, train

BOTH = pytest.mark.parametrize("cls", [Lion, AdamW])
PATHS = pytest.mark.parametrize("path", [{"foreach": False}, {"foreach": True}, COMPILED, TRITON])
EVERY = (Lion, AdamW, Adafactor, SM3, AdamW8bit)
ALL = pytest.mark.parametrize("cls", EVERY)
ALL_PATHS = pytest.mark.parametrize(
    ("cls", "path"),
    [
        *((cls, {"foreach": choice}) for cls in EVERY[:4] for choice in (False, True)),
        *((cls, path) for cls in EVERY[:2] for path in (COMPILED, TRITON)),
        (AdamW8bit, {}),
    ],
    ids=str,
)

BAD_SETTINGS = [
    ({"lr": -0.1}, "lr must be .*at least 0, got -0.1; pass lr=0"),
    ({"lr": float("nan")}, "lr must be"),
    ({"betas": (0.9, 1.0)}, r"betas\[1\] must be .*below 1, got 1.0"),
    ({"betas": (0.9,)}, "betas must be two numbers"),
    ({"weight_decay": -1.0}, "weight_decay must be"),
    ({"nonfinite": "skipp"}, "nonfinite must be one of .*did you mean 'skip'"),  # codespell:ignore
    ({"state_dtype": torch.int8}, "state_dtype must be one of"),
    ({"foreach": True, "fused": True}, "foreach and fused must not both"),
    (
        {"master_weights": True, "stochastic_rounding": True},
        "master_weights and stochastic_rounding must not",
    ),
    ({"capturable": True, "nonfinite": "skip"}, "use nonfinite='propagate'"),
]


def weight(*values: float, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values or (1.0, 2.0), dtype=dtype))


@pytest.mark.parametrize(
    ("cls", "settings", "sentence"),
    [
        (cls, settings, sentence)
        for cls in EVERY
        for settings, sentence in BAD_SETTINGS
        if settings.keys() <= inspect.signature(cls).parameters.keys()
    ],
)
def test_a_bad_setting_is_refused_with_the_way_out(cls, settings, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        cls([weight()], **settings)
    with pytest.raises(ValueError, match=sentence):
        cls([{"params": [weight()], **settings}])  # a group's own setting is checked alike


@BOTH
@pytest.mark.parametrize(
    ("dtype", "settings", "sentence"),
    [
        (torch.complex64, {"state_dtype": torch.bfloat16}, "state_dtype.*real.*got .*complex64"),
        (torch.complex64, {"master_weights": True}, "master_weights.*real.*got .*complex64"),
        (torch.complex64, {"fused": True}, "fused.*real.*got .*complex64"),
        (torch.float16, {"stochastic_rounding": True}, "use master_weights=True"),
        (torch.float64, {"fused": True}, "fused computes in float32.*use foreach=True"),
        (
            torch.bfloat16,
            {"fused": True, "capturable": True, "stochastic_rounding": True},
            "replay the same seed.*stochastic_rounding=True",
        ),
    ],
)
def test_a_setting_that_does_not_fit_the_parameter_is_refused(
    cls, dtype, settings, sentence: str
) -> None:
    param = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    with pytest.raises(ValueError, match=sentence):
        cls([param], **settings)
    optimizer = cls([weight()])
    with pytest.raises(ValueError, match=sentence):
        optimizer.add_param_group({"params": [param], **settings})
    assert len(optimizer.param_groups) == 1  # the refused group is not left behind


@pytest.mark.parametrize("cls", [Adafactor, SM3, AdamW8bit])
def test_small_state_optimizers_refuse_complex_parameters(cls) -> None:
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(ValueError, match=f"{cls.__name__} needs real parameters, got .*complex64"):
        cls([param])


@ALL_PATHS
def test_sparse_gradients_are_refused_by_name(cls, path) -> None:
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1, 3])).sum().backward()
    optimizer = cls(embedding.named_parameters(), **path)
    with pytest.raises(RuntimeError, match="sparse one for parameter 'weight'.*SparseAdam"):
        optimizer.step()


@ALL_PATHS
def test_groups_without_gradients_and_with_their_own_settings(cls, path) -> None:
    params = [weight(1.0, -2.0) for _ in range(4)]
    optimizer = cls(
        [
            {"params": params[:1], "lr": 0.1, "weight_decay": 0.0},
            {"params": params[1:2]},  # never gets a gradient
            {"params": params[2:3], "lr": 0.1, "weight_decay": 0.5},
            {"params": params[3:], "lr": 0.0},
        ],
        lr=0.3,
        **path,
    )
    for index in (0, 2, 3):
        params[index].grad = torch.tensor([0.5, 0.5])
    optimizer.step()
    start = torch.tensor([1.0, -2.0])
    assert torch.equal(params[1], start) and torch.equal(params[3], start)
    # All move by lr · sign(g) on their first step; decay is lr · λ · p of its own group.
    move = 0.1 * (2.5**0.5 if cls is Adafactor else 1.0)  # a share of the weights' RMS there
    assert (params[0] - (start - move)).abs().max() < 1e-6
    assert (params[2] - (start * 0.95 - move)).abs().max() < 1e-6
    assert not optimizer.state[params[1]]


@ALL_PATHS
def test_maximize_climbs_and_leaves_the_gradient_alone(cls, path, seed: int) -> None:
    up, down = awkward(torch.float32, seed), awkward(torch.float32, seed)
    climber, faller = cls(up, maximize=True, **path), cls(down, **path)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        grads = [torch.randn(p.shape, generator=generator) for p in up]
        for a, b, grad in zip(up, down, grads, strict=True):
            a.grad, b.grad = grad.clone(), -grad
        climber.step()
        faller.step()
        assert all(torch.equal(p.grad, grad) for p, grad in zip(up, grads, strict=True))
    assert largest_difference(up, down) == 0


@ALL_PATHS
def test_raise_stops_before_any_weight_changes(cls, path) -> None:
    fine, bad = weight(), weight()
    fine.grad, bad.grad = torch.ones(2), torch.tensor([1.0, float("nan")])
    optimizer = cls([{"params": [fine]}, {"params": [bad]}], nonfinite="raise", **path)
    with pytest.raises(RuntimeError, match="got NaN .* parameter 0 of group 1; no weight"):
        optimizer.step()
    assert torch.equal(fine, torch.tensor([1.0, 2.0]))


@ALL_PATHS
def test_skip_leaves_that_parameter_out_and_counts(cls, path) -> None:
    fine, bad = weight(), weight()
    optimizer = cls([fine, bad], lr=0.1, nonfinite="skip", **path)
    for value, skipped in ((float("inf"), 1), (1.0, 1), (float("nan"), 2)):
        fine.grad, bad.grad = torch.ones(2), torch.tensor([1.0, value])
        before = bad.detach().clone()
        optimizer.step()
        assert optimizer.skipped == skipped
        assert torch.equal(bad, before) == (value != 1.0)
    assert fine.isfinite().all() and bad.isfinite().all()
    assert copy.deepcopy(optimizer).skipped == 2
    if cls is AdamW:
        assert int(optimizer.state[bad]["step"]) == 1


@BOTH
@PATHS
@pytest.mark.parametrize("capturable", [False, True])
def test_tensor_learning_rate_and_betas_are_read_at_every_step(
    cls, path, capturable, seed: int
) -> None:
    lr = torch.tensor(0.01)
    betas = (torch.tensor(0.8), torch.tensor(0.95))
    settings = {"capturable": capturable, **path}
    shapes = [(70_001,), (3, 5)]
    ours, plain = awkward(torch.float32, seed, shapes), awkward(torch.float32, seed, shapes)
    first = run(ours, lambda p: cls(p, lr=lr, betas=betas, **settings), seed=seed, steps=3)
    second = run(plain, lambda p: cls(p, lr=0.01, betas=(0.8, 0.95), **path), seed=seed, steps=3)
    lr.fill_(0.02)
    second.param_groups[0]["lr"] = 0.02
    train(ours, first, seed=seed + 1, steps=2)
    train(plain, second, seed=seed + 1, steps=2)
    assert far(ours, plain, 1e-5) <= (4 if cls is Lion else 0)


@ALL_PATHS
def test_a_saved_state_goes_on_to_the_same_weights(cls, path, seed: int) -> None:
    def missing(step: int, index: int) -> bool:
        return index == 3 and step < 2

    whole, halves = awkward(torch.float32, seed), awkward(torch.float32, seed)
    one = run(whole, lambda p: cls(p, lr=1e-2, **path), seed=seed, steps=4, missing=missing)
    train(whole, one, seed=seed + 1, steps=3)
    two = run(halves, lambda p: cls(p, lr=1e-2, **path), seed=seed, steps=4, missing=missing)
    file = io.BytesIO()
    torch.save(two.state_dict(), file)
    file.seek(0)
    fresh = cls(halves, lr=5.0, **path)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    train(halves, fresh, seed=seed + 1, steps=3)
    assert largest_difference(whole, halves) == 0
    assert largest_difference(states(one), states(fresh)) == 0


@BOTH
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_loading_keeps_the_dtype_of_state(cls, state_dtype, seed: int) -> None:
    settings = {"state_dtype": state_dtype, "master_weights": True}
    params = awkward(torch.bfloat16, seed, [(70_001,), (3,)])
    saved = run(params, lambda p: cls(p, **settings), seed=seed, steps=2)
    fresh = cls(awkward(torch.bfloat16, seed, [(70_001,), (3,)]), **settings)
    fresh.load_state_dict(saved.state_dict())
    for mine, theirs in zip(states(fresh), states(saved), strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
        assert (
            mine.data_ptr() != theirs.data_ptr()
        )  # torch shares the tensors; a step would hit both
    entry = fresh.state[fresh.param_groups[0]["params"][0]]
    assert entry["exp_avg"].dtype == state_dtype and entry["master"].dtype == torch.float32


def test_loaded_settings_are_checked_before_anything_changes(seed: int) -> None:
    params = awkward(torch.float32, seed, [(3,)])
    optimizer = run(params, lambda p: Lion(p, lr=0.1), seed=seed, steps=1)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = -1.0
    with pytest.raises(ValueError, match="lr must be"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_another_optimizers_state_is_refused(seed: int) -> None:
    params = awkward(torch.float32, seed, [(3,)])
    saved = run(params, lambda p: AdamW(p), seed=seed, steps=1).state_dict()
    with pytest.raises(ValueError, match="Lion keeps {'exp_avg': .*got a state .*exp_avg_sq"):
        Lion(params).load_state_dict(saved)


def test_a_state_of_another_shape_is_refused_and_nothing_changes(seed: int) -> None:
    saved = run(awkward(torch.float32, seed, [(5,)]), lambda p: AdamW(p), seed=seed, steps=1)
    ours = run(awkward(torch.float32, seed, [(3,)]), lambda p: AdamW(p), seed=seed, steps=2)
    kept = {k: v.clone() for k, v in ours.state_dict()["state"][0].items()}
    with pytest.raises(ValueError, match=r"shape \(3,\), got a state with .*\(5,\)"):
        ours.load_state_dict(saved.state_dict())
    assert all(torch.equal(v, kept[k]) for k, v in ours.state_dict()["state"][0].items())


@ALL
def test_pickle_and_an_old_state_without_our_settings(cls, seed: int) -> None:
    params = awkward(torch.float32, seed, [(3,), (70_000,)])
    optimizer = run(params, lambda p: cls(p), seed=seed, steps=2)
    again = pickle.loads(pickle.dumps(optimizer))
    train(again.param_groups[0]["params"], again, seed=seed, steps=2)
    train(params, optimizer, seed=seed, steps=2)
    assert largest_difference(params, again.param_groups[0]["params"]) == 0
    for group in again.param_groups:
        for name in ("nonfinite", "maximize", "state_dtype", "fused"):
            group.pop(name, None)
    again.__setstate__(again.__getstate__())
    again.step()
    assert again.param_groups[0]["nonfinite"] == "propagate"


@ALL
def test_a_closure_runs_with_gradients_and_gives_its_loss(cls) -> None:
    param = weight(3.0)
    optimizer = cls([param], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 9.0
    assert param.item() < 3.0


@BOTH
@PATHS
def test_the_schedulers_of_torch_move_the_learning_rate(cls, path) -> None:
    param = weight(1.0)
    optimizer = cls([param], lr=0.1, weight_decay=0.0, **path)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for expected in (0.9, 0.85, 0.825):
        param.grad = torch.ones(1)
        optimizer.step()
        scheduler.step()
        assert param.item() == pytest.approx(expected, abs=1e-6)
