"""A divided Llama computes what the whole one computes, and each rank has its part of it."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from labcore import processes
from labcore.models import DenseCache
from labcore.parallel import layers, llama, regions
from labcore.parallel.llama import ParallelLlama, gathered_state, local_cache, parallelize
from labcore.parallel.regions import rank_and_size
from labcore.parallel.vocabulary import vocab_parallel_cross_entropy
from tests.models.shapes import model_of, tokens_of
from tests.parallel.pairs import Differences, Pairs, differences, module_seed, say
from tests.parallel.shapes import CONFIGS, LAYERS, SHORT, B, T, gradients, mine, own_part, pair_of

COUNTS = (2, 4)
# The stricter dtype for two ranks only: four of them share a few cores.
DTYPES = {2: (torch.float32, torch.float64), 4: (torch.float32,)}
# As many roundings in both: a gradient that is small everywhere is held to its own largest number.
LIMITS = {dtype: 4_500 * torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}


def training(name: str, g: torch.Generator, *, dtype: torch.dtype, spread: bool) -> Pairs:
    """Logits, hidden states and all gradients; the loss reads the hidden states too."""
    config = CONFIGS[name]
    whole, own = pair_of(config, dtype, g, sequence_parallel=spread)
    assert type(own) is ParallelLlama
    tokens = tokens_of(config, (B, T if spread else SHORT), g)
    probes = [
        torch.randn(*tokens.shape, size, generator=g, dtype=dtype)
        for size in (config.vocab_size, config.hidden_size)
    ]
    for model in (whole, own):
        for _ in range(2):  # the second backward adds to what the first left
            out = model(tokens)
            ((out.logits * probes[0]).sum() + (out.hidden * probes[1]).sum()).backward()
    expected, out = whole(tokens), own(tokens)
    yield "logits", out.logits, expected.logits
    yield "hidden", out.hidden, expected.hidden
    parameters = dict(own.named_parameters())
    assert parameters.keys() == dict(whole.named_parameters()).keys()
    for key, parameter in whole.named_parameters():
        yield key, parameters[key], own_part(key, parameter)
    ours = gradients(own)
    for key, gradient in gradients(whole, own_part).items():
        yield f"{key}.grad", ours[key], gradient


def divided_logits(g: torch.Generator, *, dtype: torch.dtype) -> Pairs:
    """Logits stay divided, up to the loss."""
    for spread in (False, True):
        for name in ("grouped", "tied"):
            config = CONFIGS[name]
            whole, own = pair_of(config, dtype, g, sequence_parallel=spread, gather_logits=False)
            tokens, labels = (tokens_of(config, (B, T), g) for _ in range(2))
            logits, part = whole(tokens).logits, own(tokens).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            ours = vocab_parallel_cross_entropy(part, labels)
            loss.backward()
            ours.backward()
            label = f"{name}, spread={spread}"
            yield f"{label}: logits", part, mine(logits, -1)
            yield f"{label}: loss", ours, loss
            found = gradients(own)
            for key, gradient in gradients(whole, own_part).items():
                yield f"{label}: {key}.grad", found[key], gradient


@torch.no_grad()
def cached(name: str, g: torch.Generator, *, dtype: torch.dtype) -> Pairs:
    """A ragged prompt, tokens one by one with a row that pauses, a tree, and a cut."""
    config = CONFIGS[name]
    whole, own = pair_of(config, dtype, g)
    size = {"batch": B, "capacity": 20}
    caches = DenseCache(config, **size, dtype=dtype), local_cache(own, **size)
    ranks = rank_and_size()[1]
    assert caches[1]._keys[0].shape[1] * ranks == config.kv_heads
    assert caches[1]._keys[0].dtype == dtype

    def both(tokens: Tensor, **others: Tensor) -> tuple[Tensor, Tensor]:
        a, b = (
            model(tokens, cache=cache, **others).logits
            for model, cache in zip((own, whole), reversed(caches), strict=True)
        )
        return a, b

    counts = torch.tensor([SHORT, 1, 4], dtype=torch.int32)
    a, b = both(tokens_of(config, (B, SHORT), g), counts=counts)
    valid = torch.arange(SHORT) < counts[:, None]
    yield "prompt", a[valid], b[valid]
    for step in range(3):
        active = torch.tensor([1, step % 2, 1], dtype=torch.int32)
        a, b = both(tokens_of(config, (B, 1), g), counts=active)
        yield f"step {step}", a[active.bool()], b[active.bool()]
    tree = torch.tensor([[-1, 0, 0, 1], [-1, -1, 1, -2], [-1, 0, 1, 2]], dtype=torch.int32)
    a, b = both(tokens_of(config, (B, 4), g), tree=tree)
    yield "tree", a[tree != -2], b[tree != -2]
    for cache in caches:
        cache.keep(0, [0, 2])
        cache.truncate(torch.tensor([9, 3, 5]))
    a, b = both(tokens_of(config, (B, 2), g))
    yield "after a cut", a, b
    yield "lengths", caches[1].lengths.double(), caches[0].lengths.double()


@torch.no_grad()
def cached_by_tokens(g: torch.Generator, *, dtype: torch.dtype) -> Pairs:
    """Under sequence parallelism a prompt may go into a cache too."""
    config = CONFIGS["grouped"]
    whole, own = pair_of(config, dtype, g, sequence_parallel=True)
    tokens = tokens_of(config, (B, T), g)
    cache = local_cache(own, batch=B, capacity=T)
    yield "logits", own(tokens, cache=cache).logits, whole(tokens).logits


def as_torch_divides(g: torch.Generator, *, dtype: torch.dtype) -> Pairs:
    """torch's parallelize_module on the same layers; what it leaves whole stays whole there."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (rank_and_size()[1],))
    plan: dict[str, Any] = {}
    for layer in range(LAYERS):
        for name in ("q_proj", "k_proj", "v_proj"):
            plan[f"layers.{layer}.self_attn.{name}"] = ColwiseParallel()
        for name in ("gate_proj", "up_proj"):
            plan[f"layers.{layer}.mlp.{name}"] = ColwiseParallel()
        plan[f"layers.{layer}.self_attn.o_proj"] = RowwiseParallel()
        plan[f"layers.{layer}.mlp.down_proj"] = RowwiseParallel()
    config = CONFIGS["biased"]
    theirs = model_of(config, g).to(dtype)
    own = parallelize(copy.deepcopy(theirs), mesh)  # a mesh is a group too
    parallelize_module(theirs, mesh, plan)
    tokens = tokens_of(config, (B, SHORT), g)
    probe = torch.randn(B, SHORT, config.vocab_size, generator=g, dtype=dtype)
    for model in (own, theirs):
        (model(tokens).logits * probe).sum().backward()
    yield "logits", own(tokens).logits, theirs(tokens).logits

    def part(name: str, gradient: Any) -> Tensor:
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        return own_part(name, whole)

    ours = gradients(own)
    for key, gradient in gradients(theirs, part).items():
        yield f"{key}.grad", ours[key], gradient


