"""The two shipped models, their tokenizer and cards, and the texts to evaluate them.

The files are in `files/` next to this module. Held-out texts and prompts were written for this
course, after the corpus. These files are never edited; a new text gets a new number in its name.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
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
    "card_table",
    "held_out",
    "held_out_sha256",
    "pretrained",
    "prompts",
    "read_card",
    "shipped_tokenizer",
    "write_card",
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
    """Load a shipped model in evaluation mode, with its weights on the CPU.

    name: "target" (about 5 M parameters) or "draft" (about 0.5 M). Both have the same tokenizer and
    corpus.
    dtype: dtype of the weights. They are stored in bfloat16, so fp32 computes with rounded weights.
    Raises ValueError for an unknown name, and FileNotFoundError if the installation lacks the
    weights.
    """
    return from_pretrained(_folder(name), dtype=dtype)


def shipped_tokenizer() -> Tokenizer:
    """Load both shipped models' tokenizer: byte-level BPE, 2,048 tokens, token 0 ends a text."""
    return Tokenizer.from_pretrained(FILES / "tokenizer.json")


def card(name: str) -> dict[str, Any]:
    """Return a shipped model's card: its data, training, held-out bits per byte and license.

    README.md in the model's folder has the same content. Raises the same errors as `pretrained`.
    """
    return read_card(_folder(name))


def read_card(folder: Path) -> dict[str, Any]:
    """Return the card in a folder of shipped files."""
    told: dict[str, Any] = json.loads((folder / "card.json").read_text("utf-8"))
    return told


def write_card(folder: Path, told: Mapping[str, Any], text: str) -> None:
    """Write a card as card.json, and as the text of README.md."""
    (folder / "card.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(text, encoding="utf-8")


def card_table(told: Mapping[str, Any], what: str = "what", value: str = "value") -> str:
    """Return keys and values as a Markdown table with two columns."""
    rows = [f"| {key} | {one} |" for key, one in told.items()]
    return "\n".join([f"| {what} | {value} |", "|---|---|", *rows])


def held_out(kind: str) -> str:
    """Return text that no shipped model has seen, written for this course: "code" or "prose".

    "code" is several Python modules, one after another. Raises ValueError for another kind.
    """
    return _held_out_bytes(kind).decode("utf-8")


def held_out_sha256(kind: str) -> str:
    """Return the SHA-256 of a held-out text's bytes in hexadecimal, as in the models' cards."""
    return hashlib.sha256(_held_out_bytes(kind)).hexdigest()


def prompts(kind: str) -> list[str]:
    """Return prompts to continue, written for this course.

    kind: "code" for beginnings of functions and classes; "long_code" for modules of 512 or more
    tokens that stop amid code similar to what precedes it; "prose"; or "copy" for texts followed by
    the start of a repetition with small changes. Raises ValueError for another kind.
    """
    file = FILES / "prompts" / PROMPTS[one_of("kind of prompts", kind, PROMPTS)]
    texts: list[str] = json.loads(file.read_text("utf-8"))
    return texts


@torch.inference_mode()
def bits_per_byte(
    model: Llama, text: str, tokenizer: Tokenizer, *, context: int | None = None
) -> float:
    """Return the model's bits for a text, divided by the text's bytes in UTF-8.

    Bits per byte make models with different tokenizers comparable. The text follows the model's bos
    token, and each of its tokens is predicted once. Windows are as long as the model's
    `max_position_embeddings`. The first window predicts all of its tokens. Each later window
    restarts at position 0 and predicts only tokens with at least `context` tokens before them in
    the window.
    context: None means a quarter of the window.
    Raises ValueError for an empty text, a model without a bos token, or a context that leaves a
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
        raise ValueError("text must not be empty, got no tokens to predict")
    row = row.to(model.embed_tokens.weight.device)
    nats, done = 0.0, 1  # the bos token is given
    while done < len(row):
        start = max(done - max(context, 1), 0)
        window = row[start : start + longest + 1]
        nats += float(_nats(model, window)[done - start - 1 :].sum())
        done = start + len(window)
    return nats / math.log(2) / len(text.encode("utf-8"))


def _nats(model: Llama, tokens: Tensor) -> Tensor:
    """Return the cross entropy of each of tokens [T] except the first, in fp64: [T - 1]."""
    logits = model(tokens[None, :-1]).logits[0].float()
    return F.cross_entropy(logits, tokens[1:], reduction="none").double()


def _folder(name: str) -> Path:
    folder = FILES / one_of("shipped model", name, NAMES)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"this installation has no weights for {name!r}; `python -m labcore.models.ship "
            f"{name} --out FOLDER --commit COMMIT` creates FOLDER/{name}, to be moved to {FILES}"
        )
    return folder


def _held_out_bytes(kind: str) -> bytes:
    name = HELD_OUT[one_of("kind of held-out text", kind, HELD_OUT)]
    return (FILES / "held_out" / name).read_bytes()
