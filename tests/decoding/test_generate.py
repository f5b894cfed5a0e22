"""Blocks of tokens are the tokens that one by one would have come: greedy, drawn, in any batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
import transformers

from labcore.decoding.audit import near_tie_audit
from labcore.decoding.contract import Draft, SamplingConfig
from labcore.decoding.generation import generate, stream
from labcore.decoding.proposers import Adaptive, DraftModel, NGram
from labcore.decoding.sampling import probabilities
from labcore.decoding.verify import greedy_match
from labcore.models import Llama, LlamaConfig, save_pretrained
from labcore.models.fused import FusedLlama
from tests.decoding.toys import Guess, Toy, plain
from tests.models.shapes import CONFIGS, model_of


def prompts_of(batch: int, vocab: int, generator: torch.Generator) -> list[list[int]]:
    """Rows of 1 to 7 tokens."""
    sizes = torch.randint(1, 8, (batch,), generator=generator).tolist()
    return [torch.randint(vocab, (size,), generator=generator).tolist() for size in sizes]


def test_a_plain_row_is_one_call_of_the_decoder(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(CONFIGS["grouped"], generator)
    calls: list[int] = []
    original = FusedLlama.greedy

    def counted(self: FusedLlama, tokens: list[int], count: int, *others: object) -> list[int]:
        calls.append(count)
        return original(self, tokens, count, *others)

    monkeypatch.setattr(FusedLlama, "greedy", counted)
    sampling = SamplingConfig(max_tokens=9)
    for prompt in ([5], [5, 6, 7]):
        found = generate(model, [prompt], sampling)
        steps = generate(model, [prompt], sampling, trace=True)
        assert (found.tokens, found.finish) == (steps.tokens, steps.finish)
        assert found.statistics == steps.statistics
    assert calls == [9, 9]  # not with a trace of each step
    model.config = replace(model.config, eos_token_ids=(found.tokens[0][4],))
    ended = generate(FusedLlama(model), [prompt], sampling)
    assert ended.finish == ["eos"] and ended.tokens[0] == found.tokens[0][: len(ended.tokens[0])]
    generate(model, [prompt, prompt], sampling)
    generate(model, [prompt], SamplingConfig(max_tokens=9, repetition_penalty=1.1))
    generate(model, [prompt], SamplingConfig(max_tokens=9, temperature=0.5))
    assert len(calls) == 3


@pytest.mark.parametrize("verifier", ["rejection", "greedy", "sample_and_compare", greedy_match])
@pytest.mark.parametrize("children", [1, 3])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_greedy_in_blocks_is_greedy(verifier, children: int, batch: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    target = Toy.random(7, seed, eos=(3,))
    prompts = prompts_of(batch, 7, generator)
    samplings = [
        SamplingConfig(max_tokens=1 + 6 * row, repetition_penalty=1 + 0.2 * row)
        for row in range(batch)
    ]
    guess = Guess(target, generator, children=children)
    found = generate(target, prompts, samplings, proposer=guess, verifier=verifier, trace=True)
    for row, prompt in enumerate(prompts):
        tokens, finish, _ = plain(target, prompt, samplings[row])
        assert (found.tokens[row], found.finish[row]) == (tokens, finish)
        # The cache holds every token of the row but the last: nothing rejected, no hole.
        assert target.cache.rows[row] == [*prompt, *tokens][:-1]
        context = len(prompt)
        for step in found.trace.row(row):
            assert step.context == context
            context += len(step.tokens)
            assert step.target_length == context - 1
        assert context == len(prompt) + len(tokens)
    # One forward reads the prompts; then no row is read once it has ended.
    steps = [statistics.steps for statistics in found.per_row]
    forwards = target.forwards[1:] if any(len(prompt) > 1 for prompt in prompts) else (
        target.forwards
    )  # fmt: skip
    assert len(forwards) == max(steps)
    assert [sum(counts[row] > 0 for counts in forwards) for row in range(batch)] == steps
    assert found.statistics.tokens == sum(map(len, found.tokens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", ["grouped", "qwen2"])
@pytest.mark.parametrize("children", [1, 3])
def test_a_llama_passes_the_near_tie_audit(dtype, family, children: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = model_of(CONFIGS[family], generator).to(dtype)
    with torch.no_grad():
        know = Toy(37, lambda prefix: model(torch.tensor([prefix])).logits[0, -1])
        prompts = prompts_of(3, 37, generator)
        sampling = SamplingConfig(max_tokens=11)
        guess = Guess(know, generator, children=children)
        found = generate(model, prompts, sampling, proposer=guess)
        alone = [generate(model, [prompt], sampling).tokens[0] for prompt in prompts]
    for prompt, tokens in zip(prompts, found.tokens, strict=True):
        audit = near_tie_audit(model, prompt, tokens, gap=1e-9 if dtype == torch.float64 else 1e-3)
        assert audit.passed and audit.tokens == len(tokens)
    if dtype == torch.float64:
        assert found.tokens == alone
    assert found.statistics.accepted > 0  # that some guess is wrong too is likely, not certain


SHAPE = {
    "vocab_size": 29,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_ids": (1,),
}


@pytest.fixture
def peers(tmp_path, generator: torch.Generator):
    """Target and draft in both libraries: the draft has half of the target's layers."""
    models = []
    for name, layers in (("target", 2), ("draft", 1)):
        model = model_of(LlamaConfig(**SHAPE, num_hidden_layers=layers), generator)
        if models:
            shared = {k: v for k, v in models[0][0].state_dict().items() if k in model.state_dict()}
            model.load_state_dict(shared)
        save_pretrained(model, tmp_path / name)
        peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        models.append((model, peer.eval()))
    return models


