"""A frozen model's hidden states at each token of a text, computed once to train others on them.

Letters: B rows, T tokens, C hidden_size, A tokens kept ahead.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm

from labcore.checks import positive_int
from labcore.models.llama import Llama

__all__ = ["HiddenStates", "hidden_states", "live_states", "rows_of_step"]

_ROWS = 32  # rows of one forward of the backbone
_STORED = torch.bfloat16


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """A text in rows, and the backbone's state at each of its tokens.

    tokens: int64 [rows, T + A]; the last A are only labels. hidden: bf16 [rows, T, C], in memory or
    mapped from a file; None if the backbone reads the rows on demand.
    """

    tokens: Tensor
    hidden: Tensor | None
    ahead: int
    backbone: Llama | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden [B, T, C] and tokens [B, T + A] of some rows; index: int64 [B]."""
        tokens = self.tokens[index]
        if self.hidden is not None:
            return self.hidden[index], tokens
        if self.backbone is None:
            raise ValueError(
                "states must be stored or have a backbone to compute them, got neither"
            )
        return _read(self.backbone, tokens[:, : -self.ahead]), tokens

    def part(self, start: int, stop: int) -> HiddenStates:
        """Return the rows from `start` up to `stop`."""
        hidden = None if self.hidden is None else self.hidden[start:stop]
        return HiddenStates(self.tokens[start:stop], hidden, self.ahead, self.backbone)


def live_states(
    backbone: Llama, tokens: Sequence[int] | Tensor, *, length: int = 256, ahead: int = 5
) -> HiddenStates:
    """Like `hidden_states`, but nothing is stored: the backbone reads each batch on demand."""
    return HiddenStates(_in_rows(tokens, length, ahead), None, ahead, backbone)


def hidden_states(
    backbone: Llama,
    tokens: Sequence[int] | Tensor,
    *,
    length: int = 256,
    ahead: int = 5,
    path: str | Path | None = None,
    progress: bool = False,
) -> HiddenStates:
    """Read a text once with the backbone and keep its states, in bf16.

    tokens: integers [N], which are cut into rows of `length` tokens to read, each a separate
    context; the rest after the last whole row is dropped. Or [rows, length + ahead], texts that are
    rows already. ahead: tokens after a row that are only labels, at least K + 1 for K heads.
    path: a file of 2 * rows * length * C bytes, mapped into memory. If it holds the states of the
    same tokens by the same weights, nothing is computed; an interrupted file is written again.
    Raises ValueError for a text shorter than a row, OSError if the file doesn't fit on the disk;
    `live_states` needs no space.
    """
    rows = _in_rows(tokens, length, ahead)
    size = (len(rows), length, backbone.config.hidden_size)
    if path is None:
        stored = torch.empty(size, dtype=_STORED)
        _fill(stored, backbone, rows, ahead, progress)
        return HiddenStates(rows, stored, ahead)
    path = Path(path)
    told = {"of": _fingerprint(backbone, rows), "size": list(size), "ahead": ahead}
    note = path.with_name(f"{path.name}.json")
    if path.is_file() and note.is_file() and json.loads(note.read_text("utf-8")) == told:
        return HiddenStates(rows, _mapped(path, size), ahead)
    note.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    needed, free = 2 * math.prod(size), shutil.disk_usage(path.parent).free
    if needed > free:
        raise OSError(
            f"the states need {needed:,} bytes for {path.name}, got {free:,} free; use fewer "
            "tokens, another disk, or live_states, which stores nothing"
        )
    stored = _mapped(path, size)
    _fill(stored, backbone, rows, ahead, progress)
    note.write_text(json.dumps(told) + "\n", encoding="utf-8")  # last: marks the file as complete
    return HiddenStates(rows, stored, ahead)


def rows_of_step(step: int, batch: int, rows: int, seed: int) -> Tensor:
    """Return the rows of a step, int64 [batch]: steps go through permutations of all rows."""
    places = torch.arange(step * batch, (step + 1) * batch)
    found = torch.empty(batch, dtype=torch.int64)
    for turn in (places // rows).unique().tolist():
        generator = torch.Generator().manual_seed(seed * 1_000_003 + turn)
        order = torch.randperm(rows, generator=generator)
        here = places // rows == turn
        found[here] = order[places[here] % rows]
    return found


def _in_rows(tokens: Sequence[int] | Tensor, length: int, ahead: int) -> Tensor:
    """Cut integers [N] into int64 [rows, length + ahead]; rows share the label-only tokens.

    Tokens that already have that shape aren't cut.
    """
    positive_int("length", length)
    positive_int("ahead", ahead)
    text = torch.as_tensor(tokens, dtype=torch.int64)
    if text.dim() == 2 and len(text) and text.shape[1] == length + ahead:
        return text
    if text.dim() != 1 or text.numel() < length + ahead:
        raise ValueError(
            f"tokens must be one row of at least {length} + {ahead} tokens, or rows of exactly as "
            f"many, got {tuple(text.shape)}"
        )
    return text.unfold(0, length + ahead, length)


@torch.no_grad()
def _read(backbone: Llama, tokens: Tensor) -> Tensor:
    device = backbone.norm.weight.device
    return backbone(tokens.to(device)).hidden.cpu().to(_STORED)


def _fill(stored: Tensor, backbone: Llama, rows: Tensor, ahead: int, progress: bool) -> None:
    parts = torch.arange(len(rows)).split(_ROWS)
    for index in tqdm(parts, disable=not progress, unit="batch"):
        stored[index[0] : index[-1] + 1] = _read(backbone, rows[index, :-ahead])


def _mapped(path: Path, size: tuple[int, int, int]) -> Tensor:
    return torch.from_file(str(path), shared=True, size=math.prod(size), dtype=_STORED).view(size)


def _fingerprint(backbone: Llama, rows: Tensor) -> str:
    """Return the SHA-256 of the tokens and the backbone's weights."""
    found = hashlib.sha256(rows.contiguous().numpy().tobytes())
    for name, tensor in sorted(backbone.state_dict().items()):
        found.update(name.encode("utf-8"))
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()
