"""Tensor parallelism: what dividing a model saves, what its all-reduces cost, what graphs save.

The cases run single-threaded processes on one machine, which communicate through gloo. If the
processes fill or outnumber the cores, they wait for each other; the details have both numbers.
Cases under "paper" aren't measured: they use formulas and the simulator of
`labcore.parallel.timeline` with data-sheet values.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.runner import Measurement, case, exact, ratios, seen
from labcore import processes
from labcore.models import Llama, LlamaConfig
from labcore.models.shipped import pretrained, prompts, shipped_tokenizer
from labcore.parallel.collectives import (
    ALL_REDUCES,
    CollectiveTraffic,
    expected,
    ring,
    ring_all_gather,
)
from labcore.parallel.cost import BACKEND, Link, fit_alpha_beta, in_rounds, time_all_reduce
from labcore.parallel.graphs import GraphedDecoder
from labcore.parallel.greedy import Decoded, timed_decode
from labcore.parallel.launch_time import LaunchSeconds, launch_seconds
from labcore.parallel.layers import ColumnParallelLinear, RowParallelLinear
from labcore.parallel.llama import local_cache, parallelize
from labcore.parallel.overlap import measure_overlap, overlapped_seconds
from labcore.parallel.regions import (
    copy_to_ranks,
    gather_from_ranks,
    part,
    rank_and_size,
    reduce_from_ranks,
)
from labcore.studies.tensor_parallel import ranges
from labcore.timing import measure

TIMEOUT_S = 400.0
PROMPT = 64  # tokens
simulated = functools.partial(exact, mode="simulated")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much the cases measure."""

    ranks: tuple[int, ...] = (2, 4)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    messages: tuple[int, ...] = tuple(4 * n for n in (1, 256, 4096, 65536, 262144, 1048576))
    # Bytes that are left out in turn, and predicted by a fit to the others.
    left_out: tuple[int, ...] = (4 * 65536, 4 * 1048576)
    blocks: int = 5  # of rounds; each has its own fit
    repeats: int = 15
    # C and F of an MLP, the rows of its input, and how often it is timed.
    width: int = 256
    inner: int = 704
    tokens: int = 256
    rounds: int = 100
    prompt: int = PROMPT
    new: int = 64  # tokens
    runs: int = 5  # prompts
    chunks: tuple[int, ...] = (1, 2, 4, 8)
    product: tuple[int, int, int] = (256, 1024, 1024)  # rows, inner, width
    overlap_repeats: int = 40


FULL = Sizes()
SMALL = Sizes(
    seeds=(7, 8, 9), messages=(4, 64, 1000, 4096), left_out=(64, 4096), blocks=2, repeats=3,
    width=12, inner=20, tokens=5, rounds=3, prompt=9, new=4, runs=2, chunks=(1, 3),
    product=(6, 8, 10), overlap_repeats=4,
)  # fmt: skip


def on(ranks: int) -> dict[str, Any]:
    """Return how many processes shared how many cores."""
    return {"processes": ranks, "cores": os.cpu_count()}


# What a rank holds -------------------------------------------------------------------------------
ROWS, LENGTH = 4, 64  # the forward whose activations are counted
CAPACITY = 256  # tokens per row of the cache


