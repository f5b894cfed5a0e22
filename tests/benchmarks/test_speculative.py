"""The cases run small, with random models: what is compared is the same, and greedy."""

from __future__ import annotations

import itertools
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch

from benchmarks import speculative as cases
from benchmarks.runner import Measurement, cases_of
from labcore.data import installed_sources
from labcore.decoding.contract import Accepted, Draft
from labcore.decoding.eagle.head import EagleHead
from labcore.decoding.medusa.heads import MedusaHeads
from labcore.decoding.medusa.trees import chain_tree
from labcore.decoding.ngram import NGram
from labcore.decoding.theory import exact, speedup
from labcore.decoding.verify import VERIFIERS, TypicalAcceptance, rejection_sampling
from labcore.models import Llama, LlamaConfig
from labcore.models.shipped import shipped_tokenizer
from labcore.serving.engine.engine import Engine
from tests.benchmarks.measurements import by_quantity

CONFIG = LlamaConfig(
    vocab_size=2048,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    initializer_range=0.3,
    bos_token_id=0,
    eos_token_ids=(0,),
)


def random_pair(seed: int = 0) -> cases.Pair:
    """A target and a draft that agrees with it now and then."""
    generator = torch.Generator().manual_seed(seed)
    target, draft = Llama(CONFIG, generator=generator), Llama(CONFIG)
    draft.load_state_dict(target.state_dict())
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.03)
    for model in (target, draft):
        model.bfloat16().float().eval()
    return cases.Pair(target=target, draft=draft, tokenizer=shipped_tokenizer())


PAIR = random_pair()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "shipped", lambda: PAIR)


def case(name: str, sizes: cases.Sizes = cases.SMALL) -> dict[str, Measurement]:
    (one,) = (one for one in cases_of("speculative") if one.name == name)
    return by_quantity(one.function(sizes))


def test_what_is_timed_runs_on_a_cpu_and_takes_minutes() -> None:
    every = {one.name: one for one in cases_of("speculative")}
    assert all(one.minutes <= 12 for one in every.values())
    timed = ("decoding", "cost", "gate", "batch", "share")
    assert {name.split("/")[0] for name in every} == {
        *timed,
        "acceptance",
        "batch",
        "block",
        "exact",
        "ngram",
        "suffix",
        "texts",
        "typical",
    }
    assert all((one.needs == "cpu") == name.startswith(timed) for name, one in every.items())


def test_every_way_is_timed_on_the_same_prompts() -> None:
    found = case("decoding/64 tokens of code")
    speeds = found["tokens a second/6 tokens of code"]
    ways = {
        *(f"labcore {name}" for name in ("draft 1", "draft 4", "draft adaptive", "draft model")),
        "labcore n-gram 2",
        "labcore suffix 4",
        "transformers plain",
        "transformers assisted 4",
        "transformers lookup 2",
    }
    assert set(speeds.peers) == ways
    assert all(len(samples) == 2 for samples in (speeds.samples, *speeds.peers.values()))
    assert speeds.details["identical to plain"] == dict.fromkeys([cases.PLAIN, *ways], 2)
    held = {item.quantity.split("/")[0]: item for item in found.values() if "bar" in item.details}
    assert set(held) == {
        "plain over transformers' plain",
        "draft over transformers' assisted of 4",
        "best draft over plain",
        "n-gram over transformers' lookup of 2",
    }
    for item in held.values():
        of, over = (
            speeds.samples if name == cases.PLAIN else speeds.peers[name]
            for name in (item.details["of"], item.details["over"])
        )
        assert item.samples == pytest.approx([a / b for a, b in zip(of, over, strict=True)])
    for name in ways - {"transformers plain"}:
        assert found[f"tokens a step of {name}/6 tokens of code"].samples[0] >= 0.9
    # A forward for each token, the first one that of the prompt.
    assert found["tokens a step of transformers plain/6 tokens of code"].samples == [1]


def test_behind_long_prompts_only_lookups_are_timed() -> None:
    found = case("decoding/512 tokens of code")
    speeds = found["tokens a second/16 tokens of long_code"]
    ways = {"labcore n-gram 2", "labcore suffix 4", "transformers plain", "transformers lookup 2"}
    assert set(speeds.peers) == ways
    best = found["suffix over best n-gram/16 tokens of long_code"]
    assert best.details["of"] == "labcore suffix 4" and best.details["over"] == "labcore n-gram 2"
    assert found["best n-gram over plain/16 tokens of long_code"].details["bar"] == 1.1


