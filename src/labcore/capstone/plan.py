"""What to train in a number of minutes: a stated rule for the model, the batch and the steps.

The rule. A training step costs 6 FLOPs per weight and token (forward 2, backward 4), and a model
should read 20 tokens per weight. So with C FLOPs to spend, it has about sqrt(C / 120) weights.
Source: Hoffmann et al., 2022, arXiv 2203.15556 ("Chinchilla").
"""

from __future__ import annotations

import functools
import math
import time
from dataclasses import dataclass, replace

import torch
from torch import nn

from labcore.checks import one_of, positive, positive_int
from labcore.device import default_device
from labcore.memory import Breakdown, Meter, estimate, set_checkpointing
from labcore.memory.accounting.stepping import buffer_bytes
from labcore.models import Llama, LlamaConfig, train, windows
from labcore.models.recipes import END_OF_TEXT_ID, VOCABULARY
from labcore.models.training import Batches
from labcore.optim import AdamW, Lion
from labcore.timing import measure

__all__ = [
    "WIDTHS",
    "Choices",
    "Plan",
    "batch_for",
    "held",
    "levers",
    "make_plan",
    "model_of",
    "optimizer_of",
    "predicted",
    "shape",
    "sized",
    "step_seconds",
]

TOKENS_PER_WEIGHT, FLOPS = 20, 6  # FLOPs per weight and token
DRAFT, DRAFT_SECONDS = 0.25, 120.0  # for the draft: this share of the time, at most so many seconds
LENGTH, ROWS = 256, 4  # of one forward
FEWEST_STEPS = 2_000  # small batches teach a small model more per token
TRIED = 4  # forwards per measurement of the speed
BATCHES = (1, 2, 4, 8, 16, 32)  # forwards per step
WIDTHS = (32, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024)
LION = 0.2  # Lion's rate over AdamW's


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """How to train.

    optimizer: "AdamW" or "Lion". eps: AdamW's. clip: the largest global norm of a step's
    gradients; None for no limit. shuffle: draw rows at random; if not, read the text in order.
    spike: plant some steps of noise in the data. seed: of the weights and the rows.
    Raises TypeError or ValueError that names the field.
    """

    optimizer: str = "AdamW"
    eps: float = 1e-8
    clip: float | None = 1.0
    shuffle: bool = True
    spike: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        one_of("optimizer", self.optimizer, ("AdamW", "Lion"))
        positive("eps", self.eps)
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be from 0 to 2**32 - 1, got {self.seed}")
        if self.clip is not None:
            positive("clip", self.clip)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to train, and for how long.

    config: the model. rows, length: of one forward. accumulate: forwards per step. checkpointing:
    as in `memory.set_checkpointing`. steps: optimizer steps. rate: AdamW's peak learning rate.
    seconds: what a step took when it was tried. draft_seconds: for training the draft.
    """

    config: LlamaConfig
    rows: int = ROWS
    length: int = LENGTH
    accumulate: int = 1
    checkpointing: int | None = None
    steps: int = 1
    rate: float = 1e-3
    seconds: float = 0.0
    draft_seconds: float = 0.0

    @property
    def weights(self) -> int:
        """The model's weights; the tied embedding counts once."""
        return sum(_sizes(self.config))

    @property
    def tokens(self) -> int:
        """The tokens that training predicts."""
        return self.steps * self.accumulate * self.rows * self.length

    def schedule(self, step: int) -> float:
        """Return the learning rate's factor at a step: up for a tenth, then down to nearly 0."""
        warmup = max(1, self.steps // 10)
        return min((step + 1) / warmup, (self.steps - step) / (self.steps - warmup + 1))


def shape(width: int) -> LlamaConfig:
    """Return a Llama of a width: layers of heads of 32, one for each 32, two heads to a key."""
    heads = width // 32
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=32 * math.ceil(width / 12),
        num_hidden_layers=max(2, heads),
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        initializer_range=width**-0.5,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_ids=(END_OF_TEXT_ID,),
    )


def make_plan(seconds: float, choices: Choices, *, memory: int | None = None) -> Plan:
    """Try training steps on this machine, and plan for the seconds by the module's rule.

    seconds: for planning, training and the draft. memory: bytes that training may hold; None for no
    limit. Levers that leave the training as it is bring it there: fewer rows per forward with more
    forwards per step, then recomputed activations.
    Raises ValueError unless seconds is above 0, and for a budget that no lever reaches, with the
    least that they reach.
    """
    began = time.perf_counter()
    draft_seconds = min(DRAFT * positive("seconds", seconds), DRAFT_SECONDS)
    training = seconds - draft_seconds
    plan = Plan(config=shape(WIDTHS[1]))
    for _ in range(2):  # the speed depends on the size
        once = step_seconds(replace(plan, accumulate=1), choices)
        plan = sized(FLOPS * plan.weights * ROWS * LENGTH / once * training)
    if memory is not None:
        plan = _within(plan, choices, positive_int("memory", memory))
    once = plan.accumulate * step_seconds(replace(plan, accumulate=1), choices)
    left = max(training - (time.perf_counter() - began), training / 2)
    return replace(
        plan,
        steps=max(1, int(left / once)),
        rate=0.5 / plan.config.hidden_size,
        seconds=once,
        draft_seconds=draft_seconds,
    )