def test_greedy_equals_transformers_plain_assisted_and_lookup(
    peers, generator: torch.Generator
) -> None:
    (target, peer), (draft, assistant) = peers
    prompts = [
        torch.randint(2, 29, (size,), generator=generator).tolist() * 2 for size in (2, 5, 9)
    ]
    sampling = SamplingConfig(max_tokens=24)
    proposers = {
        "plain": (None, {}),
        "assisted": (
            Adaptive(DraftModel(draft, gamma=6), start=3),
            {"assistant_model": assistant},
        ),
        "lookup": (
            NGram(2, 1, gamma=10, occurrence="earliest"),
            {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 2},
        ),
    }
    plain = generate(target, prompts, sampling).tokens
    for proposer, options in proposers.values():
        outputs = [
            generate(target, prompts, sampling, proposer=proposer).tokens,
            # Transformers' model behind our adapter.
            generate(peer, prompts, sampling, proposer=proposer).tokens,
            [theirs_of(peer, prompt, **options) for prompt in prompts],
        ]
        for output in outputs:
            for prompt, tokens, expected in zip(prompts, output, plain, strict=True):
                # Two libraries round differently: a near tie may part them, nothing else.
                audit = near_tie_audit(target, prompt, tokens, gap=1e-5)
                of_plain = near_tie_audit(target, prompt, expected, gap=1e-5)
                assert audit.passed and of_plain.passed
                assert tokens == expected or audit.differences or of_plain.differences


def theirs_of(peer, prompt: list[int], **options) -> list[int]:
    out = peer.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=24,
        pad_token_id=0,
        **options,
    )
    return out[0, len(prompt) :].tolist()


