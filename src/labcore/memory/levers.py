"""Levers that stack on one training run: what each does to a GPU's bytes and to a step's seconds.

The bytes are `estimate`'s. The seconds are the sum of five terms, each at its limit by the data
sheet, as if nothing overlapped:

- products: FLOPs of the matrix products and of causal attention, over a share of the card's peak. A
  backward costs twice its forward, for frozen matrices once; attention's costs 2.5 times. The share
  stands for everything that the products wait for, elementwise operations above all.
- recomputed: the layers' forward again, but for each segment's last product (down_proj), whose
  output no backward needs; torch stops before it. Adapters need it. Selective checkpointing
  recomputes no product and no attention. It takes the bytes of norms, rotary embedding, SwiGLU and
  a residual sum, each as one kernel that reads its inputs and writes its output once.
- optimizer step: bytes of one pass over weights, gradients and state, over the memory's bandwidth.
  An AdamW that isn't fused reads or writes an array as large as the weights 20 times, by the
  operations in torch's `_multi_tensor_adamw`; the others count as if they were fused. Offloaded,
  the step runs on the CPU, fused, at the bandwidth of main memory, which a server's GPUs share.
- PCIe: what ZeRO-Offload moves, each part's gradients down, and updated weights up once.
- collectives: rings over the links of a server of 8 GPUs, or over the network beyond. A gradient's
  all-reduce, or its reduce-scatter and the gathering of weights, moves (N - 1) / N of the tensor
  once or twice. FSDP2 gathers and reduces for each part of a batch, once at stage 2 and with a
  second gathering at stage 3.

No kernel's launch, no dequantization, no wait for data and no fragmented memory is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labcore.attention.traffic import Gpu, Shape, flops
from labcore.checks import positive, positive_int
from labcore.memory.accounting.breakdown import Breakdown
from labcore.memory.accounting.part import Part
from labcore.memory.accounting.prediction import Settings, estimate
from labcore.models.config import LlamaConfig

__all__ = ["CAUSES", "CHUNK", "Card", "Levers", "Plan", "elementwise_bytes", "plan"]

CAUSES = ("products", "recomputed", "optimizer step", "PCIe", "collectives")
CHUNK = 1024  # tokens whose logits exist at a time, with the lever `no_logits`
SERVER = 8  # GPUs
PASSES = 20  # over the weights, in an AdamW step that isn't fused


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A GPU and its links, in bytes/s and one way.

    fp32: FLOP/s without tensor cores. link: to the GPUs of its server; network: to those of others;
    host: to main memory, whose own rate is `main`.
    """

    gpu: Gpu
    fp32: float
    link: float
    network: float
    host: float
    main: float

    def rate(self, dtype: str) -> float:
        """Return the peak FLOP/s of products in a dtype; float32 runs without tensor cores."""
        return self.fp32 if dtype == "float32" else self.gpu.matmul


@dataclass(frozen=True, kw_only=True, slots=True)
class Levers:
    """The methods that a run applies; the defaults are plain training. Names as in `Settings`.

    no_logits: whether the loss computes the logits of CHUNK tokens at a time.
    """

    dtype: str = "float32"
    optimizer: str = "adamw"
    fused: bool = False
    checkpointing: int | str | None = None
    parts: int = 1
    no_logits: bool = False
    zero_stage: int = 0
    offload: bool = False
    rank: int = 0
    bits: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """held: bytes at the peak on one GPU. seconds: of a step, by CAUSES."""

    held: Breakdown
    seconds: Mapping[str, float]

    @property
    def step(self) -> float:
        """Seconds per step, if nothing overlaps."""
        return sum(self.seconds.values())


def elementwise_bytes(part: Part) -> int:
    """Return the bytes per token that selective recomputation reads and writes in all layers."""
    config = part.config
    heads = (config.num_attention_heads + config.kv_heads) * config.head_size
    norms_and_sum = 7 * config.hidden_size * part.wide
    return part.layers * (norms_and_sum + (2 * heads + 3 * config.intermediate_size) * part.narrow)


def plan(
    config: LlamaConfig,
    card: Card,
    levers: Levers,
    *,
    rows: int,
    length: int,
    devices: int = 1,
    share: float = 0.5,
) -> Plan:
    """Return the peak bytes and the seconds of a step of `Llama(config)` with some levers.

    rows, length: rows per step on each of `devices` GPUs, and predicted tokens per row. share: of
    the card's peak that the products reach, above 0.
    The module says what the seconds assume. Raises ValueError or TypeError as `estimate` does.
    Sources: Rajbhandari et al., 2019, arXiv 1910.02054 (what the stages move); Williams et al.,
    2009, Communications of the ACM 52 (the roofline); Ren et al., 2021, arXiv 2101.06840 (offload).
    """
    positive("share", share, "pass a number up to 1")
    settings: dict[str, Any] = {
        "batch": rows,
        "length": length,
        "dtype": levers.dtype,
        "optimizer": levers.optimizer,
        "fused": levers.fused,
        "checkpointing": levers.checkpointing,
        "parts": levers.parts,
        "chunk": CHUNK if levers.no_logits else None,
        "zero_stage": levers.zero_stage,
        "data_parallel": positive_int("devices", devices),
        "offload": levers.offload,
        "rank": levers.rank,
        "bits": levers.bits,
        "device": "gpu",
    }
    held = estimate(config, **settings)
    part = Settings(**{**settings, "offload": False}).ends(config)[0]
    tokens = rows * length
    attention = config.num_hidden_layers * flops(
        Shape(
            batch=rows, heads=config.num_attention_heads, length=length, head_dim=config.head_size,
            is_causal=True,
        )
    )  # fmt: skip
    layers, matrices = config.num_hidden_layers, part.elements("proj.weight")
    adapters = part.gradients() / part.wide if levers.rank else 0
    stack = 2 * tokens * layers * (matrices + adapters)
    trained = 2 * tokens * layers * (adapters or matrices)
    head = 2 * tokens * part.table
    work = 2 * stack + trained + head * (2 if levers.rank else 3) + 3.5 * attention
    again = 0.0
    if isinstance(levers.checkpointing, int):
        segments = -(-layers // levers.checkpointing)
        last = 0 if levers.rank else part.elements("down_proj.weight")
        again = stack + attention - 2 * tokens * segments * last
    rate = share * card.rate(levers.dtype)
    recomputed = again / rate
    if levers.checkpointing == "selective":
        recomputed = tokens * elementwise_bytes(part) / card.gpu.bandwidth
    own = 1 / devices if levers.zero_stage else 1.0  # of the state that a GPU steps
    moved = 3 * part.trained + 2 * part.state
    if levers.optimizer == "adamw" and not levers.fused and not levers.offload:
        moved = PASSES * part.trained
    stepping = moved / card.gpu.bandwidth
    if levers.offload:
        stepping = moved * min(devices, SERVER) / card.main
    sent = part.trained * 2
    if levers.zero_stage >= 2:
        sent = levers.parts * (part.trained + (levers.zero_stage - 1) * part.weights)
    return Plan(
        held=held,
        seconds={
            "products": work / rate,
            "recomputed": recomputed,
            "optimizer step": own * stepping,
            "PCIe": own * (levers.parts + 1) * part.trained / card.host if levers.offload else 0.0,
            "collectives": sent
            * (devices - 1)
            / devices
            / (card.link if devices <= SERVER else min(card.link, card.network)),
        },
    )
