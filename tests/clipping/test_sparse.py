"""Sparse gradients of embeddings, and gradients shared out over two processes."""

from __future__ import annotations

import functools
import math
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from labcore import processes
from labcore.clipping import (
    AutoClip,
    ZClip,
    clip_adaptive,
    clip_by_global_norm,
    clip_by_local_norm,
    clip_by_value,
)

CLIPS = {
    "global": lambda params: clip_by_global_norm(params, 0.5),
    "global inf": lambda params: clip_by_global_norm(params, 0.5, math.inf),
    "global 1": lambda params: clip_by_global_norm(params, 0.5, 1.0),
    "global 3": lambda params: clip_by_global_norm(params, 0.5, 3.0),
    "local": lambda params: clip_by_local_norm(params, 0.5),
    "value": lambda params: clip_by_value(params, 0.25),
    "adaptive": lambda params: clip_adaptive(params, 0.05),
    "autoclip": lambda params: AutoClip().clip(params),
    "zclip": lambda params: ZClip(max_norm=0.5).clip(params),
}


def embedded(sparse: bool, seed: int) -> list[Tensor]:
    """An embedding whose rows 2 and 5 are each used more than once, and a dense weight."""
    generator = torch.Generator().manual_seed(seed)
    table = nn.Parameter(torch.randn(9, 4, generator=generator))
    weight = nn.Parameter(torch.randn(3, 4, generator=generator))
    rows = torch.tensor([2, 5, 2, 0, 5, 2])
    hidden = F.embedding(rows, table, sparse=sparse) @ weight.T
    (hidden.sin() * torch.randn(hidden.shape, generator=generator)).sum().backward()
    return [table, weight]


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_sparse_gradient_is_clipped_like_its_dense_equivalent(clip, seed: int) -> None:
    sparse, dense = embedded(True, seed), embedded(False, seed)
    assert sparse[0].grad is not None and not sparse[0].grad.is_coalesced()
    ours, theirs = clip(sparse), clip(dense)
    torch.testing.assert_close(ours.norm, theirs.norm)
    if clip is not CLIPS["adaptive"]:  # which has no units for rows that are not there
        torch.testing.assert_close(ours.coefficients, theirs.coefficients)
    assert sparse[0].grad.is_sparse
    for one, other in zip(sparse, dense, strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad.to_dense(), other.grad)
    torch.optim.SGD(sparse, lr=0.1).step()


def test_policies_see_sparse_values(seed: int) -> None:
    params = embedded(True, seed)
    assert params[0].grad is not None
    params[0].grad = params[0].grad.coalesce()
    params[0].grad.values()[1, 2] = math.nan
    with pytest.raises(RuntimeError, match=r"in 1 of 2: 0;"):
        clip_by_global_norm(params, 1.0)
    assert not clip_by_global_norm(params, 1.0, nonfinite="zero").finite
    assert torch.isfinite(params[0].grad.to_dense()).all()


def test_other_sparse_layouts_and_units_are_refused(seed: int) -> None:
    table, _ = embedded(True, seed)
    with pytest.raises(ValueError, match="needs unit_axis 0.*got unit_axis 1"):
        clip_adaptive(table, unit_axis=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls this layout a beta
        odd = nn.Parameter(torch.ones(2, 2).to_sparse_csr())
        odd.grad = torch.ones(2, 2).to_sparse_csr()
    with pytest.raises(TypeError, match="strided or sparse COO"):
        clip_by_global_norm(odd, 1.0)


SHAPES = ((7, 5), (3,), (4, 6), (2, 3, 4))
SIZES = {1.0: tuple(CLIPS), 1e21: ("global", "adaptive")}


def whole_list(seed: int, size: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found: list[Tensor] = []
    for shape in SHAPES:
        param = nn.Parameter(torch.randn(shape, generator=generator))
        param.grad = size * torch.randn(shape, generator=generator)
        found.append(param)
    return found


Found = dict[str, list[Tensor]]


def on_two(seed: int) -> dict[float, Found]:
    """Each clipping of DTensors, by size of the gradients; what comes back is whole."""
    # Here, not above: the module takes a second, and labcore.clipping has to do without it.
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    placements = [Shard(0), Shard(0), Shard(1), Replicate()]

    def shared_out(size: float) -> list[Tensor]:
        params = []
        for param, placement in zip(whole_list(seed, size), placements, strict=True):
            one = nn.Parameter(distribute_tensor(param.detach(), mesh, [placement]))
            one.grad = distribute_tensor(param.grad, mesh, [placement])
            params.append(one)
        return params

    def outcome(clip, params: list[Tensor]) -> list[Tensor]:
        clipped = clip(params)
        grads = [p.grad.full_tensor() for p in params]
        return [clipped.norms, clipped.coefficients, clipped.finite, *grads]

    found = {
        size: {name: outcome(CLIPS[name], shared_out(size)) for name in names}
        for size, names in SIZES.items()
    }
    spoiled = shared_out(1.0)
    if torch.distributed.get_rank() == 1:
        spoiled[0].grad.to_local()[0, 0] = math.nan  # only one rank has it
    skip = functools.partial(clip_by_global_norm, max_norm=0.5, nonfinite="skip")
    return {**found, math.nan: {"skip": outcome(skip, spoiled)}}


def test_shards_are_clipped_as_a_whole_and_one_nan_stops_all(seed: int) -> None:
    for rank in processes.run(on_two, 2, seed):
        for size, names in SIZES.items():
            for name in names:
                params = whole_list(seed, size)
                clipped = CLIPS[name](params)
                expected = [clipped.norms, clipped.coefficients, clipped.finite]
                expected += [p.grad for p in params]
                for one, other in zip(rank[size][name], expected, strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7 * size)
        (skipped,) = (found for size, found in rank.items() if math.isnan(size))
        _, coefficients, finite, *grads = skipped["skip"]
        assert not finite and (coefficients == 0).all()
        assert all((grad == 0).all() for grad in grads)
