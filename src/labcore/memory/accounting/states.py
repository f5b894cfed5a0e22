"""What papers and libraries count: bytes a parameter, their shares, bytes a layer of GPT.

These are rules of thumb with a convention behind each; `estimate` counts what torch allocates.
"""

from __future__ import annotations

from labcore.checks import non_negative, one_of, positive, positive_int
from labcore.memory.accounting.breakdown import Breakdown

__all__ = ["BUFFER", "CONVENTIONS", "STAGES", "deepspeed_host", "gpt_layer", "model_states"]

STAGES = (0, 1, 2, 3)
# Bytes a parameter: the 16-bit weights, the gradients, what Adam keeps in 32 bits (a master copy
# and two moments). DeepSpeed's estimators count gradients in 32 bits: its optimizer converts them.
CONVENTIONS = {"16": (2, 2, 12), "18": (2, 4, 12)}
BUFFER = 1.5  # DeepSpeed's allowance on the host


def model_states(
    parameters: float,
    *,
    convention: str = "16",
    zero_stage: int = 0,
    data_parallel: int = 1,
    largest_layer: float = 0,
) -> Breakdown:
    """Weights, gradients and optimizer state on one device under mixed-precision Adam.

    parameters: P. convention: "16" is ZeRO's count of bytes a parameter, "18" that of DeepSpeed's
    estimators. data_parallel: N devices share what the stage divides: 1 the optimizer's state,
    2 the gradients too, 3 the weights too. With "16" that is 16P, 4P + 12P/N, 2P + 14P/N, 16P/N;
    with "18" it is 18P, 4P + 16P/N for 1 and 2, and 4 `largest_layer` + 18P/N, where the layer's
    16-bit weights and gradients stand gathered as workspace.
    largest_layer: parameters of the module with most of its own; read by "18" at stage 3 alone.
    Raises ValueError for sizes that are not positive and for an unknown convention or stage.
    Sources: Rajbhandari et al., 2019, arXiv 1910.02054; DeepSpeed's page "Memory Requirements".
    """
    positive("parameters", parameters)
    non_negative("largest_layer", largest_layer)
    weight, gradient, kept = CONVENTIONS[one_of("convention", convention, CONVENTIONS)]
    one_of("zero_stage", zero_stage, STAGES)
    share = parameters / positive_int("data_parallel", data_parallel)
    weights, gradients, gathered = weight * parameters, gradient * parameters, 0.0
    state = kept * (share if zero_stage else parameters)
    if convention == "18" and zero_stage in (1, 2):
        gradients = 2 * parameters + 4 * share  # in 16 bits whole, in 32 divided
    elif zero_stage >= 2:
        gradients = gradient * share
    if zero_stage == 3:
        weights = weight * share
        gathered = 4 * largest_layer if convention == "18" else 0.0
    return Breakdown(
        parameters=round(weights),
        gradients=round(gradients),
        optimizer=round(state),
        workspace=round(gathered),
    )


def deepspeed_host(
    parameters: float,
    *,
    zero_stage: int,
    devices: int,
    nodes: int = 1,
    offload: str = "none",
    largest_layer: float | None = None,
) -> int:
    """Bytes of one node's main memory that DeepSpeed's estimators ask for, buffer included.

    devices: GPUs a node. offload: "none", "optimizer", or "all" (stage 3: weights too).
    largest_layer: its parameters, where a model of stage 3 is built under `zero.Init`; None where
    every process builds it whole in float32 first.
    Raises ValueError for a stage other than 2 and 3, and for "all" at stage 2.
    Source: DeepSpeed's page "Memory Requirements".
    """
    positive("parameters", parameters)
    one_of("zero_stage", zero_stage, (2, 3))
    one_of(
        "offload",
        offload,
        ("none", "optimizer", "all") if zero_stage == 3 else ("none", "optimizer"),
    )
    positive_int("nodes", nodes)
    built = 4 * positive_int("devices", devices)  # bytes a parameter: a float32 copy a process
    kept: float = {"none": 0, "optimizer": 16, "all": 18}[offload]
    if zero_stage == 2:
        if kept:  # here, and only here, the estimator takes the processes of all nodes
            built *= nodes
    else:
        kept /= nodes
        if largest_layer is not None:
            positive("largest_layer", largest_layer)
            return round(BUFFER * (kept * parameters if kept else built * largest_layer))
    return round(BUFFER * parameters * max(built, kept))


def gpt_layer(
    *,
    batch: int,
    length: int,
    hidden: int,
    heads: int,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    selective: bool = False,
) -> int:
    """Bytes that one layer of a GPT keeps for the backward, in 16 bits, with dropout.

    s = length, b = batch, h = hidden, a = heads, t devices in tensor parallel: sbh (34 + 5as/h) on
    one; sbh (10 + 24/t + 5as/ht) on each of t; sbh (34 + 5as/h) / t with sequence parallelism.
    selective: attention's scores, 5as/h of it, are recomputed. FlashAttention never keeps them.
    Source: Korthikanti et al., 2022, arXiv 2205.05198, table 2.
    """
    sizes = {"batch": batch, "length": length, "hidden": hidden, "heads": heads}
    for name, size in sizes.items():
        positive_int(name, size)
    shares = positive_int("tensor_parallel", tensor_parallel)
    alone = 10 / (shares if sequence_parallel else 1)
    scores = 0 if selective else 5 * heads * length / hidden
    return round(batch * length * hidden * (alone + (24 + scores) / shares))
