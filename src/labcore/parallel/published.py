"""Compare the model's predictions with times that others published; nothing is fitted to them.

The predictions come from data sheets, from NCCL's table (`protocols`), and from the assumed launch
of `step`. None of the measurements here set any of these.

Tokens: metaseq's OPT-175B on 8 A100, before and after CUDA graphs; gpt-fast's Llama 2 on 1 to 8
A100 at 330 W, eager on one GPU and as graphs. All-reduces: nccl-tests on 4 H100 and on 8 A100. One
thread of nccl-tests drives all GPUs and launches once per GPU, so a call takes at least as long as
those launches, unless the calls are replayed as a graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from labcore.models.config import LlamaConfig
from labcore.parallel.cost import LINKS, all_reduce_seconds
from labcore.parallel.protocols import protocol_links
from labcore.parallel.step import GPUS, MODELS, decode_step
from labcore.parallel.timeline import simulate_timeline

__all__ = [
    "GPT_FAST",
    "GPT_FAST_CONTEXT",
    "Comparison",
    "compare_all_reduces",
    "compare_tokens",
    "published_bases",
    "wire_bounds",
]

# OPT-175B (arXiv 2205.01068) has two matrices of 4 C in its MLP. Three of 8/3 C are as many bytes.
_OPT = LlamaConfig(
    vocab_size=50272, hidden_size=12288, intermediate_size=32768, num_hidden_layers=96,
    num_attention_heads=96, max_position_embeddings=2048, qkv_bias=True, output_bias=True,
)  # fmt: skip
_METASEQ = "https://github.com/facebookresearch/metaseq/pull/270"
_POST = "https://pytorch.org/blog/accelerating-generative-ai-2/"
_README = "https://github.com/pytorch-labs/gpt-fast/blob/0f925b5d/README.md"
_METASEQ_CONTEXT = 2048  # tokens that its captured step attends to

GPT_FAST: Mapping[str, Mapping[int, float]] = {
    "7B": {1: 104.9, 2: 168.84, 4: 254.02, 8: 328.43},
    "70B": {2: 21.32, 4: 38.01, 8: 62.50},
}
"""gpt-fast's tokens per second by Llama 2 model and number of GPUs, with weights in bfloat16."""

GPT_FAST_CONTEXT = 105
"""The mean context of its steps: generate.py writes 200 tokens by default, after 5 of a prompt."""