def test_what_is_not_greedy_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cases.theirs

    def wrong(model, tokens, **options):
        decode = right(model, tokens, **options)
        return lambda prompt: [*decode(prompt)[:-1], 7]

    monkeypatch.setattr(cases, "theirs", wrong)
    with pytest.raises(RuntimeError, match="greedy up to near ties .* from transformers plain"):
        case("decoding/512 tokens of code")


def test_wrong_drafts_cost_a_step_each_and_bring_nothing() -> None:
    (prompt,) = cases.rows("code", 6, count=1)
    text = prompt + cases.ours(None, 12)(prompt)
    run = cases.Steady()
    run.run(prompt, cases.Wrong([text], chain_tree(3)), 12)
    assert run.tokens == run.steps == 12 - 1 - 3 and run.sizes == [3] * run.steps
    run = cases.Steady()
    run.run(prompt, None, 12)
    assert run.tokens == run.steps == 11 and run.sizes == [0] * 11 and run.drafting == 0


def test_spoiled_drafts_are_right_as_often_as_asked() -> None:
    prompt, length, share = [1, 2], 400, 0.7
    text = [*prompt, *range(500, 900)]
    right = 0
    for size in range(2, length - 4, 4):
        way, ask = cases.Spoiled([text], 4, share), cases.settings(9)
        drafts = [way.propose([text[:size]], [ask], [4], [])[0].tokens.tolist() for _ in range(2)]
        assert drafts[0] == drafts[1] and len(drafts[0]) == 4
        right += sum(a == b for a, b in zip(drafts[0], text[size:], strict=False))
    assert abs(right / 396 - share) < 0.12  # five standard deviations


def test_more_right_guesses_settle_more_tokens() -> None:
    found = case("share")
    steps = [found[f"speed-up/{share} of the guesses right"].details for share in cases.SHARES]
    assert [one["tokens a step"] for one in steps] == sorted(one["tokens a step"] for one in steps)
    assert steps[-1]["tokens a step"] > steps[0]["tokens a step"] >= 1
    for few, many in itertools.pairwise(cases.SHARES):
        faster = found[f"speed, {many} of the guesses right over {few}"].samples
        a, b = (found[f"speed-up/{share} of the guesses right"].samples for share in (few, many))
        assert faster == pytest.approx([y / x for x, y in zip(a, b, strict=True)])


def test_the_prediction_is_tokens_over_verification_and_drafting() -> None:
    round_ = cases.Steady(seconds=6.0, tokens=8, steps=4, drafting=1.0, sizes=[0, 2, 2, 2])
    _, speed, alone, ratio = cases.predicted("x", [round_], [0.5], {0: [1.0], 2: [1.4]}, "here")
    cost = (1 + 3 * 1.4) / 4 + 1.0 / 4 / 0.5
    assert speed.samples == pytest.approx([8 / 6 * 0.5])
    assert speed.peers["predicted"] == pytest.approx([2 / cost])
    assert alone.samples == pytest.approx([2 / (8 / 12)])
    assert ratio.samples == pytest.approx([2 / cost / (8 / 12)])


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("cost/64 tokens of code", "6 tokens of code"),
        ("cost/64 tokens of third-party code", "6 tokens of third-party code"),
        ("cost/512 tokens of code", "16 tokens of long_code"),
        ("cost/512 tokens of copy", "16 tokens of copy"),
    ],
)
def test_costs_are_those_of_every_length(name: str, at: str) -> None:
    found, short = case(name), "64" in name
    longest = cases.draft_model().gamma if short else cases.SMALL.adaptive
    v = [f"v/{size} tokens behind {at}" for size in range(2, longest + 2)]
    ways = ["draft 1", "draft 4", "draft adaptive", "draft model"] if short else []
    kinds = ("c", "speed-up", "tokens a step over speed-up", "speed-up, predicted over measured")
    ways += ["n-gram 2", "suffix 4"]
    assert set(found) == {*v, *(f"{k}/{w}, {at}" for k in kinds for w in ways)}
    assert all(len(item.samples) == 2 and min(item.samples) > 0 for item in found.values())


