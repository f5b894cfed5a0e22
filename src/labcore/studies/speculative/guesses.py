"""Who guessed each token of a continuation, for prompts of one's own and for forty recorded ones.

`python -m labcore.studies.speculative.guesses` writes the forty again, to `guesses.json` beside
this file. They hold for the shipped models whose hashes stand in it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from labcore import models
from labcore.checks import one_of
from labcore.decoding import DraftModel, NGram, generate
from labcore.decoding.contract import Accepted, Draft, SamplingConfig

__all__ = [
    "FILE",
    "GUESSERS",
    "OWN",
    "Either",
    "Written",
    "forty",
    "model_hashes",
    "record",
    "write",
]

FILE = Path(__file__).with_name("guesses.json")
GUESSERS = ("draft model", "n-grams", "n-grams first")
TEMPERATURES = (0.0, 0.7)
TOKENS, TAIL, GAMMA = 48, 64, 4
GREEDY = "greedy"  # the tokens that all guessers share
OWN = (
    'def greet(name):\n    """Return a greeting."""\n',
    "for line in open(path):\n    key, value = line.split(",
    "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser()\n    parser.add",
)
"""Four short beginnings, beside the shipped prompts."""


class Either:
    """One row's drafts by the first proposer, and by the second where the first has none.

    turns: which of the two drafted in each step so far, 0 or 1.
    """

    def __init__(self, first: Any, second: Any) -> None:
        self.proposers = (first, second)
        self.turns: list[int] = []

    def propose(
        self,
        contexts: Sequence[Sequence[int]],
        samplings: Sequence[SamplingConfig],
        max_tokens: Sequence[int],
        generators: Sequence[torch.Generator],
        *,
        hidden: Tensor | None = None,
    ) -> list[Draft]:
        """Return a draft; see `Proposer`. Raises ValueError for more than one row."""
        if len(contexts) != 1:
            raise ValueError(f"Either drafts for one row, got {len(contexts)}; decode them singly")
        for turn, proposer in enumerate(self.proposers):
            drafts = proposer.propose(contexts, samplings, max_tokens, generators, hidden=hidden)
            if len(drafts[0]) or turn:
                break
        self.turns.append(turn)
        return list(drafts)

    def commit(self, accepted: Sequence[Accepted]) -> None:
        """Inform the one that drafted."""
        self.proposers[self.turns[-1]].commit(accepted)


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A continuation. prompt: its end, as text.

    tokens: the text of each token. who: who chose each of them, a letter per token: t for the
    target, d for a guess of the draft model, n for one by n-grams. Each step of the target ends
    with a t.
    """

    prompt: str
    tokens: tuple[str, ...]
    who: str


def write(
    target: Any,
    draft: Any,
    prompt: str,
    guesser: str = GUESSERS[-1],
    *,
    tokens: int = TOKENS,
    temperature: float = 0.0,
    seed: int = 0,
) -> Written:
    """Continue a prompt and say who guessed each token.

    target, draft: models with the shipped tokenizer. guesser: one of GUESSERS; four guesses per
    step. Raises ValueError for another guesser or an empty prompt.
    """
    one_of("guesser", guesser, GUESSERS)
    tokenizer = models.shipped_tokenizer()
    given = tokenizer.encode(prompt)[-TAIL:]
    if not given:
        raise ValueError(
            "prompt must have at least one token, got an empty text; write a few words"
        )
    lookup, small = NGram(3, 1, gamma=GAMMA), DraftModel(draft, gamma=GAMMA)
    chosen = {"draft model": (small, small), "n-grams": (lookup, lookup)}
    either = Either(*chosen.get(guesser, (lookup, small)))
    asked = SamplingConfig(temperature=temperature, max_tokens=tokens, seed=seed)
    told = generate(target, [given], asked, proposer=either, trace=True)
    letters = {"draft model": "dd", "n-grams": "nn"}.get(guesser, "nd")
    steps = told.trace.row(0) if told.trace else []
    who = "".join(
        letters[turn] * len(step.path) + "t" for turn, step in zip(either.turns, steps, strict=True)
    )
    output = told.tokens[0]
    texts = [tokenizer.decode([token], special=True) for token in output]
    return Written(prompt=tokenizer.decode(given), tokens=tuple(texts), who=who[: len(output)])


def model_hashes() -> dict[str, str]:
    """Return the SHA-256 of all weights of the shipped target and draft, by name."""
    found = {}
    for name in ("target", "draft"):
        digest = hashlib.sha256()
        for weight in models.pretrained(name).state_dict().values():
            digest.update(weight.contiguous().numpy().tobytes())
        found[name] = digest.hexdigest()
    return found


def prompts() -> dict[str, str]:
    """Return the forty prompts by name: all shipped ones and four short beginnings."""
    named = {f"short {place}": text for place, text in enumerate(OWN, 1)}
    for kind in ("code", "long_code", "prose", "copy"):
        for place, text in enumerate(models.prompts(kind), 1):
            named[f"{kind.replace('_', ' ')} {place}"] = text
    return named


def record() -> dict[str, Any]:
    """Return what FILE holds: each prompt's continuations by guesser and temperature.

    Raises RuntimeError if a guesser changes a greedy continuation.
    """
    target, draft = (models.pretrained(name) for name in ("target", "draft"))
    found = {}
    for name, text in prompts().items():
        tokens: dict[str, list[str]] = {}
        who: dict[str, str] = {}
        for guesser, temperature in itertools.product(GUESSERS, TEMPERATURES):
            one = write(target, draft, text, guesser, temperature=temperature)
            way = f"{guesser}, {temperature:g}"
            kept = tokens.setdefault(way if temperature else GREEDY, list(one.tokens))
            if kept != list(one.tokens):
                raise RuntimeError(f"greedy tokens must not depend on guesses, got others: {name}")
            who[way] = one.who
        found[name] = {"prompt": one.prompt, "tokens": tokens, "who": who}
    return {"models": model_hashes(), "gamma": GAMMA, "written": found}


def forty() -> dict[str, dict[str, Written]]:
    """Return the recorded continuations: prompt -> "<guesser>, <temperature>" -> Written."""
    kept = json.loads(FILE.read_text("utf-8"))["written"]
    return {
        name: {
            way: Written(
                prompt=one["prompt"],
                tokens=tuple(one["tokens"].get(way, one["tokens"][GREEDY])),
                who=who,
            )
            for way, who in one["who"].items()
        }
        for name, one in kept.items()
    }


def main() -> None:
    """Write FILE."""
    torch.set_num_threads(1)
    FILE.write_text(json.dumps(record(), ensure_ascii=False, separators=(",", ":")) + "\n", "utf-8")


if __name__ == "__main__":
    main()