_H100 = "https://github.com/waynehacking8/nccl-collectives-bench/blob/38c093ed/results"
_A100 = "https://github.com/yumibyte/CS244C-Research/blob/00e8182a/phase1-baseline/a100-8gpu-new"
# Out-of-place times in microseconds, by message size in bytes.
_TABLES: Mapping[str, tuple[str, int, bool, str, Mapping[int, float]]] = {
    "4 H100": (
        "NVLink 4", 4, False, f"{_H100}/quiet/all_reduce.txt",
        {2**13: 23.75, 2**16: 25.49, 2**20: 26.76, 2**24: 101.86, 2**27: 617.74},
    ),
    "4 H100, graph": (
        "NVLink 4", 4, True, f"{_H100}/symmetric/all_reduce_reg0_graph1.txt",
        {2**13: 15.46, 2**16: 16.76, 2**20: 24.00, 2**24: 105.81},
    ),
    "8 A100": (
        "NVLink 3", 8, False, f"{_A100}/results/results_8gpu_allreduce.txt",
        {2**13: 57.13, 2**16: 58.10, 2**20: 69.33, 2**24: 294.92, 2**27: 1402.03},
    ),
}  # fmt: skip
# Microseconds of 2**28 bytes on 4 H100 with the protocol given.
_FORCED = {"LL": 2741.05, "LL128": 1288.51, "Simple": 1181.52}
# NCCL's small all-reduces in microseconds: GPUs, source, and times by bytes. SGLang's table, of
# graphs, doesn't give the number of GPUs; we take eight.
_SMALL: Mapping[str, tuple[int, str, Mapping[int, float]]] = {
    "4 H100, graph": (4, f"{_H100}/symmetric/all_reduce_reg0_graph1.txt", {2**13: 15.46}),
    "8 H100": (
        8, "https://github.com/ByteDance-Seed/Triton-distributed/issues/57",
        {2**7: 19.19, 2**10: 19.50, 2**14: 20.71},
    ),
    "SGLang, graph": (
        8, "https://github.com/sgl-project/sglang/pull/10571", {2**11: 16.4637, 2**12: 18.583},
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A published time and the model's, in seconds. source: the measurement's address.

    nbytes: of an all-reduce's message; 0 for a token.
    """

    name: str
    predicted: float
    measured: float
    source: str
    nbytes: int = 0

    @property
    def residual(self) -> float:
        """(measured - predicted) / measured; above 0, the model is too fast."""
        return (self.measured - self.predicted) / self.measured


def compare_tokens(
    *, launch: float | None = None, base: float | None = None
) -> tuple[Comparison, ...]:
    """Compare times of a token.

    launch: as in `simulate_timeline`. base: as in `protocol_links`, of metaseq's all-reduces.
    metaseq sums with NCCL. gpt-fast uses its own one-shot and two-shot kernels instead of NCCL
    (ENABLE_INTRA_NODE_COMM=1); two_shot over `LINKS` stands in for them, although its GPUs form a
    hybrid cube mesh, without links between all pairs. Both ran more kernels than the fused ones of
    `decode_step`.
    """
    gpu, found = GPUS["A100 SXM"], []
    links = protocol_links("NVLink 3", base=base)
    ops = decode_step(_OPT, ranks=8, context=_METASEQ_CONTEXT)
    for name, graph, milliseconds in (("eager", False, 95), ("graph", True, 66)):
        run = simulate_timeline(ops, gpu, links, graph=graph, launch=launch, events=False)
        found.append(
            Comparison(
                name=f"OPT-175B, 8 A100, {name}", predicted=run.seconds,
                measured=milliseconds * 1e-3, source=_METASEQ,
            )
        )  # fmt: skip
    rates = [("7B", 1, False, 25.5, _POST), ("7B", 1, True, 107.0, _POST)]
    for model, by_gpus in GPT_FAST.items():
        rates += [(model, gpus, True, rate, _README) for gpus, rate in by_gpus.items() if gpus > 1]
    for model, gpus, graph, rate, source in rates:
        ops = decode_step(MODELS[model], ranks=gpus, context=GPT_FAST_CONTEXT)
        run = simulate_timeline(
            ops, gpu, LINKS["NVLink 3"], algorithm="two_shot", graph=graph, launch=launch,
            events=False,
        )  # fmt: skip
        name = f"Llama 2 {model}, {gpus} A100, {'graph' if graph else 'eager'}"
        found.append(Comparison(name=name, predicted=run.seconds, measured=1 / rate, source=source))
    return tuple(found)


def compare_all_reduces(
    *, launch: float | None = None, base: float | None = None
) -> tuple[Comparison, ...]:
    """Compare times of nccl-tests' all_reduce_perf with rings and the fastest protocol.

    launch: seconds per launch; None takes that of the H100 for both. base: as in `protocol_links`.
    """
    once, found = GPUS["H100 SXM"].launch if launch is None else launch, []
    for table, (link, ranks, graph, source, times) in _TABLES.items():
        links = protocol_links(link, base=base)
        for size, microseconds in times.items():
            wire = all_reduce_seconds("ring", ranks, size, links)
            found.append(
                Comparison(
                    name=f"{table}, {size:,} bytes",
                    predicted=wire if graph else max(wire, ranks * once),
                    measured=microseconds * 1e-6,
                    source=source,
                    nbytes=size,
                )
            )
    for protocol, microseconds in _FORCED.items():
        size, forced = 2**28, protocol_links("NVLink 4", base=base)[protocol]
        found.append(
            Comparison(
                name=f"4 H100, {protocol}, {size:,} bytes",
                predicted=all_reduce_seconds("ring", 4, size, forced),
                measured=microseconds * 1e-6,
                source=f"{_H100}/proto_sweep.txt",
                nbytes=size,
            )
        )
    return tuple(found)


def published_bases() -> dict[str, float]:
    """Return NCCL's base, over its own figure, at which the model gives published small times.

    Rings over NVLink 4 with the fastest protocol. Keys name the table and the bytes.
    """
    found = {}
    for table, (ranks, _, times) in _SMALL.items():
        for size, microseconds in times.items():
            without, own = (
                all_reduce_seconds("ring", ranks, size, protocol_links("NVLink 4", **base))
                for base in ({"base": 0.0}, {})
            )
            name = f"{table}, {size:,} bytes"
            found[name] = (microseconds * 1e-6 - without) / (own - without)
    return found


def wire_bounds() -> dict[str, tuple[float, float]]:
    """Return the least and the largest share of each published token that only the wire can take.

    Keys are names of `compare_tokens`, of steps on several GPUs replayed as a graph without
    overlap. The least share is the predicted time of the wire over the measured token; the largest
    is what the predicted time of the kernels leaves. Both predictions are taken as lower bounds.
    """
    gpu, found = GPUS["A100 SXM"], {}
    for one in compare_tokens():
        model, gpus, way = one.name.split(", ")
        ranks = int(gpus.split()[0])
        if way == "eager" or ranks == 1:
            continue
        ours = model == "OPT-175B"
        config = _OPT if ours else MODELS[model.split()[-1]]
        context = _METASEQ_CONTEXT if ours else GPT_FAST_CONTEXT
        run = simulate_timeline(
            decode_step(config, ranks=ranks, context=context), gpu,
            protocol_links("NVLink 3") if ours else LINKS["NVLink 3"],
            algorithm="ring" if ours else "two_shot", graph=True, events=False,
        )  # fmt: skip
        found[one.name] = run.wire / one.measured, 1 - run.compute / one.measured
    return found
