"""Predicts how many bytes a training step will hold, from the model's shape alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from labcore.checks import non_negative, one_of, positive_int
from labcore.memory.accounting import points
from labcore.memory.accounting.breakdown import Breakdown
from labcore.memory.accounting.part import Part
from labcore.memory.accounting.points import Held
from labcore.memory.accounting.states import CONVENTIONS, STAGES, model_states
from labcore.models.config import LlamaConfig

__all__ = ["DTYPES", "MOMENTS", "OPTIMIZERS", "Scene", "Settings", "estimate", "film"]

DTYPES = ("float32", "bfloat16", "float16", "mixed")
MOMENTS = ("forward", "backward", "step")
OPTIMIZERS = ("adamw", "sgd", "lion", "adafactor", "sm3", "adamw8bit")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a step trains; the options of `estimate` and `film`.

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
    parts: of the batch's rows, run one after another (gradient accumulation); from the second on,
    all gradients exist.
    fused: whether the optimizer's step is one kernel that keeps no temporaries, as torch's
    `fused=True`, which AdamW and SGD have also on a CPU.
    chunk: tokens whose logits `linear_cross_entropy` has at a time; None for all logits at once.
    offload: keep the optimizer state in main memory, where the CPU steps. Gradients leave the GPU
    with their layer's backward, as in ZeRO-Offload; a tied head's wait for the embedding's. Weights
    stay.
    rank: of LoRA's adapters beside each matrix of the layers, which alone are trained; 0 trains all
    weights. A first layer keeps less than the others then, which isn't counted.
    bits: with a rank, bits per weight of the layers' matrices with their scales, if they are stored
    as codes and dequantized one at a time (QLoRA); 0 keeps them in their dtype.
    device: "cpu" matches measurements by `Meter`; "gpu" follows torch's sources. There, flash
    attention doesn't copy its output, and the default implementation of an optimizer step (foreach)
    works on all weights at once, so AdamW's holds one more copy of them.
    Raises ValueError or TypeError for settings that are invalid or don't fit together.
    Sources: Rajbhandari et al., 2019, arXiv 1910.02054 (stages, 16 bytes); Korthikanti et al.,
    2022, arXiv 2205.05198 (what tensor and pipeline parallelism divide); Ren et al., 2021, arXiv
    2101.06840 (offload).
    """

    batch: int
    length: int
    dtype: str = "float32"
    optimizer: str = "adamw"
    checkpointing: int | str | None = None
    zero_stage: int = 0
    data_parallel: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    convention: str = "exact"
    parts: int = 1
    fused: bool = False
    chunk: int | None = None
    offload: bool = False
    rank: int = 0
    bits: float = 0.0
    device: str = "cpu"

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, DTYPES)
        one_of("optimizer", self.optimizer, OPTIMIZERS)
        one_of("device", self.device, ("cpu", "gpu"))
        one_of("zero_stage", self.zero_stage, STAGES)
        one_of("convention", self.convention, ("exact", *CONVENTIONS))
        if self.checkpointing is not None and self.checkpointing != "selective":
            positive_int("checkpointing", self.checkpointing, "or None, or 'selective'")  # type: ignore[arg-type]
        sizes = ("batch", "length", "data_parallel", "tensor_parallel", "pipeline_parallel")
        for name in (*sizes, "parts", *(["chunk"] if self.chunk is not None else [])):
            positive_int(name, getattr(self, name))
        if self.parts > self.batch:
            raise ValueError(
                f"parts must be at most the {self.batch} rows, got {self.parts}; pass fewer"
            )
        split = max(self.tensor_parallel, self.pipeline_parallel) > 1
        if self.rank and (split or self.convention != "exact"):
            raise ValueError(
                f"rank={self.rank} is counted without tensor and pipeline parallelism and by "
                "convention='exact'; leave these out"
            )
        non_negative("rank", self.rank, "pass a whole number")
        if self.bits and not self.rank:
            raise ValueError(
                f"bits={self.bits} stores frozen weights as codes, which needs a rank above 0, got "
                f"rank={self.rank}; pass the rank of the adapters"
            )
        non_negative("bits", self.bits)
        narrow = self.dtype in ("bfloat16", "float16")
        if self.convention != "exact" and (self.optimizer != "adamw" or not narrow):
            raise ValueError(
                f"convention={self.convention!r} counts AdamW in a 16-bit dtype, got optimizer="
                f"{self.optimizer!r} and dtype={self.dtype!r}; pass dtype='bfloat16' and "
                "optimizer='adamw'"
            )

    def ends(self, config: LlamaConfig) -> list[Part]:
        """Return the devices' parts among which is the fullest: the first and the last stage."""
        stages = self.pipeline_parallel
        if stages > config.num_hidden_layers:
            raise ValueError(
                f"pipeline_parallel must be at most the number of layers, "
                f"{config.num_hidden_layers}, got {stages}; each stage needs at least one layer"
            )
        fewest, more = divmod(config.num_hidden_layers, stages)
        return [
            Part(
                config=config,
                batch=-(-self.batch // self.parts),
                length=self.length,
                dtype=self.dtype,
                optimizer=self.optimizer,
                checkpointing=self.checkpointing,
                shares=self.tensor_parallel,
                layers=fewest + (stage < more),
                embedding=stage == 0,
                head=stage == stages - 1,
                in_flight=stages - stage,
                gpu=self.device == "gpu",
                earlier=stages > 1 or self.parts > 1,
                fused=self.fused,
                chunk=self.chunk,
                offload=self.offload,
                rank=self.rank,
                bits=self.bits,
            )
            for stage in sorted({0, stages - 1})
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """What one device holds at one point of a step.

    moment: one of MOMENTS, or "end". place: what runs. layer: its number from 1, 0 outside layers.
    """

    moment: str
    place: str
    layer: int
    held: Breakdown

    @property
    def name(self) -> str:
        """Where this is, such as "backward, layer 3: MLP"."""
        if not self.layer:
            return self.moment if self.moment in ("step", "end") else f"{self.moment}, {self.place}"
        within = "" if self.place == "layer" else f": {self.place}"
        return f"{self.moment}, layer {self.layer}{within}"


def estimate(config: LlamaConfig, *, moment: str = "peak", **settings: Any) -> Breakdown:
    """Return the bytes on the fullest device at the peak of a training step of `Llama(config)`.

    A step is `zero_grad()`, `next_token_loss`, backward, `step()`. Gradients are created in the
    backward, so a peak at its start has none; `moment="step"` shows them all. `film` returns the
    whole step.
    moment: "peak", or the highest point of one of MOMENTS.
    settings: those of `Settings`; batch and length are required.
    Raises ValueError or TypeError for settings that are invalid or don't fit together.
    """
    one_of("moment", moment, ("peak", *MOMENTS))
    told = Settings(**settings)
    found = (
        scene.held
        for part in told.ends(config)
        for scene in _scenes(part, told, whole=False)
        if scene.moment == moment or (moment == "peak" and scene.moment != "end")
    )
    return max(found, key=lambda held: held.total)


def film(config: LlamaConfig, **settings: Any) -> list[Scene]:
    """Return what the fullest device holds along a training step of `Llama(config)`, in order.

    The highest scene is `estimate(config, **settings)`. Between two scenes a device holds less than
    at the higher of them. The last scene, "end", is what stands when the step is over: weights,
    optimizer state and the batch. Of a pipeline, it shows the micro-batch before which most wait.
    settings: those of `Settings`; batch and length are required. Raises as `estimate` does.
    """
    told = Settings(**settings)
    films = [list(_scenes(part, told, whole=True)) for part in told.ends(config)]
    return max(films, key=lambda scenes: max(scene.held.total for scene in scenes))


def _scenes(part: Part, told: Settings, *, whole: bool) -> Iterator[Scene]:
    """Yield the scenes of one device's step, of all layers or of those that may hold most."""
    end = Held(place="", activations=part.ids)
    moments = {
        "forward": points.forward(part, whole),
        "backward": points.backward(part, whole),
        "step": points.step(part),
        "end": iter([end]),
    }
    stage, devices = told.zero_stage, told.data_parallel
    for moment, run in moments.items():
        rests = moment in ("step", "end")
        # The activations of micro-batches that ran ahead wait for their backward.
        waiting = 0 if rests else (part.in_flight - 1) * part.kept
        # On a CPU, stage 1 still steps whole parameters, one at a time.
        divided = rests and (stage >= 2 or (stage == 1 and part.gpu))
        for point in run:
            held = replace(
                point,
                activations=point.activations + waiting,
                workspace=point.workspace / (devices if divided else 1),
            )
            if told.convention == "exact":
                found = _exact(part, held, moment, stage, devices)
            else:
                found = _counted(part, held, told.convention, stage, devices)
            yield Scene(moment=moment, place=point.place, layer=point.layer, held=found)


def _exact(part: Part, held: Held, moment: str, stage: int, devices: int) -> Breakdown:
    """Return what torch holds at one moment, sharded as the stage says.

    DistributedDataParallel (stages 0 and 1) reserves room for all gradients from its first step.
    FSDP2's units are the layers, plus one for everything else, which stays gathered until the end
    of the backward. With offload, only gradients of the layer at work are here.
    """
    weights, gradients, state = float(part.weights), held.gradients, float(part.state)
    workspace = held.workspace
    if part.offload:
        gradients -= held.sent
    elif part.earlier or (stage < 2 and devices > 1):
        gradients = part.trained
    if stage >= 1:
        state /= devices
    if stage >= 2 and moment in ("step", "end"):
        weights, gradients = weights / devices, gradients / devices
    elif stage >= 2:
        ahead = part.layers - held.done
        reduced = held.sent if part.offload else held.done * part.gradients()
        workspace += held.gradients - reduced  # a unit's are whole until they're reduced
        kept = part.trained if part.earlier else reduced
        gradients = 0 if part.offload else kept / devices
        outer = part.weights - part.layers * part.unit
        reached = part.layers if held.reached is None else held.reached
        gathered = min(ahead, reached if stage == 2 else held.gathered)
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
        workspace=round(workspace + part.buffers),
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