def test_sampling_without_a_proposer_equals_the_plain_loop(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    target = Toy.random(11, seed, eos=(4,))
    for place, prompt in enumerate(prompts_of(5, 11, generator)):
        sampling = SamplingConfig(
            temperature=0.9, top_k=place * 2, top_p=0.95, repetition_penalty=1.1,
            max_tokens=17, seed=seed + place,
        )  # fmt: skip
        found = generate(target, [prompt], sampling)
        assert (found.tokens[0], found.finish[0]) == plain(target, prompt, sampling)[:2]
        assert found.statistics.steps == len(found.tokens[0])


def test_a_row_depends_on_its_seed_and_not_on_its_batch(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    target, draft = Toy.random(9, seed, eos=(2,)), Toy.random(9, seed + 1)
    prompts = prompts_of(5, 9, generator)
    samplings = [
        SamplingConfig(temperature=0.3 * row, max_tokens=4 + 5 * row, seed=seed + row)
        for row in range(5)
    ]
    whole = generate(target, prompts, samplings, proposer=DraftModel(draft, gamma=3))
    again = generate(target, prompts, samplings, proposer=DraftModel(draft, gamma=3))
    assert again.tokens == whole.tokens
    for row in range(5):
        own = generate(target, [prompts[row]], samplings[row], proposer=DraftModel(draft, gamma=3))
        assert own.tokens == [whole.tokens[row]]
        assert own.statistics == whole.per_row[row]
    other = [replace(sampling, seed=sampling.seed + 77) for sampling in samplings]
    reseeded = generate(target, prompts, other, proposer=DraftModel(draft, gamma=3))
    assert reseeded.tokens != whole.tokens


def test_drafted_and_plain_outputs_have_one_law(seed: int) -> None:
    """V = 3, three tokens, so 27 outputs; P(TV > eps) <= 2^27 exp(-2 n eps^2) < 1e-6."""
    target, draft = Toy.random(3, seed, spread=2.0), Toy.random(3, seed + 1, spread=2.0)
    sampling = SamplingConfig(temperature=0.8, max_tokens=3)
    law = {}
    for output in product(range(3), repeat=3):
        chance = 1.0
        for place, token in enumerate(output):
            p = probabilities(target.logits_of((1, *output[:place])), sampling)
            chance *= float(p[token])
        law[output] = chance
    n, rows = 1500, 100
    proposer = DraftModel(draft, gamma=2)
    seen: Counter = Counter()
    for start in range(0, n, rows):
        samplings = [replace(sampling, seed=seed + start + row) for row in range(rows)]
        found = generate(target, [[1]] * rows, samplings, proposer=proposer)
        seen.update(map(tuple, found.tokens))
    distance = sum(abs(seen[output] / n - chance) for output, chance in law.items()) / 2
    assert distance < 0.105


def test_proposer_gets_contexts_limits_and_last_hidden_state(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    target = Toy.random(6, seed)
    prompts = [[1, 2, 3], [4], [5, 1]]
    samplings = [SamplingConfig(max_tokens=size) for size in (9, 2, 6)]
    guess = Guess(target, generator, wrong=0.2, children=2)
    found = generate(target, prompts, samplings, proposer=guess, trace=True)
    for contexts, limits, hidden in guess.given:
        for row, context in enumerate(contexts):
            left = samplings[row].max_tokens - (len(context) - len(prompts[row]))
            assert limits[row] == max(left - 1, 0)
            if left and len(context) > 1:
                assert hidden[row] == [len(context) - 1, context[-2]]
            elif left:
                assert hidden[row] == [0, 0]  # nothing of this row was read yet
    # A block is the path and the next token, also where commit hears of a cut one.
    for (contexts, *_), drafts, told, after in zip(
        guess.given, guess.proposed, guess.committed, guess.given[1:], strict=False
    ):
        for row, accepted in enumerate(told):
            if len(after[0][row]) > len(contexts[row]):
                path = drafts[row].tokens[list(accepted.path)].tolist()
                assert after[0][row] == [*contexts[row], *path, accepted.next_token]
    assert found.finish == ["length"] * 3
    first = Guess(target, generator)
    generate(target, [[1], [2]], SamplingConfig(max_tokens=2), proposer=first)
    assert first.given[0][2] is None


def test_the_cache_needs_no_more_than_the_output(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    target = Toy.random(5, seed)
    sampling = SamplingConfig(max_tokens=8)
    for children in (1, 3):
        guess = Guess(target, generator, wrong=0.5, children=children)
        found = generate(target, [[1, 2, 3]], sampling, proposer=guess, capacity=10)
        assert found.tokens[0] == plain(target, [1, 2, 3], sampling)[0]
    with pytest.raises(ValueError, match="capacity must be at least 10"):
        generate(target, [[1, 2, 3]], sampling, capacity=9)


@pytest.mark.parametrize("children", [1, 2])
def test_blocks_of_a_stream_add_up_to_the_output(children: int, seed: int) -> None:
    target = Toy.random(8, seed, eos=(6,))
    for temperature in (0.0, 1.0):
        sampling = SamplingConfig(temperature=temperature, max_tokens=19, seed=seed)
        proposers = [
            Guess(target, torch.Generator().manual_seed(seed), children=children) for _ in range(2)
        ]
        whole = generate(target, [[3, 1]], sampling, proposer=proposers[0])
        blocks = list(stream(target, [3, 1], sampling, proposer=proposers[1]))
        assert [token for block in blocks for token in block] == whole.tokens[0]
        assert len(blocks) == whole.statistics.steps and all(blocks)


class Fixed:
    """Always the same drafts."""

    def __init__(self, *drafts: Draft) -> None:
        self.drafts = list(drafts)

    def propose(self, contexts, samplings, max_tokens, generators, *, hidden=None):
        return self.drafts

    def commit(self, accepted) -> None:
        pass


def test_errors_name_the_rule() -> None:
    target = Toy.random(5, 0)
    one = SamplingConfig(max_tokens=2)
    with pytest.raises(ValueError, match="at least one row"):
        generate(target, [], one)
    with pytest.raises(TypeError, match=r"write \[prompt\]"):
        generate(target, [1, 2], one)
    with pytest.raises(ValueError, match="got none in row 1"):
        generate(target, [[1], []], one)
    with pytest.raises(ValueError, match="between 0 and 4, got 1 to 5 in row 0"):
        generate(target, [[1, 5]], one)
    with pytest.raises(ValueError, match="for each of the 1 prompts, got 2"):
        generate(target, [[1]], [one, one])
    with pytest.raises(ValueError, match="did you mean 'rejection'"):
        generate(target, [[1]], one, verifier="rejektion")
    with pytest.raises(ValueError, match="stop texts need .* got None"):
        stream(target, [1], SamplingConfig(stop=("a",)))
    with pytest.raises(TypeError, match="as_decoder|decoder"):
        generate("target", [[1]], one)
    with pytest.raises(ValueError, match="1 tokens deep, got 2"):
        generate(target, [[1]], one, proposer=Fixed(Draft.chain([1, 2])))
    with pytest.raises(ValueError, match="each of the 1 rows, got 2"):
        generate(target, [[1]], one, proposer=Fixed(Draft.chain([1]), Draft.chain([1])))
    loop = Draft(torch.tensor([1, 2]), torch.tensor([-1, 1], dtype=torch.int32))
    with pytest.raises(ValueError, match="before the child, got 1 at node 1"):
        generate(target, [[1]], SamplingConfig(), proposer=Fixed(loop))

    def gap(p, draft, generator):
        return replace(greedy_match(p, draft), path=(1,))

    with pytest.raises(ValueError, match=r"parent to child, got \(1,\)"):
        generate(target, [[1]], SamplingConfig(), verifier=gap, proposer=Fixed(Draft.chain([1, 2])))


def test_the_models_stay_as_they_are() -> None:
    model = Llama(LlamaConfig(**SHAPE, num_hidden_layers=1))
    generate(model, [[3, 4]], SamplingConfig(max_tokens=3), trace=True)
    assert model.training and all(p.requires_grad for p in model.parameters())
    model(torch.tensor([[1, 2]])).logits.sum().backward()