def kept_bytes(model: Llama, rows: int = ROWS) -> int:
    """Return the bytes of the storages that a forward saves for its backward, without weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.arange(rows * LENGTH).view(rows, LENGTH)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(tokens)  # keeps the graph, and with it the saved tensors, alive
    return sum(kept.values()) if out.logits.requires_grad else 0


def held_by(model: Llama) -> dict[str, int]:
    """Return the bytes that this process holds for a model, its cache and a forward."""
    cache = local_cache(model, batch=ROWS, capacity=CAPACITY)
    return {
        "bytes of weights": sum(p.nbytes for p in model.parameters()),
        "bytes of cache": sum(x.nbytes for x in (*cache._keys, *cache._values)),
        "bytes of a forward's activations": kept_bytes(model),
    }


def held() -> dict[str, dict[str, int]]:
    """Return what this rank holds of the whole target, and of its part."""
    divided, by_tokens = (
        parallelize(pretrained("target"), sequence_parallel=spread) for spread in (False, True)
    )
    return {
        "whole": held_by(pretrained("target")),
        "divided": held_by(divided),
        "sequence parallel": held_by(by_tokens),
    }


@case("memory", minutes=0.1)
def memory(sizes: Sizes = FULL) -> list[Measurement]:
    """Bytes of the fullest rank over those of the whole model, for the shipped target in fp32."""
    found = []
    for ranks in sizes.ranks:
        told = processes.run(held, ranks, timeout_s=TIMEOUT_S)
        whole = told[0]["whole"]
        for what, alone in whole.items():
            most = {form: max(rank[form][what] for rank in told) for form in told[0]}
            details: dict[str, Any] = {"rows": ROWS, "capacity": CAPACITY, "tokens": LENGTH}
            details["bytes"] = most
            name = f"{what} over the whole model's/{ranks} ranks"
            found.append(exact(name, "ratio", most["divided"] / alone, **details))
            if "activations" in what:
                share = most["sequence parallel"] / alone
                found.append(exact(f"{name}, sequence parallel", "ratio", share, **details))
    return found


# Which collective for which split ----------------------------------------------------------------
SHAPE = (37, 48, 60)  # for Y = XW: rows of X, its columns, columns of W


def products(seeds: Sequence[int]) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Return this rank's errors for each split and collective, by seed, and the bytes it sent.

    The result after the collective is compared with the desired one: an all-reduced block of
    columns with this rank's block of Y, gathered summands with repeated copies of Y.
    """
    ranks = rank_and_size()[1]
    rows, inner, width = SHAPE
    columns, terms = part("columns of W", width), part("rows of W", inner)
    errors: dict[str, list[float]] = {}
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        x, w = (torch.randn(n, m, generator=generator) for n, m in ((rows, inner), (inner, width)))
        y = x.double() @ w.double()
        block, summand = x @ w[:, columns], x[:, terms] @ w[terms]
        padded = torch.zeros(rows, width)
        padded[:, columns] = block
        for name, result, wanted in (
            ("columns, all-reduce", reduce_from_ranks(block), y[:, columns]),
            ("columns, all-gather", gather_from_ranks(block), y),
            ("columns, all-reduce of parts padded with zeros", reduce_from_ranks(padded), y),
            ("rows, all-reduce", reduce_from_ranks(summand), y),
            ("rows, all-gather", gather_from_ranks(summand), y.tile(1, ranks)),
        ):
            error = (result.double() - wanted).abs().max() / y.abs().max()
            errors.setdefault(name, []).append(float(error))
    gathered, reduced = CollectiveTraffic(), CollectiveTraffic()
    ring_all_gather(block, traffic=gathered)
    ring(padded, traffic=reduced)
    return errors, {"all-gather": gathered.bytes, "padded all-reduce": reduced.bytes}


@case("split", minutes=0.05)
def split(sizes: Sizes = FULL) -> list[Measurement]:
    """Largest relative error of any rank against fp64; an error of 1 or more is a wrong result."""
    found = []
    for ranks in sizes.ranks:
        told = processes.run(products, ranks, sizes.seeds, timeout_s=TIMEOUT_S)
        for name in told[0][0]:
            worst = [max(each) for each in zip(*(errors[name] for errors, _ in told), strict=True)]
            details: dict[str, Any] = {"seeds": sizes.seeds, "rows, inner, columns": SHAPE}
            details["dtype"] = "float32"
            found.append(seen(f"error/{name}, {ranks} ranks", "ratio", worst, **details))
        sent = [traffic for _, traffic in told]
        ratio = sum(each["padded all-reduce"] for each in sent) / sum(
            each["all-gather"] for each in sent
        )
        name = f"bytes sent a rank over those of the all-gather/padded all-reduce, {ranks} ranks"
        found.append(exact(name, "ratio", ratio, algorithm="ring", by_rank=sent))
    return found


# All-reduces -------------------------------------------------------------------------------------
ALGORITHMS, FITTED = (BACKEND, *ALL_REDUCES), (BACKEND, "ring")
Blocks = Mapping[str, Sequence[Mapping[int, Sequence[float]]]]


def group_of(backend: str) -> tuple[dist.ProcessGroup | None, torch.device]:
    """Return a group of all processes and its tensors' device: with NCCL, one GPU per process."""
    if backend != "nccl":
        return None, torch.device("cpu")
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    return dist.new_group(backend=backend), device


