"""How a batch is cut, and what each policy does to the running averages."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labcore.norm import GhostBatchNorm1d, ghost_sizes
from labcore.norm.ghosts import POLICIES
from tests.norm.cases import CASES, GHOST, PLAIN, affine, draw

BUFFERS = ("running_mean", "running_var")


@given(batch=st.integers(1, 400), ghost=st.integers(1, 70))
def test_sizes_are_near_even_and_none_is_a_tail_of_one(batch: int, ghost: int) -> None:
    sizes = ghost_sizes(batch, ghost)
    assert sum(sizes) == batch and max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)
    assert min(sizes) >= 2 or batch == 1 or ghost == 1
    if not (ghost == 2 and batch % 2):
        assert max(sizes) <= ghost and len(sizes) == -(-batch // ghost)
    if batch % ghost == 0:
        assert set(sizes) == {ghost}


@pytest.mark.parametrize(
    ("batch", "ghost", "sizes"),
    [(100, 32, (25,) * 4), (65, 64, (33, 32)), (5, 2, (3, 2)), (1, 4, (1,)), (3, 1, (1, 1, 1))],
)
def test_sizes_of_the_awkward_batches(batch: int, ghost: int, sizes: tuple[int, ...]) -> None:
    assert ghost_sizes(batch, ghost) == sizes


@pytest.mark.parametrize("bad", [0, -3])
def test_sizes_below_one_are_refused(bad: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ghost_sizes(8, bad)
    with pytest.raises(ValueError, match="at least 1"):
        ghost_sizes(bad, 8)


def statistics(x: torch.Tensor) -> dict[str, torch.Tensor]:
    dims = [0, *range(2, x.dim())]
    return {"running_mean": x.mean(dims), "running_var": x.var(dims, correction=1)}


def expected(x, ghost: int, policy: str, momentum, before, tracked: int):
    """The docstring's formulas, one ghost after another in float64."""
    parts = [statistics(part) for part in x.split(ghost_sizes(len(x), ghost))]
    rows = {
        "pooled": [statistics(x)],
        "mean": [{n: sum(p[n] for p in parts) / len(parts) for n in BUFFERS}],
    }.get(policy, parts)
    after = dict(before)
    for row in rows:
        tracked += 1
        factor = 1 / tracked if momentum is None else momentum
        if momentum is not None and policy == "divided":
            factor = momentum / len(parts)
        after = {n: (1 - factor) * after[n] + factor * row[n] for n in BUFFERS}
    return after, tracked


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("momentum", [0.1, 1.0, 0.0, None])
@pytest.mark.parametrize("case", [case for case in CASES if case[2] > 1])
def test_each_policy_follows_its_formula(policy, momentum, case, generator) -> None:
    dims, shape, ghost = case
    layer = GHOST[dims](
        shape[1], momentum=momentum, dtype=torch.float64, ghost_size=ghost, running=policy
    )
    affine(layer, generator)
    after = {name: getattr(layer, name).clone() for name in BUFFERS}
    tracked = 0
    for _ in range(3):
        x = draw(shape, generator)
        layer(x)
        after, tracked = expected(x, ghost, policy, momentum, after, tracked)
    for name in BUFFERS:
        torch.testing.assert_close(getattr(layer, name), after[name])
    assert int(layer.num_batches_tracked) == tracked


@pytest.mark.parametrize("policy", POLICIES)
def test_half_precision_buffers_take_the_rounded_average(policy, generator) -> None:
    x = draw((26, 7), generator, torch.bfloat16)
    half = GhostBatchNorm1d(7, ghost_size=8, running=policy, dtype=torch.bfloat16)
    full = GhostBatchNorm1d(7, ghost_size=8, running=policy, dtype=torch.float64)
    half(x)
    full(x.double())
    for name in BUFFERS:
        assert getattr(half, name).dtype == torch.bfloat16
        torch.testing.assert_close(
            getattr(half, name).double(), getattr(full, name), rtol=2**-8, atol=2**-9
        )


@pytest.mark.parametrize("policy", POLICIES)
def test_the_order_of_ghosts_changes_only_what_is_sequential(policy, generator) -> None:
    parts = [draw((8, 5), generator) for _ in range(4)]
    order = torch.tensor([2, 0, 3, 1])
    layers, outs = [], []
    for arranged in (parts, [parts[i] for i in order]):
        layer = GhostBatchNorm1d(5, ghost_size=8, running=policy, dtype=torch.float64)
        outs.append(torch.stack(layer(torch.cat(arranged)).split(8)))
        layers.append(layer)
    torch.testing.assert_close(outs[0][order], outs[1])
    gap = (layers[0].running_var - layers[1].running_var).abs().max()
    assert gap > 1e-6 if policy in ("sequential", "divided") else gap < 1e-12


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_one_ghost_is_torchs_batch_norm(policy, momentum, generator) -> None:
    for dims, shape, _ in CASES:
        settings = {"momentum": momentum, "dtype": torch.float64}
        ours = GHOST[dims](shape[1], ghost_size=shape[0], running=policy, **settings)
        theirs = PLAIN[dims](shape[1], **settings)
        for _ in range(2):
            x = draw(shape, generator)
            assert torch.equal(ours(x), theirs(x))
        for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
            assert torch.equal(a, b)