CHECKS = {
    f"{name}, spread={spread}": functools.partial(training, name, spread=spread)
    for name in CONFIGS
    for spread in (False, True)
}
CHECKS |= {f"{name}, cached": functools.partial(cached, name) for name in CONFIGS}
CHECKS |= {
    "divided logits": divided_logits,
    "cached by tokens": cached_by_tokens,
}
# torch's own tensors take seconds to import in each process; test_layers has four ranks of them.
SLOW = {"as torch divides": as_torch_divides}


def faults() -> Iterator[tuple[str, str, mock._patch]]:
    """(name, the check that shows it, the patch that plants it)."""

    def bias_everywhere(self: layers.RowParallelLinear, x: Tensor) -> Tensor:
        leave = layers.scatter_sequence if self.sequence_parallel else layers.reduce_from_ranks
        return leave(torch.nn.functional.linear(x, self.weight, self.bias), self.group)

    gather = regions._all_gather

    def reversed_gather(x: Tensor, group: object, dim: int) -> Tensor:
        return torch.cat(gather(x, group, dim).chunk(rank_and_size()[1], dim)[::-1], dim)

    def same(x: Tensor, group: object = None) -> Tensor:
        return x

    bias = mock.patch.object(layers.RowParallelLinear, "forward", bias_everywhere)
    order = mock.patch.object(regions, "_all_gather", reversed_gather)
    yield "bias on every rank", "biased, spread=False", bias
    yield "gather in the wrong order", "plain, spread=False", order
    yield "tokens in the wrong order", "plain, spread=True", order
    lost = mock.patch.object(llama, "copy_to_ranks", same)
    yield "no sum before the columns", "plain, spread=False", lost
    forgotten = mock.patch.object(layers, "copy_to_ranks", same)
    yield "no sum of the norms' gradients", "plain, spread=True", forgotten
    twice = mock.patch.object(llama, "gather_from_ranks", regions.gather_sequence)
    yield "the hidden states' gradient once a rank", "plain, spread=True", twice


def counted(g: torch.Generator) -> dict[str, dict[str, int]]:
    """Collectives that the forward and the backward call."""
    found = {}
    ranks = rank_and_size()[1]
    for spread in (False, True):
        _, own = pair_of(CONFIGS["grouped"], torch.float32, g, sequence_parallel=spread)
        tokens = tokens_of(CONFIGS["grouped"], (B, T), g)
        calls: Counter[str] = Counter()

        def counting(name: str, calls: Counter[str] = calls) -> mock._patch:
            call = getattr(regions, name)

            def heard(*arguments: Any, **named: Any) -> Tensor:
                # gloo's reduce-scatter is an all-reduce, which is not counted again.
                before = calls["_all_reduce"]
                found = call(*arguments, **named)
                calls["_all_reduce"] = before
                calls[name] += 1
                return found

            return mock.patch.object(regions, name, heard)

        names = ("_all_reduce", "_all_gather", "_reduce_scatter")
        with counting(names[0]), counting(names[1]), counting(names[2]):
            logits = own(tokens).logits
            found[f"forward, spread={spread}"] = dict(+calls)
            calls.clear()
            logits.sum().backward()
            found[f"backward, spread={spread}"] = dict(+calls)
    assert ranks > 1
    return found