def timed_blocks(algorithms: Sequence[str], sizes: Sizes, backend: str) -> Blocks:
    """Time the algorithms in turn; return each one's seconds by size, block by block."""
    group, device = group_of(backend)
    found: dict[str, list[Mapping[int, Sequence[float]]]] = {name: [] for name in algorithms}
    how: dict[str, Any] = {"repeats": sizes.repeats, "group": group, "device": device}
    for _, name in itertools.product(range(sizes.blocks), algorithms):
        found[name].append(time_all_reduce(sizes.messages, algorithm=name, **how))
    return found


def told_of(blocks: Blocks, sizes: Sizes, **details: Any) -> list[Measurement]:
    """Return the times, and for FITTED the alpha and beta of each block and their predictions."""
    found = []
    for name, told in blocks.items():
        for size in told[0]:
            samples = [seconds for one in told for seconds in one[size]]
            found.append(seen(f"seconds/{name}, {size} bytes", "s", samples, **details))
    for name in FITTED:
        fits = [fit_alpha_beta(list(one), list(one.values())) for one in blocks[name]]
        more = {"sizes": sizes.messages, "residuals": [each.residuals for each in fits], **details}
        found += [
            seen(f"alpha/{name}", "us", [1e6 * each.alpha for each in fits], **more),
            seen(f"beta/{name}", "ns a byte", [1e9 * each.beta for each in fits], **more),
            seen(f"worst residual/{name}", "share", [each.worst for each in fits], **more),
        ]
        for size in sizes.left_out:
            samples = []
            for one in blocks[name]:
                others = {n: seconds for n, seconds in one.items() if n != size}
                predicted = fit_alpha_beta(list(others), list(others.values())).at(size)
                samples.append(predicted / statistics.median(one[size]))
            at = f"predicted over measured/{name}, {size} bytes"
            found.append(seen(at, "ratio", samples, left_out=size, **details))
    return found


def all_reduces(ranks: int, sizes: Sizes) -> list[Measurement]:
    """Compare the backend's all-reduce with those of labcore."""
    told = processes.run(timed_blocks, ranks, ALGORITHMS, sizes, "gloo", timeout_s=TIMEOUT_S)
    return told_of(told[0], sizes, **on(ranks))


@case("allreduce/2 ranks", minutes=0.3, needs="cpu")
def all_reduces_of_two(sizes: Sizes = FULL) -> list[Measurement]:
    """One core per process."""
    return all_reduces(2, sizes)


@case("allreduce/4 ranks", minutes=0.5, needs="cpu")
def all_reduces_of_four(sizes: Sizes = FULL) -> list[Measurement]:
    """On two cores the processes take turns."""
    return all_reduces(4, sizes)


@case("allreduce/nccl", minutes=0.5, needs="gpu")
def all_reduces_of_gpus(sizes: Sizes = FULL) -> list[Measurement]:
    """One process per GPU of this machine; a single GPU launches but sends nothing."""
    gpus = torch.cuda.device_count()
    names = [name for name in ALGORITHMS if name != "halving_doubling" or gpus.bit_count() == 1]
    told = processes.run(timed_blocks, gpus, names, sizes, "nccl", timeout_s=TIMEOUT_S)
    return told_of(told[0], sizes, gpus=gpus)


# Layers against torch's --------------------------------------------------------------------------
class MLP(nn.Module):
    """An MLP with gate, up and down projections, as in a Llama."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., C]; returns the same shape."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


def by_labcore(whole: MLP) -> nn.Module:
    """Return this rank's part, split the way `parallelize` splits a Llama layer."""
    own = copy.deepcopy(whole)
    own.gate = ColumnParallelLinear.of(whole.gate, input_is_copied=True)  # type: ignore[assignment]
    own.up = ColumnParallelLinear.of(whole.up, input_is_copied=True)  # type: ignore[assignment]
    own.down = RowParallelLinear.of(whole.down)  # type: ignore[assignment]
    own.register_forward_pre_hook(lambda _, inputs: (copy_to_ranks(inputs[0]),))
    return own


