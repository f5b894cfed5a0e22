"""A small Llama in float64 for the engine's tests, requests for it, and their lone outputs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from labcore.decoding import Generation, SamplingConfig, generate
from labcore.models import ByteTokenizer, Llama, LlamaConfig
from labcore.serving.engine.engine import Engine
from labcore.serving.engine.outputs import Output
from tests.serving.invariants import check

BYTES = ByteTokenizer()
Asked = tuple[list[int], SamplingConfig]
# So few blocks that requests wait, and are preempted where a policy does that.
TINY_POOL = {
    "num_blocks": 15,
    "block_size": 8,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "chunk": 11,
    "max_length": 104,
}


def tiny(seed: int, **changed: Any) -> Llama:
    """Its words are bytes; float64, so that a batch's rounding changes no token."""
    config = LlamaConfig(
        **{
            "vocab_size": BYTES.vocab_size,
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "initializer_range": 0.4,
            "eos_token_ids": (BYTES.eos, 3),
            **changed,
        }
    )
    generator = torch.Generator().manual_seed(seed)
    return Llama(config, generator=generator, dtype=torch.float64).eval()


def sampling_of(chance: random.Random, most: int) -> SamplingConfig:
    return SamplingConfig(
        temperature=chance.choice((0.0, 0.0, 0.7, 1.0, 1.6)),
        top_k=chance.choice((0, 0, 5, 40)),
        top_p=chance.choice((1.0, 1.0, 0.8)),
        repetition_penalty=chance.choice((1.0, 1.0, 1.3)),
        max_tokens=chance.randint(1, most),
        seed=chance.randrange(2**40),
    )


def mixed(chance: random.Random, count: int, *, longest: int = 60, most: int = 20) -> list[Asked]:
    """Requests with prompts of 1 to `longest` bytes, some of which begin alike."""
    shared = [chance.randrange(256) for _ in range(longest)]
    asked = []
    for _ in range(count):
        prompt = [chance.randrange(256) for _ in range(chance.randint(1, longest))]
        if chance.random() < 0.4:
            same = chance.randint(1, len(prompt))
            prompt[:same] = shared[:same]
        asked.append((prompt, sampling_of(chance, most)))
    return asked


def alone(model: Any, asked: Sequence[Asked], tokenizer: Any = BYTES) -> list[Generation]:
    return [generate(model, [prompt], one, tokenizer=tokenizer) for prompt, one in asked]


class Heard:
    """What the outputs of each request add up to; no output may come after its last."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.guessed: dict[str, list[bool]] = {}
        self.text: dict[str, str] = {}
        self.finish: dict[str, str] = {}
        self.reason: dict[str, str] = {}

    def add(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            assert output.id not in self.finish, "an output came after the last one"
            assert output.tokens or output.text or output.finish, "an output says nothing"
            assert len(output.guessed) == len(output.tokens)
            self.tokens.setdefault(output.id, []).extend(output.tokens)
            self.guessed.setdefault(output.id, []).extend(output.guessed)
            self.text[output.id] = self.text.get(output.id, "") + output.text
            if output.finish:
                self.finish[output.id], self.reason[output.id] = output.finish, output.reason


def run(engine: Engine, heard: Heard | None = None, *, steps: int = 5_000) -> Heard:
    """Step until the engine is idle; check every invariant after each step."""
    heard = heard or Heard()
    for _ in range(steps):
        if engine.idle:
            return heard
        heard.add(engine.step())
        check(engine.scheduler)
    raise AssertionError(f"the engine must come to an end, it took more than {steps} steps")


def nothing_left(engine: Engine) -> None:
    """Fail unless there is no request and no held block."""
    check(engine.scheduler)
    pool = engine.pool
    assert engine.idle and not engine.scheduler.states
    assert pool.held == 0
    assert pool.free + pool.cached == pool.num_blocks
