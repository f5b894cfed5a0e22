"""The cases run small, with a random backbone and heads that know little of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from benchmarks import medusa as cases
from benchmarks import speculative
from benchmarks.runner import Measurement, cases_of
from labcore.decoding.eagle.head import EagleHead
from labcore.decoding.medusa.heads import PROJECTIONS, MedusaHeads
from labcore.decoding.medusa.training import hidden_states, train_heads
from labcore.decoding.medusa.trees import Tree, chain_tree
from tests.benchmarks.measurements import by_quantity
from tests.benchmarks.test_speculative import random_pair

PAIR = random_pair()


def small_heads() -> MedusaHeads:
    """Three heads that were trained for a few steps on what the backbone says."""
    text = "".join(cases.held_out("code")[:2000])
    heads = MedusaHeads(PAIR.target, heads=3, projection="tied")
    states = hidden_states(PAIR.target, PAIR.tokenizer.encode(text), length=32, ahead=4)
    train_heads(heads, states, steps=8, batch=8, rate=0.02, warmup=1, progress=False)
    return heads


HEADS = small_heads()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculative, "shipped", lambda: PAIR)
    monkeypatch.setattr(cases, "trained", lambda: HEADS)
    monkeypatch.setattr(cases, "pretrained_eagle", EagleHead)
    # Else the sources of the whole library are read.
    text = cases.held_out("code")
    texts = type("Text", (), {"text": text})
    monkeypatch.setattr(cases, "python_sources", lambda *_, **__: texts)
    monkeypatch.setattr(cases, "corpus", lambda: [text])
    monkeypatch.setattr(cases, "held_out", lambda kind: text[:1500] + kind)


def case(name: str, sizes: cases.Sizes = cases.SMALL) -> dict[str, Measurement]:
    (one,) = (one for one in cases_of("medusa") if one.name == name)
    return by_quantity(one.function(sizes))


def test_what_is_timed_runs_on_a_cpu_and_takes_minutes() -> None:
    every = {one.name: one for one in cases_of("medusa")}
    timed = {name for name, one in every.items() if one.needs == "cpu"}
    assert all(one.minutes <= (6 if name in timed else 20) for name, one in every.items())
    assert timed == {
        "decoding/64 tokens of code",
        "decoding/64 tokens of held-out code",
        "trees/forwards",
        "cost/64 tokens of code",
        "cost/heads",
        "training",
        "requests",
        "eagle/speed",
    }
    counted = {"trees/tokens", "accuracy", "projections", "typical", "exact"}
    counted |= {"mixture", "unfrozen", "mtp", "eagle/tokens"}
    assert set(every) - timed == counted


def test_trees_are_as_deep_as_there_are_heads_at_most() -> None:
    assert set(cases.small_trees(cases.SMALL)) == {"chain 2", "dense 4", "sparse 2", "sparse 3"}
    assert set(cases.dense(cases.SMALL.dense)) == {"dense 2"}
    table = cases.calibrated(HEADS, cases.SMALL)
    assert table.shape == (3, cases.TOP) and table.sum() > 0 and table.sum(1).max() <= 1


@pytest.mark.parametrize("kind", ["code", "held-out code"])
def test_every_way_is_timed_on_the_same_prompts(kind: str) -> None:
    found, at = case(f"decoding/64 tokens of {kind}"), f"6 tokens of {kind}"
    speeds = found[f"tokens a second/{at}"]
    trees = {f"Medusa {name}" for name in ("chain 2", "dense 4", "sparse 2", "sparse 3")}
    ways = {"n-gram 2", "draft 2", "draft model", *trees}
    assert set(speeds.peers) == ways
    assert all(len(samples) == 2 for samples in (speeds.samples, *speeds.peers.values()))
    assert set(speeds.details["identical to plain"].values()) == {2}
    assert found[f"largest gap of an output/{at}"].samples[0] <= speculative.GAP
    steps = {}
    for name in ways:
        (steps[name],) = found[f"tokens a step of {name}/{at}"].samples
        shares = found[f"forwards over plain's of {name}/{at}"].samples
        assert 1 <= steps[name] <= 5 and all(0 < share <= 1 for share in shares)
    most = found[f"most tokens a step of Medusa/{at}"]
    assert most.samples == [max(steps[name] for name in trees)] == [steps[most.details["of"]]]
    assert most.details["bar"] == 1.6 and most.details["nodes"] <= 4
    alone = found[f"Medusa over plain/{at}"]
    assert (alone.details["of"], alone.details["nodes"]) == (cases.NAMED, 2)
    assert alone.details["bar"] == 1.1
    assert len(alone.samples) == 2 * cases.RACES
    for family in ("n-gram", "draft"):
        best = found[f"best {family} over plain/{at}"]
        fastest = speeds.peers[best.details["of"]]
        assert best.details["of"].startswith(family)
        assert best.samples == [a / b for a, b in zip(fastest, speeds.samples, strict=True)]
        ours = [a / b for a, b in zip(speeds.peers[cases.NAMED], fastest, strict=True)]
        assert found[f"Medusa over best {family}/{at}"].samples == ours


def test_what_is_not_greedy_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = speculative.ours

    def wrong(proposer: object, tokens: int) -> object:
        decode = right(proposer, tokens)  # type: ignore[arg-type]
        return decode if proposer is None else lambda prompt: [*decode(prompt)[:-1], 7]

    monkeypatch.setattr(speculative, "ours", wrong)
    for name in ("decoding/64 tokens of code", "cost/64 tokens of code"):
        with pytest.raises(RuntimeError, match="greedy up to near ties"):
            case(name)


def test_tokens_a_step_stand_beside_what_is_expected() -> None:
    found = case("trees/tokens")
    for name in ("sparse 2", "sparse 6", "dense 2"):
        for temperature in ("0", "0.7", "1"):
            at = f"{name}, temperature {temperature}"
            item = found[f"tokens a step/{at}"]
            ratio = found[f"tokens a step, measured over expected/{at}"]
            assert len(item.samples) == 2 and all(1 <= x <= 4 for x in item.samples)
            assert item.peers["expected"] == [ratio.details["expected"]]
            assert ratio.samples == [ratio.details["measured"] / ratio.details["expected"]]


def test_forwards_over_trees_stand_beside_chains() -> None:
    found = case("trees/forwards")
    assert set(found) == {f"v/{n + 1} rows, 4 before" for n in (2, 3, 6)}
    assert all(set(item.peers) == {"chain of as many"} for item in found.values())


def test_costs_are_those_of_every_tree() -> None:
    found, at = case("cost/64 tokens of code"), "6 tokens of code"
    kinds = ("v", "c", "speed-up", "tokens a step over speed-up")
    kinds += ("speed-up, predicted over measured",)
    assert set(found) == {
        f"{k}/{t}, {at}" for k in kinds for t in ("chain 2", "dense 4", "sparse 3")
    }
    assert all(len(item.samples) == 2 and min(item.samples) > 0 for item in found.values())


def test_wrong_trees_cost_a_step_each_and_bring_nothing() -> None:
    (prompt,) = speculative.rows("code", 6, count=1)
    text = prompt + speculative.ours(None, 16)(prompt)
    tree = Tree(((0,), (1,), (0, 0)))
    run = speculative.Steady()
    run.run(prompt, speculative.Wrong([text], tree), 16)
    assert run.tokens == run.steps == 16 - 1 - 2 and run.sizes == [3] * run.steps


def test_every_projection_is_timed() -> None:
    found = case("cost/heads")
    every = {f"heads' forward/{p}, {n} heads" for p in PROJECTIONS for n in (1, 2, 3)}
    assert set(found) == every
    assert all(set(item.peers) == {"MedusaHeads"} for item in found.values())
    assert len({item.details["packed"] for item in found.values()}) == 1


def test_accuracies_are_those_of_texts_and_of_own_words() -> None:
    found = case("accuracy")
    for kind in cases.KINDS:
        few, many = (
            found[f"tokens a step of the text/held-out {kind}, sparse {n}"] for n in (2, 6)
        )
        # A larger tree settles at least as much, but for where its steps begin.
        assert 1 <= few.samples[0] <= many.samples[0] + 0.05 <= 4
    own = [f"own words behind {name}" for name in ("code", "prose", "held-out code")]
    for text in ("held-out code", "held-out prose", *own):
        for i in range(3):
            first, five = (found[f"top-{n}/head {i}, {text}"] for n in (1, 5))
            assert 0 <= first.samples[0] <= five.samples[0] <= 1
            assert five.samples[0] == pytest.approx(sum(first.details["share of each rank"][:5]))


def test_own_words_are_labels_place_by_place() -> None:
    given = cases.prompts("code", cases.SMALL)
    outputs = cases.said(given, 16)
    for prompt, output, one in zip(given, outputs, cases.behind(3, given, outputs), strict=True):
        hidden, tokens = one.rows(torch.tensor([0]))
        # Head 0's first label is the output's second token, head 2's last one its last.
        assert tokens[0, 2:].tolist() == output[1:] and tokens[0, 1] == output[0]
        assert hidden.shape[1] + 4 == tokens.shape[1] and tokens[0, 0] == prompt[-1]
        said = PAIR.target.head(hidden[0]).argmax(-1).tolist()
        assert said == output[: len(said)]


def test_projections_are_trained_alike() -> None:
    found = case("projections")
    sizes = {}
    for name in (*PROJECTIONS, "untrained"):
        seeds = 1 if name == "untrained" else 2
        for i in range(3):
            assert len(found[f"top-1 of head {i}/{name}"].samples) == seeds
        for what in ("expected tokens", "tokens a step"):
            assert min(found[f"{what}/{name}, sparse 4"].samples) >= 1
        if name != "untrained":
            (sizes[name],) = found[f"parameters/{name}"].samples
            stored = found[f"stored bytes/{name}"].samples[0]
            assert 0 < stored - 2 * sizes[name] < 4000
    narrow, vocab, (count, rank) = 32, 2048, (HEADS.heads, HEADS.rank)
    assert sizes["tied"] == count * narrow * (narrow + 1)
    assert sizes["full"] - sizes["tied"] == count * narrow * vocab
    assert sizes["low_rank"] - sizes["tied"] == count * rank * (narrow + vocab)


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_training_of_heads_alone_holds_less(
    projection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = cases.like(HEADS, PAIR.target, projection=projection, rank=4)
    monkeypatch.setattr(cases, "trained", lambda: heads)
    # So long that activations outweigh AdamW's scratch.
    found = case("training", replace(cases.SMALL, length=256))
    cached, live, full = cases.WAYS
    for name in cases.WAYS:
        held = found[f"bytes of weights, gradients and states/{name}"]
        assert held.samples == pytest.approx(held.peers["predicted"], rel=0.01)
        peak = found[f"peak bytes/{name}"]
        assert peak.samples == pytest.approx(peak.peers["predicted"], rel=0.1)
        assert len(found[f"seconds a step/{name}"].samples) == 2
        assert len(found[f"time over {full}/{name}"].samples) == 2
    peaks = [found[f"peak over {full}/{name}"].samples[0] for name in (cached, live, full)]
    assert peaks == sorted(peaks) and peaks[-1] == 1
    flops = [found[f"time over {full}/{n}"].peers["predicted"][0] for n in (cached, live, full)]
    assert flops == sorted(flops) and flops[-1] == 1


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_products_are_counted_as_torch_counts_them(
    projection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    heads = cases.like(HEADS, PAIR.target, projection=projection, rank=4)
    monkeypatch.setattr(cases, "trained", lambda: heads)
    # Attention apart: on a CPU, torch 2.15 counts it and 2.13 does not.
    monkeypatch.setattr(cases.traffic, "flops", lambda *_: 0)
    sizes = cases.SMALL
    states = cases.states_of_corpus(sizes.batch, sizes.length, heads.heads, sizes.pieces)
    for name in cases.WAYS:
        way = cases.training_way(name, states)
        with FlopCounterMode(display=False) as counter:
            way.step()
        counted = counter.get_flop_counts()["Global"].items()
        products = sum(count for op, count in counted if "attention" not in str(op))
        assert products == cases.flops(name, heads, sizes), name


def test_typical_acceptance_is_measured_beside_the_lossless_rule() -> None:
    found = case("typical")
    for temperature in ("0.7", "1"):
        for threshold in ("0.09", "0.3"):
            at = f"temperature {temperature}, sparse 3, threshold {threshold}"
            tokens = found[f"tokens a step/{at}"]
            gain = found[f"tokens a step over lossless/{at}"].samples
            pairs = zip(tokens.samples, tokens.peers["rejection sampling"], strict=True)
            assert gain == [a / b for a, b in pairs]
            assert all(0 <= x < 1 for x in found[f"total variation a token/{at}"].samples)


def test_a_certain_token_is_as_far_as_the_rest_of_the_law() -> None:
    rule = cases.Biased(cases.TypicalAcceptance(threshold=0.3))
    p = torch.tensor([[0.6, 0.4, 0.0], [0.1, 0.1, 0.8], [0.5, 0.25, 0.25]])
    draft = cases.Draft.chain([0, 1])
    found = rule(p, draft, torch.Generator().manual_seed(0))
    assert found.path == (0,) and rule.tokens == 2
    assert rule.distance == pytest.approx(0.4)


def test_lossless_rules_keep_the_law_to_rounding() -> None:
    found = case("exact")
    for name in ("chain 2", "dense 6", "sparse 4", "sparse 5"):
        for rule in ("rejection", "sample_and_compare"):
            assert max(found[f"total variation/{name}, {rule}"].samples) < 1e-12
        assert min(found[f"total variation/{name}, typical"].samples) > 0.01


def test_chains_have_their_own_names() -> None:
    assert cases.chains((2,)) == {"chain 2": chain_tree(2)}


def test_a_mixture_is_judged_on_another_half_of_each_text() -> None:
    found = case("mixture")
    for kind in cases.KINDS:
        alone = found[f"nats per token, backbone alone/held-out {kind}"]
        more = found[f"nats per token, mixed minus alone/held-out {kind}"]
        assert len(alone.samples) == len(more.samples) == cases.PARTS
        weights = more.details["weights, the backbone's first"]
        assert len(weights) == 1 + HEADS.heads and sum(weights) == pytest.approx(1)
        assert found[f"the backbone's weight/held-out {kind}"].samples == [weights[0]]


def test_the_unfrozen_backbone_is_compared_with_the_frozen_one() -> None:
    found = case("unfrozen")
    for kind in cases.KINDS:
        frozen = found[f"bits per byte of the backbone/held-out {kind}, frozen"]
        assert len(set(frozen.samples)) == 1  # no seed changes a frozen backbone
        moved = found[f"bits per byte of the backbone/held-out {kind}, unfrozen minus frozen"]
        assert all(moved.samples)
        for i in range(HEADS.heads):
            share = found[f"top-1 of head {i}/held-out {kind}, frozen"]
            assert all(0 <= one <= 1 for one in share.samples)


def test_a_model_trained_with_heads_is_compared_with_one_trained_alone() -> None:
    found = case("mtp")
    for kind in cases.KINDS:
        at = f"nats per token of the model/held-out {kind}"
        # Few steps teach little: a token still costs about what a uniform guess does.
        assert found[f"{at}, alone"].samples == pytest.approx([math.log(2048)] * 2, rel=0.3)
        assert all(found[f"{at}, joint minus alone"].samples)
        for i in range(cases.GUESSED):
            at = f"top-1 of head {i}/held-out {kind}"
            assert all(0 <= one <= 1 for one in found[f"{at}, frozen"].samples)
            assert all(-1 <= one <= 1 for one in found[f"{at}, joint minus frozen"].samples)


def test_requests_at_once_are_decoded_with_each_tree_and_without() -> None:
    found = case("requests")
    for rows in cases.SMALL.at_once:
        at = f"{rows} at once"
        assert found[f"largest gap of an output/{at}"].samples[0] <= speculative.GAP
        assert len(found[f"tokens per second/plain, {at}"].samples) == cases.SMALL.rounds
        for name in ("sparse 2", f"sparse {cases.FEWEST}"):
            (steps, *rest) = found[f"tokens per step and row/{name}, {at}"].samples
            assert 1 <= steps <= 5 and len(set(rest)) <= 1  # counts are the same in every round
            assert min(found[f"speed-up/{name}, {at}"].samples) > 0


def test_the_eagle_like_head_is_compared_on_every_kind() -> None:
    kinds = ("code", "held-out code", "prose", speculative.THIRD_PARTY)
    counted = by_quantity(cases.tokens_of_eagle(cases.SMALL))
    raced = by_quantity(cases.speed_of_eagle(cases.SMALL))
    for kind in kinds:
        for temperature in cases.TEMPERATURES:
            for name in (cases.EAGLE, "Medusa sparse 2", "Medusa sparse 4"):
                at = f"tokens per step of {name}/{kind}, temperature {temperature}"
                assert min(counted[at].samples) >= 1
        found = raced[f"{cases.EAGLE} over plain/{kind}"]
        assert found.details.get("bar") == cases.EAGLE_BARS.get(kind)
        assert set(raced[f"tokens a second/{kind}"].peers) == {
            cases.EAGLE, "Medusa sparse 2", "Medusa sparse 4",
        }  # fmt: skip