def by_torch(whole: MLP, *, one_input: bool) -> nn.Module:
    """Return this rank's part by torch. one_input: x enters both column layers as one DTensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    plan: dict[str, Any] = {
        "gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel(),
    }  # fmt: skip
    if one_input:  # sums its gradient over the ranks once, not for each of the two layers
        plan[""] = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)
        )
    mesh = init_device_mesh("cpu", (rank_and_size()[1],))
    return parallelize_module(copy.deepcopy(whole), mesh, plan)


PEER, LATER = "torch's parallelize_module", "torch's, an input for each column layer"


def timed_layers(width: int, inner: int, rows: int, rounds: int) -> dict[str, list[float]]:
    """Time each implementation's forward, and forward and backward, in turn; return the seconds."""
    generator = torch.Generator().manual_seed(0)
    whole = MLP(width, inner)
    with torch.no_grad():
        for weight in whole.parameters():
            weight.normal_(std=0.05, generator=generator)
    x, probe = (torch.randn(rows, width, generator=generator) for _ in range(2))
    forms = {
        "labcore": by_labcore(whole),
        PEER: by_torch(whole, one_input=True),
        LATER: by_torch(whole, one_input=False),
    }
    leaf = x.clone().requires_grad_()

    # Reading a number waits for a collective that torch left running.
    @torch.no_grad()
    def forward(model: nn.Module) -> float:
        return model(x)[-1, -1].item()

    def both(model: nn.Module) -> float:
        grads = torch.autograd.grad(model(leaf), [leaf, *model.parameters()], probe)
        return grads[0][-1, -1].item()

    wanted = (y := whole(leaf), *torch.autograd.grad(y, [leaf], probe))
    for model in forms.values():  # refuse to time wrong results
        found = (y := model(leaf) + 0, *torch.autograd.grad(y, [leaf], probe))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    calls: dict[str, Callable[[], float]] = {}
    for name, model in forms.items():
        calls[f"forward, {name}"] = functools.partial(forward, model)
        calls[f"forward and backward, {name}"] = functools.partial(both, model)
    return in_rounds(calls, repeats=rounds)


@case("layers/2 ranks", minutes=0.2, needs="cpu")
def layers(sizes: Sizes = FULL) -> list[Measurement]:
    """A column- and row-parallel MLP against torch's: below 1, labcore's is faster."""
    shape = (sizes.width, sizes.inner, sizes.tokens)
    told = processes.run(timed_layers, 2, *shape, sizes.rounds, timeout_s=TIMEOUT_S)[0]
    details = {"width": sizes.width, "inner": sizes.inner, "rows": sizes.tokens, **on(2)}
    found = []
    for what in ("forward", "forward and backward"):
        ours = told[f"{what}, labcore"]
        peers = {name: told[f"{what}, {name}"] for name in (PEER, LATER)}
        for name, theirs in peers.items():
            over = f"{what}, over {name}/2 ranks"
            found.append(seen(over, "ratio", ratios(ours, theirs), **details))
        found.append(seen(f"seconds/{what}, 2 ranks", "s", ours, peers=peers, **details))
    return found


# Decoding ----------------------------------------------------------------------------------------
def decodings(texts: Sequence[Sequence[int]], new: int) -> list[tuple[Decoded | None, Decoded]]:
    """Decode each prompt by the first process alone, then by all of them."""
    whole, divided = pretrained("target"), parallelize(pretrained("target"))
    found = []
    for text in (texts[0], *texts):  # the first decoding is a warmup
        alone = timed_decode(whole, text, max_tokens=new) if rank_and_size()[0] == 0 else None
        dist.barrier()
        found.append((alone, timed_decode(divided, text, max_tokens=new)))
        dist.barrier()
    return found[1:]


def decoded(ranks: int, sizes: Sizes) -> list[Measurement]:
    """Decode five code prompts with the shipped target: greedy, one row, no graph."""
    every = [shipped_tokenizer().encode(text) for text in prompts("code")]
    texts = [tokens[-sizes.prompt :] for tokens in every[: sizes.runs]]
    pairs = processes.run(decodings, ranks, texts, sizes.new, timeout_s=TIMEOUT_S)[0]
    at = f"{ranks} ranks"
    rates, alone = ([each[side].tokens_per_second for each in pairs] for side in (1, 0))
    details = {
        "prompt tokens": [len(text) for text in texts],
        "steps": [one.steps for _, one in pairs],
        "all-reduces a token": pairs[0][1].all_reduces,
        "their seconds alone": [one.all_reduce_seconds for _, one in pairs],
        "the same tokens": sum(own.tokens == one.tokens for own, one in pairs),
        **on(ranks),
    }
    peer, over = {"one process": alone}, ratios(rates, alone)
    shares = [one.all_reduce_share for _, one in pairs]
    return [
        seen(f"tokens a second/{at}", "tokens/s", rates, peers=peer, **details),
        seen(f"tokens a second over one process's/{at}", "ratio", over, **details),
        seen(f"all-reduce share/{at}", "share", shares, **details),
    ]