def test_forwards_are_held_against_one_token() -> None:
    found = case("cost/forwards")
    assert set(found) == {
        "forward over 2 tokens/4 before",
        "forward of the draft/4 before",
        "forward of Llama/4 before",
    }
    assert set(found["forward over 2 tokens/4 before"].peers) == {"Llama"}


def test_outcomes_leave_out_the_step_that_ended_the_row() -> None:
    meter = cases.Metered(NGram())
    meter.sizes = [[3, 2], [3, 2], [1, 0]]
    meter.accepted = [[1, 2], [3, 0], [0, 0]]
    assert meter.outcomes() == [[True, False, True, True, True], [True, True]]
    assert cases.pooled(meter.outcomes()) == (3 / 4, 1)
    meter.forget()
    drafts = meter.propose([[1, 2, 1]], [cases.settings(12)], [5], [torch.Generator()])
    meter.commit([Accepted((0,), 3)])
    assert isinstance(drafts[0], Draft) and meter.sizes == [[2]] and meter.accepted == [[1]]


class Watching(NGram):
    """Notes which states it observes."""

    def __init__(self) -> None:
        super().__init__()
        self.reads_hidden, self.seen = True, []

    def observe(self, row: int, start: int, hidden: torch.Tensor) -> None:
        self.seen.append((row, start, len(hidden)))


def test_a_metered_proposer_observes_what_it_would_observe_alone() -> None:
    alone, metered = Watching(), Watching()
    for one, proposer in ((alone, alone), (metered, cases.Metered(metered))):
        cases.counted(proposer, cases.rows("code", 6, count=2), 12)
        batch = Engine(PAIR.target, num_blocks=32, max_num_seqs=2, proposer=proposer)
        batch.submit([1, 2, 1, 2], cases.settings(6))
        while not batch.idle:
            batch.step()
        assert one.seen
    assert metered.seen == alone.seen
    assert not hasattr(cases.Metered(NGram()), "observe")


def test_acceptance_has_every_length_and_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    found = case("acceptance")
    for temperature in ("0", "0.5", "1"):
        for gamma in (1, 3):
            at = f"temperature {temperature}, {gamma} drafted"
            alpha, tokens = found[f"alpha/{at}"], found[f"tokens a step/{at}"]
            seeds = len(cases.seeds_for(float(temperature)))
            assert 1 <= len(alpha.samples) <= len(tokens.samples) == 2 * seeds  # a prompt each
            assert all(1 <= sample <= gamma + 1 for sample in tokens.samples)
            assert len(tokens.peers["i.i.d."]) == seeds
            assert tokens.peers["i.i.d."][0] == pytest.approx(
                speedup.expected_tokens(alpha.details["alpha"], gamma)
            )
    # A draft that is the target is always right.
    same = replace(PAIR, draft=PAIR.target)
    monkeypatch.setattr(cases, "shipped", lambda: same)
    found = case("acceptance")
    for name, item in found.items():
        if name.startswith("alpha"):
            assert min(item.samples) > 0.97, name


def test_a_suffix_is_counted_beside_ngrams_and_with_its_memory() -> None:
    found = case("suffix", replace(cases.SMALL, tokens=24))
    for name, kind in itertools.product(cases.LOOKUPS, ("long_code", cases.THIRD_PARTY)):
        at = f"{name}, 16 tokens of {kind}"
        most = 5 if name == "n-gram 4" else 1 + cases.SMALL.adaptive
        assert all(1 <= sample <= most for sample in found[f"tokens per step/{at}"].samples)
        assert found[f"drafted per step/{at}"].samples[0] >= 0
    for way, turn in itertools.product(("memory", "no memory"), (1, 2)):
        at = f"{way}, temperature 1, output {turn} of a prompt"
        assert min(found[f"tokens per step/{at}"].samples) >= 1


def test_third_party_code_is_named_by_version_and_hash() -> None:
    found = case("texts", replace(cases.SMALL, tokens=24))
    bits = {name: item for name, item in found.items() if name.startswith("bits per byte/")}
    assert len(bits) == 2 + len(installed_sources())
    assert any(f"click/core.py of click {version('click')}" in name for name in bits)
    for temperature, kind in itertools.product(("0", "0.5", "1"), ("code", cases.THIRD_PARTY)):
        at = f"draft 4, {kind}, temperature {temperature}"
        item = found[f"tokens per step/{at}"]
        assert all(1 <= sample <= 5 for sample in item.samples)
        assert min(found[f"alpha/{at}"].samples) >= 0
        files = item.details.get("package, file and SHA-256", [])
        assert len(files) == (len(installed_sources()) if kind == cases.THIRD_PARTY else 0)


