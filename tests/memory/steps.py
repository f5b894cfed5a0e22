"""Small Llamas and a step of training, for what is measured against what is predicted."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from labcore import optim
from labcore.memory import Meter, divide
from labcore.models import Llama, LlamaConfig, next_token_loss

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "lion": optim.Lion,
    "adafactor": optim.Adafactor,
    "sm3": optim.SM3,
    "adamw8bit": optim.AdamW8bit,
}
AWKWARD = {
    "grouped": {
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "tied": {
        "vocab_size": 8,
        "hidden_size": 48,
        "intermediate_size": 112,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "tie_word_embeddings": True,
    },
    "biased": {
        "vocab_size": 700,
        "hidden_size": 64,
        "intermediate_size": 100,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "head_dim": 20,
        "qkv_bias": True,
        "output_bias": True,
    },
}


def config(name: str) -> LlamaConfig:
    return LlamaConfig(**AWKWARD[name])


def drawn(seed: int) -> LlamaConfig:
    """A shape nobody chose: wider MLPs than streams, as every Llama has."""
    chance = random.Random(seed)
    keys = chance.randint(1, 3)
    heads, width = keys * chance.randint(2, 3), chance.randint(24, 70)
    head = 2 * max(2, width // heads // 2)  # as wide together as the stream, but for a rest
    return LlamaConfig(
        vocab_size=chance.randint(5, 400),
        hidden_size=width,
        intermediate_size=chance.randint(2 * width, 4 * width),
        num_hidden_layers=chance.randint(2, 4),
        num_attention_heads=heads,
        num_key_value_heads=keys,
        head_dim=head,
        tie_word_embeddings=chance.random() < 0.3,
        qkv_bias=chance.random() < 0.3,
    )


KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def _policy(_context: object, op: object, *_: object, **__: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class Stretch(nn.Module):
    """Layers that are recomputed as one."""

    def __init__(self, layers: list[nn.Module], selective: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.contexts = {}
        if selective:
            made = functools.partial(create_selective_checkpoint_contexts, _policy)
            self.contexts = {"context_fn": made}

    def _run(self, x: Tensor, step: object) -> Tensor:
        for layer in self.layers:
            x = layer(x, step)
        return x

    def forward(self, x: Tensor, step: object) -> Tensor:
        return checkpoint(self._run, x, step, use_reentrant=False, **self.contexts)


def model(shape: LlamaConfig, dtype: str, checkpointing: int | str | None = None) -> Llama:
    made = Llama(shape).to(torch.float32 if dtype == "mixed" else getattr(torch, dtype))
    if checkpointing is not None:
        selective = checkpointing == "selective"
        every = 1 if selective else checkpointing
        layers = list(made.layers)
        parts = [layers[at : at + every] for at in range(0, len(layers), every)]
        made.layers = nn.ModuleList(Stretch(part, selective) for part in parts)
    return made


def train_step(
    llama: Llama, optimizer: torch.optim.Optimizer, tokens: Tensor, *, mixed: bool = False
) -> None:
    cast = torch.autocast("cpu", dtype=torch.bfloat16) if mixed else contextlib.nullcontext()
    optimizer.zero_grad()
    with cast:
        loss, count = next_token_loss(llama, tokens)
    (loss / count).backward()
    optimizer.step()


def measured(
    shape: LlamaConfig,
    *,
    batch: int,
    length: int,
    dtype: str = "float32",
    optimizer: str = "adamw",
    checkpointing: int | str | None = None,
    zero_stage: int = 0,
    data_parallel: int = 1,
) -> Meter:
    """Two steps: the first one makes the optimizer's state.

    data_parallel: ranks of the process group that is there, 1 without one.
    """
    llama = model(shape, dtype, checkpointing)
    if data_parallel > 1:
        llama, steps = divide(llama, zero_stage, OPTIMIZERS[optimizer])
    else:
        steps = OPTIMIZERS[optimizer](llama.parameters())
    tokens = torch.randint(shape.vocab_size, (batch, length + 1))
    with Meter(llama, steps) as meter:
        for _ in range(2):
            train_step(llama, steps, tokens, mixed=dtype == "mixed")
    return meter


class Adapted(nn.Module):
    """A frozen product and LoRA's two trained factors beside it."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen, kept = frozen, {"bias": False, "dtype": frozen.weight.dtype}
        self.a = nn.Linear(frozen.in_features, rank, **kept)
        self.b = nn.Linear(rank, frozen.out_features, **kept)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.b(self.a(x))


def adapt(llama: Llama, rank: int) -> None:
    """Freeze the model and put adapters beside all matrices of its layers."""
    llama.requires_grad_(False)
    for name, module in list(llama.layers.named_modules()):
        if isinstance(module, nn.Linear):
            owner, _, own = name.rpartition(".")
            setattr(llama.layers.get_submodule(owner), own, Adapted(module, rank))