@case("decode/1 ranks", minutes=0.1, needs="cpu")
def decoded_by_one(sizes: Sizes = FULL) -> list[Measurement]:
    """A group of one, which sends nothing: the cost of the parallel layers alone."""
    return decoded(1, sizes)


@case("decode/2 ranks", minutes=0.3, needs="cpu")
def decoded_by_two(sizes: Sizes = FULL) -> list[Measurement]:
    """One core per process."""
    return decoded(2, sizes)


@case("decode/4 ranks", minutes=1.0, needs="cpu")
def decoded_by_four(sizes: Sizes = FULL) -> list[Measurement]:
    """On two cores the processes take turns."""
    return decoded(4, sizes)


# Launches ----------------------------------------------------------------------------------------
def launched() -> tuple[int, int]:
    """Return the number of operations in a decode step of one row, and of collectives in it."""
    model = parallelize(pretrained("target"))
    cache = local_cache(model, batch=1, capacity=CAPACITY)
    with GraphedDecoder(model, cache, batches=(1,)) as decoder:
        ops = decoder.recorded(1)
    return len(ops), sum(op.collective for op in ops)


@case("launches", minutes=0.1)
def launches() -> list[Measurement]:
    """The torch operations that a decode step launches one by one; a graph is a single launch."""
    found = []
    for ranks in (1, 2):
        ops, collectives = processes.run(launched, ranks, timeout_s=TIMEOUT_S)[0]
        at = f"target, {ranks} ranks"
        found += [
            exact(f"launches a token/eager, {at}", "launches", ops, collectives=collectives),
            simulated(f"launches a token/graph, {at}", "launches", 1, operations=ops),
        ]
    return found


# Overlap -----------------------------------------------------------------------------------------
FORMS = ("compute", "wire", "plain", "chunked", "overlapped")


@case("overlap", minutes=0.6, needs="cpu")
def overlap(sizes: Sizes = FULL) -> list[Measurement]:
    """A matrix product and its all-reduce, in sequence over overlapped: above 1, overlap pays.

    With gloo, the cores that compute also move the bytes. The simulated link moves them by itself
    and takes exactly as long as the product, which is the best case for overlap.
    """
    rows, inner, width = sizes.product
    product: dict[str, Any] = {"rows": rows, "inner": inner, "width": width}
    repeats = sizes.overlap_repeats
    x, weight = torch.ones(rows, inner), torch.full((inner, width), 1 / inner)
    alone = measure(lambda: torch.mm(x, weight), repeats=repeats).p50
    beta = alone / expected("ring", 2, 4 * rows * width).bytes
    equal = Link(name="simulated link", alpha=0.0, beta=beta, source="the product's time here")
    found = []
    for link, chunks in itertools.product((None, equal), sizes.chunks):
        run = measure_overlap(ranks=2, chunks=chunks, repeats=repeats, link=link, **product)
        forms = {form: getattr(run, form).p50 for form in FORMS}
        details = {"seconds": forms, **product, **on(2 if link is None else 1)}
        if link:
            details["link"] = "no bytes; its all-reduce takes as long as the whole product"
        at = f"plain over overlapped/{run.link}, {chunks} chunks"
        compute, wire = forms["compute"], forms["wire"]
        predicted = (compute + wire) / overlapped_seconds(compute, wire, chunks)
        details["predicted"] = "a link of its own, chunks that cost nothing"
        found += [
            seen(at, "ratio", ratios(run.plain.samples, run.overlapped.samples), **details),
            seen(f"predicted {at}", "ratio", [predicted], mode="simulated", exact=True, **details),
        ]
    return found


# On paper ----------------------------------------------------------------------------------------
H100, INFERRED = "8 H100", "kernels at 50 to 100 % of peaks, NCCL's base at 0 to 2 times"


def range_of(name: str, unit: str, found: ranges.Range, **details: Any) -> list[Measurement]:
    """Return both ends of a simulated range."""
    details |= {"gpus": H100, "over": INFERRED, "middle": found.middle}
    return [
        simulated(f"{end}/{name}", unit, value, **details)
        for end, value in (("smallest", found.low), ("largest", found.high))
    ]


