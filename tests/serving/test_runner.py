"""An engine in the fused form gives the model's outputs; a changed model is read as it is."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor, nn

from labcore.decoding import DraftModel, NGram, SamplingConfig, near_tie_audit
from labcore.models.forms import fused_form
from labcore.serving.engine.engine import Engine
from tests.models.shapes import CONFIGS, model_of
from tests.serving.pool import stored
from tests.serving.tiny import BYTES, TINY_POOL, mixed, nothing_left, run, tiny


@pytest.mark.parametrize(
    ("policy", "proposer"),
    [
        ("static", None),
        ("guaranteed_no_evict", None),
        ("max_utilization", None),
        ("max_utilization", "ngram"),
        ("guaranteed_no_evict", "draft"),
    ],
)
def test_fused_outputs_are_the_models(seed: int, policy: str, proposer: str | None) -> None:
    """Greedy outputs are the model's but for near ties, whatever was in the cache before."""
    model = tiny(seed).float()
    drafts = DraftModel(model, gamma=3) if proposer == "draft" else proposer
    engine = Engine(model, BYTES, policy=policy, proposer=drafts, **TINY_POOL)
    assert engine.runner.fused
    for pages in stored(engine.runner.cache):
        pages.fill_(math.nan)
    asked = mixed(random.Random(seed), 14)
    names = [engine.submit(*one) for one in asked]
    heard = run(engine)
    for name, (prompt, sampling) in zip(names, asked, strict=True):
        assert heard.finish[name] in ("eos", "length")
        if sampling.temperature == 0 and sampling.repetition_penalty == 1:
            audit = near_tie_audit(model, prompt, heard.tokens[name])
            assert audit.passed, audit.worst
    nothing_left(engine)


@pytest.mark.parametrize("kind", list(CONFIGS))
@pytest.mark.parametrize("fused", [False, True])
def test_every_kind_of_checkpoint(
    seed: int, kind: str, fused: bool, generator: torch.Generator
) -> None:
    model = model_of(CONFIGS[kind], generator)
    options = {**TINY_POOL, "policy": "max_utilization", "proposer": "ngram"}
    engine = Engine(model, fused=fused, eos_token_ids=(), **options)
    assert (engine.runner.fused is not None) == fused
    chance = random.Random(seed)
    prompts = [[chance.randrange(37) for _ in range(chance.randint(1, 50))] for _ in range(8)]
    names = [engine.submit(prompt, SamplingConfig(max_tokens=12)) for prompt in prompts]
    outputs = engine.drain()
    for name, prompt in zip(names, prompts, strict=True):
        audit = near_tie_audit(model, prompt, outputs[name].tokens)
        assert audit.passed, audit.worst
    nothing_left(engine)


class Halves(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def test_a_model_that_was_changed_is_read_as_it_is(seed: int) -> None:
    model = tiny(seed, eos_token_ids=()).float()
    assert Engine(model).runner.fused is fused_form(model) is not None
    assert Engine(model, fused=False).runner.fused is None
    proj: nn.Linear = model.layers[0].self_attn.o_proj
    model.layers[0].self_attn.o_proj = Halves(proj.in_features, proj.out_features, bias=False)
    for options in ({"fused": True}, {"fused": True, "graphs": True}):
        with pytest.raises(ValueError, match="fused must be False for this model"):
            Engine(model, **options)
    engine = Engine(model, proposer=NGram())
    assert engine.runner.fused is None
    name = engine.submit([1, 2, 3], SamplingConfig(max_tokens=9))
    audit = near_tie_audit(model, [1, 2, 3], engine.drain()[name].tokens)
    assert audit.passed, audit.worst
