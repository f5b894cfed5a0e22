"""What papers and libraries count: bytes per parameter, how they shard, bytes per GPT layer.

These are rules of thumb, each with its own convention; `estimate` counts what torch allocates.
"""

from __future__ import annotations

from labcore.checks import non_negative, one_of, positive, positive_int
from labcore.memory.accounting.breakdown import Breakdown

__all__ = ["BUFFER", "CONVENTIONS", "STAGES", "deepspeed_host", "gpt_layer", "model_states"]

STAGES = (0, 1, 2, 3)
# Bytes per parameter: the 16-bit weights, the gradients, and Adam's 32-bit master copy and two
# moments. DeepSpeed's estimators count 32-bit gradients, because its optimizer converts them.
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
    """Return weights, gradients and optimizer state on one device under mixed-precision Adam.

    parameters: P. convention: "16" is ZeRO's count of bytes per parameter, "18" that of DeepSpeed's
    estimators. data_parallel: N devices share what the stage shards: 1 the optimizer state, 2 also
    the gradients, 3 also the weights. For stages 0 to 3, "16" gives 16P, 4P + 12P/N, 2P + 14P/N and
    16P/N. "18" gives 18P at stage 0, 4P + 16P/N at 1 and 2, and 4 `largest_layer` + 18P/N at 3,
    where the largest layer's 16-bit weights and gradients are gathered as workspace.
    largest_layer: parameters of the module that directly owns the most, used by "18" at stage 3.
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
        gradients = 2 * parameters + 4 * share  # whole in 16 bits, sharded in 32
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
    """Return the bytes of main memory that DeepSpeed's estimators want per node, buffer included.

    devices: GPUs per node. offload: "none", "optimizer", or "all" (stage 3 only: weights too).
    largest_layer: its parameters, for a stage-3 model built under `zero.Init`; None if every
    process first builds the whole model in float32.
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
    built = 4 * positive_int("devices", devices)  # bytes per parameter: a float32 copy per process
    kept: float = {"none": 0, "optimizer": 16, "all": 18}[offload]
    if zero_stage == 2:
        if kept:  # only here does the estimator count the processes of all nodes
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
    """Return the bytes that one GPT layer keeps for the backward, in 16 bits, with dropout.

    With s = length, b = batch, h = hidden, a = heads and t tensor-parallel devices, one device
    keeps sbh (34 + 5as/h). Each of t keeps sbh (10 + 24/t + 5as/ht), or sbh (34 + 5as/h) / t with
    sequence parallelism.
    selective: recompute attention's scores, the term 5as/h. FlashAttention never keeps them.
    Source: Korthikanti et al., 2022, arXiv 2205.05198, table 2.
    """
    sizes = {"batch": batch, "length": length, "hidden": hidden, "heads": heads}
    for name, size in sizes.items():
        positive_int(name, size)
    shares = positive_int("tensor_parallel", tensor_parallel)
    alone = 10 / (shares if sequence_parallel else 1)
    scores = 0 if selective else 5 * heads * length / hidden
    return round(batch * length * hidden * (alone + (24 + scores) / shares))
