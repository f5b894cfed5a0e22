"""Train a Llama of a million weights on the source code of the running Python.

The learning rate has a linear warmup over a tenth of the steps and a linear decay to
zero. Gradients are clipped to a global norm of 1. A seed determines the initial weights and the
windows of text in their order, whatever the optimizer and the batch size, so runs of equal seed are
pairs. Settings are chosen on files ("tune") that no reported run reads.
"""

from __future__ import annotations

import functools
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from labcore.checks import one_of, positive_int
from labcore.clipping import clip_by_global_norm
from labcore.data import python_sources
from labcore.device import default_device
from labcore.models import Llama, LlamaConfig, shipped_tokenizer
from labcore.models.recipes import VOCABULARY, tokens_of
from labcore.models.training import Batches, Clip, Curve, Loss, next_token_loss, train, windows
from labcore.optim import AdamW, Lion

__all__ = [
    "BATCHES",
    "CONFIG",
    "LENGTH",
    "OPTIMIZERS",
    "ROWS",
    "TEXTS",
    "TOKENS",
    "LanguageRun",
    "clip_to",
    "held_out_loss",
    "language_model",
    "text",
    "train_language",
    "warmup_and_decay",
]

LENGTH, ROWS = 128, 16  # one forward pass has ROWS rows of LENGTH tokens
TOKENS = 3 * 2**18
BATCHES = (2_048, 8_192, 32_768)  # tokens per optimizer step
HELD_OUT_ROWS = 512
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=LENGTH,
    tie_word_embeddings=True,
    initializer_range=128**-0.5,
)
# Each text, and the part of the corpus that its files come from.
TEXTS = {"tune": "train", "report": "train", "tune, held out": "held_out", "held out": "held_out"}
TUNED_ON = 4  # every fourth file is for tuning

Make = Callable[..., torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LanguageRun:
    """One training run.

    loss: mean loss on held-out files after the last step, in nats per token. curve: every step.
    seconds: wall time of the training.
    """

    loss: float
    curve: Curve
    seconds: float


@functools.cache
def text(name: str, *, max_files: int | None = None) -> Tensor:
    """Return the tokens of a text of TEXTS, int64 [N]: whole source files of the standard library.

    max_files: read only the first files, for short runs; reading all takes about 20 s.
    """
    one_of("name", name, TEXTS)
    files = python_sources(TEXTS[name]).files
    tuning = name.startswith("tune")
    chosen = [file for n, file in enumerate(files) if (n % TUNED_ON == 0) == tuning][:max_files]
    library = Path(sysconfig.get_paths()["stdlib"])
    read = [(library / file).read_text(encoding="utf-8", errors="replace") for file in chosen]
    return tokens_of(read, shipped_tokenizer())


def language_model(seed: int, config: LlamaConfig = CONFIG) -> Llama:
    """Return a new fp32 model whose weights depend on `seed` alone."""
    return Llama(config, generator=torch.Generator().manual_seed(seed)).to(default_device())


def warmup_and_decay(step: int, steps: int) -> float:
    """Return the learning rate's factor at a step, counted from 0: up for a tenth, then down."""
    warmup = max(1, steps // 10)
    return min((step + 1) / warmup, (steps - step) / (steps - warmup + 1))


def _groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Return the matrices with decay, and the norms' weights without, as is usual."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [
        {"params": matrices, "weight_decay": decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


class _MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the hidden matrices, and AdamW for the embedding and the norms, at one rate.

    Muon's updates are scaled to AdamW's usual size (Liu et al., 2025, arXiv 2502.16982).
    """

    def __init__(self, model: Llama, *, lr: float, decay: float) -> None:
        hidden = [p for p in model.layers.parameters() if p.dim() == 2]
        groups = [
            {**group, "params": [p for p in group["params"] if all(p is not q for q in hidden)]}
            for group in _groups(model, decay)
        ]
        self.parts = (
            torch.optim.Muon(hidden, lr=lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
            AdamW(groups, lr=lr, betas=(0.9, 0.95)),
        )
        super().__init__([{"params": hidden}], {})
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step(closure)


def _adamw(model: Llama, *, lr: float, decay: float, **options: Any) -> torch.optim.Optimizer:
    return AdamW(_groups(model, decay), lr=lr, **{"betas": (0.9, 0.95), **options})


def _lion(model: Llama, *, lr: float, decay: float, **options: Any) -> torch.optim.Optimizer:
    return Lion(_groups(model, decay), lr=lr, **options)


# AdamW's betas are Llama 2's (Touvron et al., 2023, arXiv 2307.09288).
OPTIMIZERS: dict[str, Make] = {
    "AdamW": _adamw,
    "Lion": functools.partial(_lion, betas=(0.9, 0.99)),
    "Lion 0.95/0.98": functools.partial(_lion, betas=(0.95, 0.98)),
    "Lion 0.95/0.95": functools.partial(_lion, betas=(0.95, 0.95)),
    "Muon": _MuonAndAdamW,
}


@torch.no_grad()
def held_out_loss(model: Llama, tokens: Tensor, rows: int = HELD_OUT_ROWS) -> float:
    """Return the nats per token over `rows` fixed windows of `tokens`, int64 [N]."""
    total, count, take = 0.0, 0, windows(tokens, batch=ROWS, length=LENGTH, seed=1)
    for n in range(rows // ROWS):
        loss, predicted = next_token_loss(model, take(n)[0].to(model.embed_tokens.weight.device))
        total, count = total + loss.item(), count + predicted
    return total / count


def clip_to(max_norm: float) -> Clip:
    """Return a hook that clips the global norm of the gradients and returns what it was."""
    return lambda parameters: clip_by_global_norm(parameters, max_norm).norm


def train_language(
    make: Callable[[Llama], torch.optim.Optimizer],
    *,
    batch: int,
    seed: int,
    tokens: int = TOKENS,
    tuning: bool = False,
    batches: Batches | None = None,
    loss: Loss = next_token_loss,
    clip: Clip | None = None,
    model: Llama | None = None,
    max_files: int | None = None,
) -> LanguageRun:
    """Train one model on `tokens` tokens in batches of `batch`, and judge it on held-out files.

    make: builds the optimizer from the model; see OPTIMIZERS. tuning: read the files for tuning.
    batches: a function from a number to 16 rows, in place of random windows. loss: see `train`.
    clip: the default clips to a global norm of 1. model: in place of a new one drawn from `seed`.
    One core needs about three minutes for TOKENS.
    """
    read, judged = ("tune", "tune, held out") if tuning else ("report", "held out")
    step_rows, rest = divmod(positive_int("batch", batch), LENGTH)
    if rest or step_rows % ROWS:
        raise ValueError(f"batch must be a multiple of {ROWS * LENGTH} tokens, got {batch}")
    steps = positive_int("tokens", tokens) // batch
    model = language_model(seed) if model is None else model
    if batches is None:
        batches = windows(text(read, max_files=max_files), batch=ROWS, length=LENGTH, seed=seed)
    start = time.perf_counter()
    curve = train(
        model,
        batches,
        make(model),
        steps=steps,
        accumulate=step_rows // ROWS,
        loss=loss,
        clip=clip or clip_to(1.0),
        schedule=lambda step: warmup_and_decay(step, steps),
        progress=False,
    )
    seconds = time.perf_counter() - start
    judged_on = text(judged, max_files=max_files)
    return LanguageRun(loss=held_out_loss(model, judged_on), curve=curve, seconds=seconds)