@case("paper/share", minutes=0.02)
def shares_of_the_wire() -> list[Measurement]:
    """The share of a token's time in which only the wire works, as a graph."""
    found = []
    for model, link, batch, algorithm in (
        ("7B", "NVLink 4", 1, "ring"),
        ("70B", "NVLink 4", 1, "ring"),
        ("70B", "NVLink 4", 64, "ring"),
        ("70B", "PCIe 5.0 x16", 64, "ring"),
        ("70B", "NVLink 4", 1, "one_shot"),
    ):
        share = ranges.share(model, link, batch, algorithm=algorithm)
        found += range_of(f"{model}, {link}, batch {batch}, {algorithm}", "share", share)
    return found


@case("paper/hide", minutes=0.05)
def hidden_by_a_fork() -> list[Measurement]:
    """What the wire adds with a captured fork, over what it adds to a graph on one stream."""
    found = []
    for model, link, batch, way in (
        ("70B", "NVLink 4", 64, "two halves"),
        ("70B", "NVLink 4", 256, "two halves"),
        ("70B", "PCIe 5.0 x16", 256, "two halves"),
        ("7B", "NVLink 4", 1, "parallel block"),
    ):
        left = ranges.added(model, link, batch, way)
        found += range_of(f"{model}, {link}, batch {batch}, {way}", "ratio", left)
    return found


@case("paper/graph", minutes=0.05)
def gains_by_a_graph() -> list[Measurement]:
    """A token's time launched one operation after another, over that as one graph."""
    found = []
    launches = {"bare launch": ranges.BARE_LAUNCH, "operators": ranges.operator_launch()}
    for (model, batch), (host, launch) in itertools.product(
        (("7B", 1), ("70B", 1), ("70B", 64)), launches.items()
    ):
        gain = ranges.gain(model, "NVLink 4", batch, launch)
        found += range_of(f"{model}, batch {batch}, {host}", "ratio", gain, launch=launch)
    return found


# Graphs on a GPU ---------------------------------------------------------------------------------
# The shape of TinyLlama (arXiv 2401.02385), which has 1.1 B weights.
BILLION = LlamaConfig(
    vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22,
    num_attention_heads=32, num_key_value_heads=4,
)  # fmt: skip
GRAPHED, GRAPH_ROUNDS = (1, 8), 50


def graphed_steps(
    shapes: Mapping[str, LlamaConfig], batches: Sequence[int], rounds: int, backend: str
) -> dict[tuple[str, int], LaunchSeconds]:
    """Time steps of models with random weights, before and after a capture."""
    group, device = group_of(backend)
    found = {}
    for name, config in shapes.items():
        model = parallelize(Llama(config, device=device, dtype=torch.bfloat16).eval(), group)
        cache = local_cache(model, batch=max(batches), capacity=CAPACITY)
        with torch.no_grad():
            prompt = torch.zeros(max(batches), PROMPT, dtype=torch.int64, device=device)
            model(prompt, cache=cache)
        with GraphedDecoder(model, cache, batches=batches, group=group) as decoder:
            decoder.capture()
            for batch in batches:
                found[name, batch] = launch_seconds(decoder, batch=batch, rounds=rounds)
    return found


@case("graph/one GPU", minutes=1, needs="gpu")
def graph() -> list[Measurement]:
    """A decode step's time, eager over graph: above 1, the graph pays."""
    shapes = {"target": pretrained("target").config, "1.1B": BILLION}
    (told,) = processes.run(
        graphed_steps, 1, shapes, GRAPHED, GRAPH_ROUNDS, "nccl", timeout_s=TIMEOUT_S
    )
    found = []
    for (name, batch), run in told.items():
        at = f"{name}, batch {batch}"
        details = {"launches": run.launches, "context": CAPACITY, "dtype": "bfloat16"}
        over = ratios(run.eager.samples, run.graphed.samples)
        found.append(seen(f"eager over graph/{at}", "ratio", over, **details))
        for how, whole, host in (
            ("eager", run.eager, run.eager_host),
            ("graph", run.graphed, run.graphed_host),
        ):
            found += [
                seen(f"seconds a step/{at}, {how}", "s", whole.samples, **details),
                seen(f"host seconds a step/{at}, {how}", "s", host.samples, **details),
            ]
    return found