def test_the_lookup_is_counted_by_its_options() -> None:
    found = case("ngram")
    options = {f"n up to {n}, {o}" for n in (1, 3) for o in ("latest", "earliest")}
    options |= {f"n up to 3, latest, temperature {t}" for t in ("0.5", "1")}
    assert set(found) == {f"tokens a step/{kind}, {o}" for kind in cases.KINDS for o in options}
    assert all(min(item.samples) >= 1 for item in found.values())


def test_the_gate_trades_drafted_tokens_for_time() -> None:
    found = case("gate")
    for kind in ("long_code", "prose"):
        drafted = [
            found[f"drafted a token/{kind}, {name}"].samples[0]
            for name in ("slack 0", "slack 1", "no gate")
        ]
        assert drafted == sorted(drafted)
        share = found[f"drafted a token over no gate/{kind}, slack 0"].samples
        assert share[0] == pytest.approx(drafted[0] / drafted[-1])
        assert set(found[f"tokens a step over no gate/{kind}, no gate"].samples) == {1.0}
        assert len(found[f"time a token/{kind}, slack 0"].samples) == 2


def test_the_law_of_typical_acceptance_is_the_enumerated_one(seed: int) -> None:
    p, q = (exact.random_table(5, 2 * seed + i) for i in range(2))
    rule = TypicalAcceptance(threshold=0.2)
    row, likeliest = p(())[None], q(()).argsort(descending=True)[None]
    for drafts, proposed in (
        (q(())[None], exact.chain_proposal(q, 1)),
        (likeliest[:, :1], exact.chain_proposal(q, 1, drawn=False)),
        (likeliest[:, :3], exact.proposal(q, (-1, -1, -1))),
    ):
        found, accepted = cases.typical_law(rule, row, drafts)
        torch.testing.assert_close(found[0], exact.output_law(rule, p, proposed, 1))
        reached = exact.expected_acceptance(rule, p, proposed)
        assert float(accepted) == pytest.approx(sum(reached))
        kept = sum(exact.expected_acceptance(rejection_sampling, p, proposed))
        assert cases.lossless_acceptance(row, drafts) == pytest.approx(kept)


def test_an_untypical_draft_is_replaced_by_a_draw_or_by_the_argmax() -> None:
    p = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64)
    rule = TypicalAcceptance(threshold=0.2, alpha=9.0)
    best = torch.tensor([[1.0, 0, 0, 0]], dtype=torch.float64)
    for drafted, drawn, by_argmax in (
        ([3], p[0], best[0]),
        ([3, 1, 0], torch.tensor([0.0, 1, 0, 0]), torch.tensor([0.0, 1, 0, 0])),
    ):
        drafts = torch.tensor([drafted])
        assert torch.equal(cases.typical_law(rule, p, drafts)[0][0], drawn.double())
        found = cases.typical_law(rule, p, drafts, following=best)[0][0]
        assert torch.equal(found, by_argmax.double())


def test_typical_acceptance_is_biased_unlike_rejection_sampling() -> None:
    found = case("typical")
    for temperature, drafts in itertools.product(
        ("0.5", "1"), ("drawn from q", "the argmax of q", "the top 4 of q")
    ):
        at = f"{drafts}, temperature {temperature}, threshold 0.09"
        item = found[f"total variation per token/{at}"]
        assert min(item.samples) > item.details["largest of rejection sampling"] + 1e-6
        assert max(*item.samples, *item.peers["next token by argmax"]) <= 1
        assert item.details["largest of rejection sampling"] < 1e-9
        accepted = found[f"P(accepted)/{at}"]
        assert found[f"P(accepted) minus rejection sampling's/{at}"].samples == pytest.approx(
            [a - b for a, b in zip(accepted.samples, *accepted.peers.values(), strict=True)]
        )
    for gamma in (1, 2, 3):
        item = found[f"total variation/{gamma} drafted, 4 tokens in all"]
        assert max(item.samples) > 0.01 > 1e-9 > item.details["largest of rejection sampling"]