@torch.no_grad()
def in_groups(g: torch.Generator) -> Pairs:
    """Four ranks, two models, each divided between two ranks that lie apart."""
    rank = dist.get_rank()
    groups = [dist.new_group([first, first + 2]) for first in range(2)]
    for number, config in enumerate((CONFIGS["grouped"], CONFIGS["tied"])):
        whole = model_of(config, g)
        tokens = tokens_of(config, (B, SHORT), g)
        if rank % 2 == number:
            own = parallelize(copy.deepcopy(whole), groups[number])
            cache = local_cache(own, batch=B, capacity=SHORT)
            yield "logits", own(tokens).logits, whole(tokens).logits
            yield "cached", own(tokens, cache=cache).logits, whole(tokens).logits
            for key, tensor in gathered_state(own).items():
                yield key, tensor, whole.state_dict()[key]


def everything(seed: int) -> dict[str, Any]:
    ranks = rank_and_size()[1]
    checks = CHECKS | SLOW if ranks == 2 else CHECKS
    found = {
        dtype: differences(
            {name: functools.partial(check, dtype=dtype) for name, check in checks.items()}, seed
        )
        for dtype in DTYPES[ranks]
    }
    if ranks == 4:
        found[torch.float32] |= differences({"groups": in_groups}, seed)
    planted: Differences = {}
    for name, shown_by, patch in faults():
        check = functools.partial(CHECKS[shown_by], dtype=torch.float64)
        with patch:
            planted |= {name: differences({name: check}, seed)[name]}
    return {
        "found": found,
        "planted": planted,
        "counted": counted(torch.Generator().manual_seed(seed)),
    }


@pytest.fixture(scope="module", params=COUNTS)
def runs(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, Any]]]:
    by_rank = processes.run(everything, request.param, module_seed(), timeout_s=300)
    return request.param, by_rank


@pytest.mark.parametrize("name", CHECKS)
def test_a_divided_model_equals_the_whole_one(name: str, runs) -> None:
    ranks, by_rank = runs
    for dtype in DTYPES[ranks]:
        assert not say([one["found"][dtype] for one in by_rank], name, LIMITS[dtype]), dtype


def test_torch_divides_alike(runs) -> None:
    ranks, by_rank = runs
    for dtype in DTYPES[ranks] if ranks == 2 else ():
        for name in SLOW:
            assert not say([one["found"][dtype] for one in by_rank], name, LIMITS[dtype])


def test_groups_of_ranks_divide_models_of_their_own(runs) -> None:
    if runs[0] == 4:
        assert not say(
            [one["found"][torch.float32] for one in runs[1]], "groups", LIMITS[torch.float32]
        )


def test_each_planted_fault_is_seen(runs) -> None:
    planted = [one["planted"] for one in runs[1]]
    assert len(planted[0]) == 6
    for name in planted[0]:
        assert say(planted, name, 1e-3), name


def test_a_layer_has_two_collectives_each_way(runs) -> None:
    for one in runs[1]:
        counts = one["counted"]
        # The embedding's sum, then two a layer, and the logits.
        assert counts["forward, spread=False"] == {"_all_reduce": 1 + 2 * LAYERS, "_all_gather": 1}
        # Before the head, then two a layer; the embedding's gradient is already everywhere.
        assert counts["backward, spread=False"] == {"_all_reduce": 1 + 2 * LAYERS}
        # Two gathers a layer, the last hidden states, the logits.
        assert counts["forward, spread=True"] == {
            "_reduce_scatter": 1 + 2 * LAYERS,
            "_all_gather": 2 * LAYERS + 2,
        }
        # Sums: the head's input, and the weights of each norm.
        assert counts["backward, spread=True"] == {
            "_all_reduce": 1 + 2 * LAYERS + 1,
            "_all_gather": 1 + 2 * LAYERS,
            "_reduce_scatter": 2 * LAYERS,
        }


def test_alone_a_divided_model_is_the_whole_one(generator: torch.Generator) -> None:
    config = CONFIGS["qwen2"]
    whole = model_of(config, generator).requires_grad_(False)
    own = parallelize(copy.deepcopy(whole), sequence_parallel=True)
    tokens = tokens_of(config, (B, SHORT), generator)
    torch.testing.assert_close(own(tokens).logits, whole(tokens).logits)
    assert not any(p.requires_grad for p in own.parameters()) and not own.training
    assert own.get_submodule("layers.0.mlp.up_proj").training is False
    cache = local_cache(own, batch=B, capacity=SHORT, dtype=torch.float64)
    assert cache._keys[0].shape[1] == config.kv_heads
    assert cache._keys[0].dtype == torch.float64
    for name, tensor in gathered_state(own).items():
        assert torch.equal(tensor, whole.state_dict()[name])
