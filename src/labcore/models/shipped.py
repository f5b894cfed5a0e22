"""The two shipped models, their tokenizer, and the texts that were written to measure them.

`files/` beside this module holds them. Held-out texts and prompts were written for this course
after the corpus; a file of them is never edited: a new text gets a new number in its name.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from labcore.checks import one_of
from labcore.models.checkpoint import from_pretrained
from labcore.models.llama import Llama
from labcore.models.tokenizer import Tokenizer

__all__ = [
    "bits_per_byte",
    "card",
    "held_out",
    "held_out_sha256",
    "pretrained",
    "prompts",
    "shipped_tokenizer",
]

FILES = Path(__file__).parent / "files"
NAMES = ("target", "draft")
HELD_OUT = {"code": "code-1.txt", "prose": "prose-1.txt"}
PROMPTS = {
    "code": "code-1.json",
    "long_code": "long_code-1.json",
    "prose": "prose-1.json",
    "copy": "copy-1.json",
}


def pretrained(name: str, *, dtype: torch.dtype = torch.float32) -> Llama:
    """A shipped model, in evaluation mode, its weights on the CPU.

    name: "target", about 5 M parameters, or "draft", about 0.5 M: one tokenizer, one corpus.
    dtype: of the weights; they are stored in bfloat16, so fp32 computes with rounded weights.
    Raises ValueError that lists the names for any other; FileNotFoundError for an installation
    without the weights.
    """
    return from_pretrained(_folder(name), dtype=dtype)


def shipped_tokenizer() -> Tokenizer:
    """The tokenizer of both shipped models: bytes joined to 2,048 tokens, 0 ends a text."""
    return Tokenizer.from_pretrained(FILES / "tokenizer.json")


def card(name: str) -> dict[str, Any]:
    """What is known of a shipped model: its data, training, held-out bits per byte, licence.

    The same stands as text in README.md of the model's folder. Raises as `pretrained` does.
    """
    told: dict[str, Any] = json.loads((_folder(name) / "card.json").read_text("utf-8"))
    return told


def held_out(kind: str) -> str:
    """Text that no shipped model has seen, written for this course: "code" or "prose".

    "code" is Python, several modules one behind the other. Raises ValueError for another kind.
    """
    return _held_out_bytes(kind).decode("utf-8")


def held_out_sha256(kind: str) -> str:
    """SHA-256 of a held-out text's bytes, in hexadecimal: the one in the models' cards."""
    return hashlib.sha256(_held_out_bytes(kind)).hexdigest()


def prompts(kind: str) -> list[str]:
    """Beginnings to go on from, written for this course.

    kind: "code", functions and classes about to be written; "long_code", modules of 512 tokens or
    more that end amid code like what stands above; "prose"; "copy", texts to repeat with small
    changes, the repetition begun. Raises ValueError that lists the kinds for any other.
    """
    file = FILES / "prompts" / PROMPTS[one_of("kind of prompts", kind, PROMPTS)]
    texts: list[str] = json.loads(file.read_text("utf-8"))
    return texts


@torch.inference_mode()
def bits_per_byte(
    model: Llama, text: str, tokenizer: Tokenizer, *, context: int | None = None
) -> float:
    """Bits that the model needs for a text, divided by the text's bytes in UTF-8.

    The text stands behind the model's bos token and each of its tokens is predicted once. Windows
    are as long as the model's `max_position_embeddings`. The first predicts all of its tokens; each
    other one starts over at position 0 and predicts only those that have at least `context` tokens
    before them in the window. So models with different tokenizers can be compared.
    context: None is a quarter of the window.
    Raises ValueError for an empty text, a model without a bos token, and a context that leaves a
    window nothing to predict.
    """
    config = model.config
    longest = config.max_position_embeddings
    if config.bos_token_id is None:
        raise ValueError("model must have a bos token to predict the first token from, got None")
    if context is None:
        context = longest // 4
    if not 0 <= context < longest:
        raise ValueError(f"context must be 0 to {longest - 1} for this model, got {context}")
    row = torch.tensor([config.bos_token_id, *tokenizer.encode(text)])
    if len(row) < 2:
        raise ValueError("text must not be empty: there is nothing to predict")
    row = row.to(model.embed_tokens.weight.device)
    nats, done = 0.0, 1  # the bos token is given
    while done < len(row):
        start = max(done - max(context, 1), 0)
        window = row[start : start + longest + 1]
        nats += float(_nats(model, window)[done - start - 1 :].sum())
        done = start + len(window)
    return nats / math.log(2) / len(text.encode("utf-8"))


def _nats(model: Llama, tokens: Tensor) -> Tensor:
    """Cross entropy of each token but the first, from those before it: [T] to fp64 [T - 1]."""
    logits = model(tokens[None, :-1]).logits[0].float()
    return F.cross_entropy(logits, tokens[1:], reduction="none").double()


def _folder(name: str) -> Path:
    folder = FILES / one_of("shipped model", name, NAMES)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"this installation holds no weights of {name!r}; `python -m labcore.models.ship "
            f"{name} --out FOLDER --commit COMMIT` makes FOLDER/{name}, which belongs into {FILES}"
        )
    return folder


def _held_out_bytes(kind: str) -> bytes:
    name = HELD_OUT[one_of("kind of held-out text", kind, HELD_OUT)]
    return (FILES / "held_out" / name).read_bytes()