def test_every_method_runs_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = MedusaHeads(PAIR.target, heads=3, layers=1, projection="tied")
    monkeypatch.setattr(cases, "shipped_heads", lambda: heads.eval())
    monkeypatch.setattr(cases, "pretrained_eagle", EagleHead)
    found = case("batch")
    for rows, name in itertools.product((1, 3), cases.BATCHED):
        at = f"{name}, {rows} rows"
        per_step = found[f"tokens per step and row/{at}"].samples
        assert len(set(per_step)) == 1, "a count, so each round gives the same"
        assert 1 <= per_step[0] <= 9
        speed, told = found[f"speed-up/{at}"], found[f"speed-up, predicted over measured/{at}"]
        assert told.samples == pytest.approx(
            [a / b for a, b in zip(speed.peers["predicted"], speed.samples, strict=True)]
        )
    for rows in (1, 3):
        gap = found[f"largest gap of an output/{rows} rows"]
        assert gap.samples[0] <= cases.GAP
        assert set(gap.details["identical to plain"]) >= {cases.PLAIN, *cases.BATCHED, "v 4"}
        assert found[f"v/1 tokens per row, {rows} rows"].samples == [1, 1]


def test_a_roofline_goes_through_its_two_steps() -> None:
    timed = {
        1: {cases.PLAIN: [cases.Steady(seconds=4.0, steps=2)]},
        16: {"v 8": [cases.Steady(seconds=60.0, steps=2)]},
    }
    roof = cases.fitted(timed, cases.FULL)
    context = cases.FULL.short + cases.FULL.batch_tokens // 2
    assert roof.seconds(1, batch=1, context=context) == pytest.approx(2)
    assert roof.seconds(9, batch=16, context=context) == pytest.approx(30)


def test_steps_cost_what_lies_between_the_measured_widths() -> None:
    run = cases.Steady(sizes=[0.0, 1.0, 3.0])
    assert cases.cost_of_steps(run, {1: 1.0, 2: 1.5, 5: 3.0}) == pytest.approx((1 + 1.5 + 2.5) / 3)


def test_wrong_drafts_in_a_batch_are_never_accepted() -> None:
    given = cases.requests(replace(cases.SMALL, prompts=3))
    said, _ = cases.Batch(3, None).serve(given, 8)
    known = [prompt + output for prompt, output in zip(given, said, strict=True)]
    batch = cases.Batch(3, cases.Wrong(known, chain_tree(2)))
    outputs, full = batch.serve(given, 8)
    assert outputs == said
    assert full.steps and full.tokens == 3 * full.steps and max(full.sizes) == 2
    assert not sum(record.accepted for record in batch.engine.trace)


def test_every_outcome_of_every_case_is_added_up() -> None:
    found = case("exact", replace(cases.SMALL, worlds=1))
    for name in ("rejection", "block", "sample_and_compare"):
        assert max(found[f"total variation/{name}"].samples) < 1e-9
    assert min(found["total variation/typical"].samples) > 0.01


def test_the_acceptance_of_a_block_is_its_mean_over_drafts(seed: int) -> None:
    p, q = (exact.random_table(4, 2 * seed + i) for i in range(2))
    propose = exact.chain_proposal(q, 2)
    mean = {"rejection": 0.0, "block": 0.0}
    for draft, chance in exact.outcomes(lambda draws: propose((), draws)):
        x, y = draft.tokens.tolist()
        found = cases.acceptance_of(torch.stack([p(()), p((x,)), p((x, y))]), draft)
        assert found["block"] >= found["rejection"]
        mean = {name: mean[name] + chance * found[name] for name in mean}
    for name, accepted in mean.items():
        expected = sum(exact.expected_acceptance(VERIFIERS[name], p, propose))
        assert accepted == pytest.approx(expected)


def test_blocks_never_accept_fewer_of_the_same_drafts() -> None:
    found = case("block")
    for kind, temperature in itertools.product(("code", "prose"), ("0.5", "1")):
        at = f"{kind}, temperature {temperature}, 3 drafted"
        gain = found[f"tokens per step over rejection sampling's/{at}"].samples
        assert min(gain) > 1 - 1e-9 and max(gain) > 1
        assert all(1 <= x <= 4 for x in found[f"tokens per step/{at}"].samples)


def test_the_largest_gap_of_an_output_is_recorded() -> None:
    found = case("decoding/512 tokens of code")
    gap = found["largest gap of an output/16 tokens of long_code"]
    assert 0 <= gap.samples[0] <= cases.GAP and gap.details["exact"] is True
