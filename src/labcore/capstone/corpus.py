"""The text that a reader's model learns: Python's own, a package's, or a folder of one's own."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from labcore.data import hold_out, read_files
from labcore.models import Tokenizer, shipped_tokenizer
from labcore.models.recipes import END_OF_TEXT_ID, learn_tokenizer

__all__ = ["Corpus", "read_text"]

LEARNED = 2_000_000  # characters that a tokenizer is learned from
JUDGED, STRETCH = 40, 500  # a model is judged on so many stretches of so many held-out tokens


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Corpus:
    """Whole files as tokens.

    name: where it comes from. tokenizer: learned from the text, or the shipped one for Python.
    train, held_out: int64 [N], each file followed by end of text. files: the names of those in
    `train`. starts: where each begins, int64 [files].
    """

    name: str
    tokenizer: Tokenizer = field(repr=False)
    train: Tensor = field(repr=False)
    held_out: Tensor = field(repr=False)
    files: tuple[str, ...] = field(repr=False)
    starts: Tensor = field(repr=False)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of the held-out text over its tokens."""
        return len(self.tokenizer.decode(self.held_out.tolist()).encode()) / len(self.held_out)

    @property
    def judged(self) -> str:
        """The text that a model is judged on: stretches of all held-out text, or all if short."""
        tokens = self.held_out
        if len(tokens) > JUDGED * STRETCH:
            starts = torch.linspace(0, len(tokens) - STRETCH, JUDGED).long()
            tokens = torch.cat([tokens[start : start + STRETCH] for start in starts])
        return self.tokenizer.decode(tokens.tolist())

    def file_of(self, place: int) -> str:
        """Return the name of the file that token number `place` of `train` comes from."""
        return self.files[int(torch.searchsorted(self.starts, place, right=True)) - 1]


def read_text(source: str = "python", *, max_bytes: int = 20_000_000) -> Corpus:
    """Read and tokenize a text.

    source, max_bytes: as in `labcore.data.read_files`, which also says what is refused.
    """
    name, found = read_files(source, max_bytes=max_bytes)
    train, held_out = hold_out(found)
    shipped = source == "python"
    tokenizer = shipped_tokenizer() if shipped else Tokenizer(learn_tokenizer(_sample(train)))
    rows, kept = (
        [[*tokenizer.encode(text), END_OF_TEXT_ID] for text in part.values()]
        for part in (train, held_out)
    )
    return Corpus(
        name=name,
        tokenizer=tokenizer,
        train=torch.tensor(list(itertools.chain(*rows))),
        held_out=torch.tensor(list(itertools.chain(*kept))),
        files=tuple(train),
        starts=torch.tensor([0, *itertools.accumulate(map(len, rows))][:-1]),
    )


def _sample(texts: Mapping[str, str]) -> list[str]:
    """Return the first files: enough for a tokenizer, which would take long on all of them."""
    sizes = itertools.accumulate(map(len, texts.values()))
    return [
        text[:LEARNED]
        for text, size in zip(texts.values(), sizes, strict=True)
        if size - len(text) < LEARNED
    ]
