"""Predicts how many bytes a training step will hold, from the model's shape alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from labcore.checks import one_of, positive_int
from labcore.memory.accounting.breakdown import Breakdown
from labcore.memory.accounting.part import Held, Part, parameter_shapes
from labcore.memory.accounting.states import CONVENTIONS, STAGES, model_states
from labcore.models.config import LlamaConfig

__all__ = ["DTYPES", "MOMENTS", "OPTIMIZERS", "estimate", "parameter_shapes"]

DTYPES = ("float32", "bfloat16", "float16", "mixed")
MOMENTS = ("forward", "backward", "step")
OPTIMIZERS = ("adamw", "sgd", "lion", "adafactor", "sm3", "adamw8bit")


def estimate(
    config: LlamaConfig,
    *,
    batch: int,
    length: int,
    dtype: str = "float32",
    optimizer: str = "adamw",
    checkpointing: int | str | None = None,
    zero_stage: int = 0,
    data_parallel: int = 1,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    convention: str = "exact",
    moment: str = "peak",
    device: str = "cpu",
) -> Breakdown:
    """Return the bytes on the fullest device at the peak of a training step of `Llama(config)`.

    A step is `zero_grad()`, `next_token_loss`, backward, `step()`. Gradients are created in the
    backward, so a peak at its start has none; `moment="step"` shows them all.

    batch, length: rows, and predicted tokens per row, of one forward on one device.
    dtype: of weights, gradients and moments; "mixed" keeps these in float32 and computes products
    in 16 bits with torch.autocast.
    optimizer: "adamw" and "sgd" are torch's, the others `labcore.optim`'s, all with their defaults.
    checkpointing: k recomputes every k layers as one; "selective" keeps the results of products and
    attention and recomputes the rest; None keeps everything.
    zero_stage: 1 shards the optimizer state over data_parallel devices, 2 also the gradients, 3
    also the weights. "exact" models what `divide` builds. FSDP2 (2, 3) keeps only shards of the
    weights at rest and gathers whole weights as workspace: all of them from the forward through the
    backward (2), or one layer and the next (3). In the paper, stage 2 keeps whole weights at rest,
    which "16" and "18" count. Batches of a few tokens take up to 15% more than predicted, for
    buffers of the collectives.
    tensor_parallel: devices that split every product; norms and the residual stream are whole on
    each. pipeline_parallel: stages, each with its share of the layers; the first keeps as many
    micro-batches as there are stages (1F1B), and gradients exist from the first micro-batch on.
    convention: "exact" counts what torch allocates here. "16" and "18" use the bytes per parameter
    of ZeRO and of DeepSpeed's estimators for weights, gradients and AdamW, all held at once, in a
    16-bit dtype.
    moment: "peak", or the highest point of one of MOMENTS.
    device: "cpu" matches measurements by `Meter`; "gpu" follows torch's sources. There, flash
    attention doesn't copy its output, and the default implementation of an optimizer step (foreach)
    works on all weights at once, so AdamW's holds one more copy of them.
    Raises ValueError or TypeError for settings that are invalid or don't fit together.
    Sources: Rajbhandari et al., 2019, arXiv 1910.02054 (stages, 16 bytes); Korthikanti et al.,
    2022, arXiv 2205.05198 (what tensor and pipeline parallelism divide).
    """
    one_of("dtype", dtype, DTYPES)
    one_of("optimizer", optimizer, OPTIMIZERS)
    one_of("moment", moment, ("peak", *MOMENTS))
    one_of("device", device, ("cpu", "gpu"))
    one_of("zero_stage", zero_stage, STAGES)
    one_of("convention", convention, ("exact", *CONVENTIONS))
    if checkpointing is not None and checkpointing != "selective":
        positive_int("checkpointing", checkpointing, "or None, or 'selective'")  # type: ignore[arg-type]
    sizes = {
        "batch": batch,
        "length": length,
        "data_parallel": data_parallel,
        "tensor_parallel": tensor_parallel,
        "pipeline_parallel": pipeline_parallel,
    }
    for name, size in sizes.items():
        positive_int(name, size)
    if convention != "exact" and (optimizer != "adamw" or dtype not in ("bfloat16", "float16")):
        raise ValueError(
            f"convention={convention!r} counts AdamW in a 16-bit dtype, got optimizer="
            f"{optimizer!r} and dtype={dtype!r}; pass dtype='bfloat16' and optimizer='adamw'"
        )
    if pipeline_parallel > config.num_hidden_layers:
        raise ValueError(
            f"pipeline_parallel must be at most the number of layers, {config.num_hidden_layers}, "
            f"got {pipeline_parallel}; each stage needs at least one layer"
        )
    last = pipeline_parallel - 1
    fewest, more = divmod(config.num_hidden_layers, pipeline_parallel)
    found: list[Breakdown] = []
    for stage in {0, last}:  # those between hold less than the first
        part = Part(
            config=config,
            batch=batch,
            length=length,
            dtype=dtype,
            optimizer=optimizer,
            checkpointing=checkpointing,
            shares=tensor_parallel,
            layers=fewest + (stage < more),
            embedding=stage == 0,
            head=stage == last,
            in_flight=pipeline_parallel - stage,
            gpu=device == "gpu",
        )
        for name in MOMENTS if moment == "peak" else (moment,):
            found += _moment(part, name, convention, zero_stage, data_parallel)
    return max(found, key=lambda breakdown: breakdown.total)


def _moment(
    part: Part, moment: str, convention: str, stage: int, devices: int
) -> Iterator[Breakdown]:
    """Yield every point of one of MOMENTS at which `part` may peak."""
    points = {"forward": part.forward, "backward": part.backward, "step": part.step}[moment]()
    # The activations of micro-batches that ran ahead wait for their backward.
    waiting = (part.in_flight - 1) * part.kept if moment != "step" else 0
    # On a CPU, stage 1 still steps whole parameters, one at a time.
    divided = moment == "step" and (stage >= 2 or (stage == 1 and part.gpu))
    for point in points:
        held = replace(
            point,
            activations=point.activations + waiting,
            workspace=point.workspace / (devices if divided else 1),
        )
        if convention == "exact":
            yield _exact(part, held, moment, stage, devices)
        else:
            yield _counted(part, held, convention, stage, devices)


def _exact(part: Part, held: Held, moment: str, stage: int, devices: int) -> Breakdown:
    """Return what torch holds at one moment, sharded as the stage says.

    DistributedDataParallel (stages 0 and 1) reserves room for all gradients from its first step.
    FSDP2's units are the layers, plus one for everything else, which stays gathered until the end
    of the backward.
    """
    stand = not (part.embedding and part.head)  # a pipeline has gradients of earlier micro-batches
    weights, gradients, state = float(part.weights), held.gradients, float(part.state)
    workspace = held.workspace
    if stand or (stage < 2 and devices > 1):
        gradients = part.weights
    if stage >= 1:
        state /= devices
    if stage >= 2 and moment == "step":
        weights, gradients = weights / devices, gradients / devices
    elif stage >= 2:
        ahead = part.layers - held.done
        reduced = held.done * part.unit
        workspace += held.gradients - reduced  # a unit's are whole until they're reduced
        gradients = (part.weights if stand else reduced) / devices
        outer = part.weights - part.layers * part.unit
        gathered = ahead if stage == 2 else min(ahead, held.gathered)
        # Flat copies for the collectives: of the last unit gathered, or the last one reduced.
        copied = bool(held.done) or (moment == "forward" and stage == 2 and held.gathered > 0)
        if held.first:
            outer, gathered, copied = 2 * outer, min(ahead, 2), False
        workspace += outer + part.unit * (gathered + copied)
        weights /= devices
    return Breakdown(
        parameters=round(weights),
        gradients=round(gradients),
        optimizer=round(state),
        activations=round(held.activations),
        workspace=round(workspace + part.buffers()),
    )


def _counted(part: Part, held: Held, convention: str, stage: int, devices: int) -> Breakdown:
    """Return weights, gradients and state by a convention, with the activations of one moment."""
    states = model_states(
        part.parameters,
        convention=convention,
        zero_stage=stage,
        data_parallel=devices,
        largest_layer=part.largest,
    )
    return replace(
        states,
        activations=round(held.activations),
        workspace=states.workspace + round(held.workspace),
    )