def sized(flops: float) -> Plan:
    """Return the model and the batch that the module's rule has for so many FLOPs of training."""
    wanted = math.sqrt(flops / (FLOPS * TOKENS_PER_WEIGHT))
    plans = [Plan(config=shape(width)) for width in WIDTHS]
    plan = min(plans, key=lambda one: abs(math.log(one.weights / wanted)))
    return replace(plan, accumulate=batch_for(flops / (FLOPS * plan.weights)))


def batch_for(tokens: float) -> int:
    """Return the forwards per step: the largest power of two up to 32 that leaves FEWEST_STEPS."""
    fitting = [one for one in BATCHES if one * ROWS * LENGTH * FEWEST_STEPS <= tokens]
    return max(fitting, default=1)


def model_of(plan: Plan, choices: Choices) -> Llama:
    """Return a new model, whose weights depend on the seed alone."""
    model = Llama(plan.config, generator=torch.Generator().manual_seed(choices.seed))
    set_checkpointing(model.to(default_device()), plan.checkpointing)
    return model


def optimizer_of(model: nn.Module, plan: Plan, choices: Choices) -> torch.optim.Optimizer:
    """Return the optimizer, with decay for matrices alone."""
    groups = [
        {"params": [one for one in model.parameters() if one.dim() == 2], "weight_decay": 0.1},
        {"params": [one for one in model.parameters() if one.dim() < 2], "weight_decay": 0.0},
    ]
    if choices.optimizer == "Lion":
        return Lion(groups, lr=LION * plan.rate)
    return AdamW(groups, lr=plan.rate, betas=(0.9, 0.95), eps=choices.eps)


def predicted(plan: Plan, choices: Choices) -> Breakdown:
    """Return the bytes that training should hold at its peak."""
    gpu = default_device().type != "cpu"
    found = estimate(
        plan.config,
        batch=plan.rows * plan.accumulate,
        length=plan.length,
        parts=plan.accumulate,
        checkpointing=plan.checkpointing,
        optimizer=choices.optimizer.lower(),
        fused=choices.optimizer == "AdamW",
        device="gpu" if gpu else "cpu",
    )
    if choices.optimizer == "Lion":
        return found
    # The estimate is of torch's AdamW. Ours keeps the same buffers as our Lion.
    buffers = buffer_bytes("lion", _sizes(plan.config), torch.float32.itemsize, gpu=gpu)
    return replace(found, workspace=found.workspace + buffers)


def held(plan: Plan, choices: Choices) -> Breakdown:
    """Return the bytes that two steps of the plan held at their peak, on random tokens."""
    model = model_of(plan, choices)
    optimizer = optimizer_of(model, plan, choices)
    parts = min(plan.accumulate, 2)  # from the second on, all are alike
    with Meter(model, optimizer) as meter:
        train(model, _noise(plan), optimizer, steps=2, accumulate=parts, progress=False)
    return meter.peak


@functools.cache
def _sizes(config: LlamaConfig) -> list[int]:
    return [one.numel() for one in Llama(config, device="meta").parameters()]


def _noise(plan: Plan) -> Batches:
    tokens = torch.randint(plan.config.vocab_size, (4 * plan.length,))
    return windows(tokens, batch=plan.rows, length=plan.length)


def step_seconds(plan: Plan, choices: Choices) -> float:
    """Return the median time of a training step on this machine, on random tokens."""
    model = model_of(plan, choices)
    optimizer = optimizer_of(model, plan, choices)
    steps = max(1, TRIED // plan.accumulate)

    def some_steps() -> None:
        parts = plan.accumulate
        train(model, _noise(plan), optimizer, steps=steps, accumulate=parts, progress=False)

    return measure(some_steps, repeats=5, warmup=1).p50 / steps


def levers(plan: Plan) -> list[Plan]:
    """Return plans of the same training in ever less memory, beginning with the plan itself.

    First fewer rows per forward with more forwards per step, then also recomputed activations.
    """
    fewer = [
        replace(plan, rows=plan.rows >> n, accumulate=plan.accumulate << n)
        for n in range(plan.rows.bit_length())
    ]
    return [*fewer, replace(fewer[-1], checkpointing=1)]


def _within(plan: Plan, choices: Choices, most: int) -> Plan:
    """Return the plan with the first levers that bring the prediction to at most `most` bytes."""
    tried = levers(plan)
    sizes = [predicted(one, choices).total for one in tried]
    if min(sizes) > most:
        raise ValueError(
            f"memory must be at least {min(sizes) / 2**20:.1f} MiB for this model, got "
            f"{most / 2**20:.1f} MiB; allow more, or pass fewer minutes for a smaller model"
        )
    return next(one for one, size in zip(tried, sizes, strict=True) if size <= most)
