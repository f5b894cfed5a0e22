"""The fused form over pages and slots gives the model's logits, and an engine its outputs."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from labcore.decoding import DraftModel, NGram, SamplingConfig, near_tie_audit
from labcore.models import Llama
from labcore.serving.cache.binding import Host
from labcore.serving.cache.paged import PagedCache
from labcore.serving.cache.slots import SlotCache
from labcore.serving.engine.engine import Engine
from labcore.serving.engine.forwards import Forwards, Reading
from labcore.serving.engine.fused import can_be_fused
from tests.models.shapes import CONFIGS, model_of, tokens_of
from tests.serving.paging import stored
from tests.serving.tiny import BYTES, TINY_POOL, mixed, nothing_left, run, tiny

NEAR = {"rtol": 2e-4, "atol": 2e-4}  # of fp32, in logits of size 10
FORMS = ("paged", "slots")


@pytest.fixture(params=list(CONFIGS))
def model(request, generator: torch.Generator) -> Llama:
    return model_of(CONFIGS[request.param], generator)


def forwards_of(model: Llama, form: str) -> Forwards:
    """Nothing but NaN in the cache."""
    if form == "paged":
        cache = PagedCache.of(model, pages=40, page=3, rows=4, max_pages=12)
    else:
        cache = SlotCache.of(model, slots=7, capacity=36, rows=4)
    for pages in stored(cache):
        pages.fill_(math.nan)
    return Forwards(model, cache, graphs=False, fused=True)


def blocks_of(form: str, rows: int, generator: torch.Generator) -> list[list[int]]:
    each = 12 if form == "paged" else 1
    order = torch.randperm(36 if form == "paged" else 7, generator=generator).tolist()
    return [order[row * each :][:each] for row in range(rows)]


@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_logits_are_the_models(form: str, model: Llama, generator: torch.Generator) -> None:
    """Ragged chunks, single tokens, a row that rests, a tree of which a path is kept."""
    forwards = forwards_of(model, form)
    blocks = blocks_of(form, 3, generator)
    rows: list[list[int]] = [[], [], []]

    def reading(row: int, count: int, parents=None) -> Reading:
        new = tokens_of(model.config, (1, count), generator)[0].tolist()
        start = len(rows[row])
        if parents is None:
            rows[row] += new
        return Reading(blocks=blocks[row], start=start, tokens=new, parents=parents)

    def wanted(row: int) -> Tensor:
        return model(torch.tensor([rows[row]])).logits[0]

    for counts in ((5, 1, 9), (2, 7, 3)):
        logits, hidden = forwards.prefill([reading(*pair) for pair in enumerate(counts)])
        assert logits.shape == (3, 1, 37) and hidden.shape == (3, 24)
        for row in range(3):
            torch.testing.assert_close(logits[row, 0], wanted(row)[-1], **NEAR)
            torch.testing.assert_close(model.head(hidden[row]), logits[row, 0], **NEAR)
    resting = Reading(blocks=(), start=0, tokens=())
    for counts in ((1, 1, 1), (1, 4, 2)):
        given = [reading(*pair) for pair in enumerate(counts)]
        logits, hidden = forwards.decode([*given, resting])
        assert hidden is not None and logits.shape == (4, max(counts), 37)
        for row, count in enumerate(counts):
            torch.testing.assert_close(logits[row, :count], wanted(row)[-count:], **NEAR)
    first = reading(0, 1)
    before = len(rows[1])
    tree = reading(1, 5, parents=[-1, 0, -1, 2])  # behind the last token two branches
    logits, _ = forwards.decode([first, tree])
    torch.testing.assert_close(logits[0, 0], wanted(0)[-1], **NEAR)
    for path in ([0], [0, 1, 2], [0, 3, 4]):
        rows[1] = rows[1][:before] + [tree.tokens[node] for node in path]
        torch.testing.assert_close(logits[1, path], wanted(1)[before:], **NEAR)
    forwards.keep(1, [0, 3, 4])
    logits, _ = forwards.decode([reading(1, 1)])
    torch.testing.assert_close(logits[0, 0], wanted(1)[-1], **NEAR)


@pytest.mark.parametrize(
    ("cache", "policy", "proposer"),
    [
        *product(FORMS, ("static", "guaranteed_no_evict"), (None,)),
        ("paged", "max_utilization", None),
        ("paged", "max_utilization", "ngram"),
        ("paged", "guaranteed_no_evict", "draft"),
    ],
)
def test_an_engine_over_it(seed: int, cache: str, policy: str, proposer: str | None) -> None:
    """Greedy outputs are the model's but for near ties, whatever was in the cache before."""
    model = tiny(seed).float()
    drafts = DraftModel(model, gamma=3) if proposer == "draft" else proposer
    engine = Engine(model, BYTES, cache=cache, policy=policy, proposer=drafts, **TINY_POOL)
    assert engine.forwards.fused
    for pages in stored(engine.forwards.cache):
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
    assert engine.forwards.fused == fused
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
    assert can_be_fused(model) == ""
    assert "torch.float64" in can_be_fused(tiny(seed))
    hook = model.layers[1].register_forward_hook(lambda *_: None)
    assert can_be_fused(model) == "layers.1 has hooks"
    hook.remove()
    proj: nn.Linear = model.layers[0].self_attn.o_proj
    model.layers[0].self_attn.o_proj = Halves(proj.in_features, proj.out_features, bias=False)
    assert "o_proj is a Halves" in can_be_fused(model)
    for options in ({"fused": True}, {"fused": True, "graphs": True}):
        with pytest.raises(ValueError, match="fused must be False for this model"):
            Engine(model, **options)
    engine = Engine(model, proposer=NGram())
    assert not engine.forwards.fused
    name = engine.submit([1, 2, 3], SamplingConfig(max_tokens=9))
    audit = near_tie_audit(model, [1, 2, 3], engine.drain()[name].tokens)
    assert audit.passed, audit.worst


def test_slots_do_not_pay_for_the_places_of_pages(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which tokens a row reads is worked out where they are gathered, and nowhere else."""
    reads: list[int] = []
    whole = Host.read
    monkeypatch.setattr(Host, "read", lambda *given: reads.append(1) or whole(*given))
    counts = {}
    for cache in ("slots", "paged"):
        engine = Engine(tiny(seed).float(), BYTES, cache=cache, fused=True, **TINY_POOL)
        for prompt, sampling in mixed(random.Random(seed), 4):
            engine.submit(prompt, sampling)
        run(engine)
        counts[cache] = len(reads)
    assert counts["slots"] == 0 < counts["paged"]
