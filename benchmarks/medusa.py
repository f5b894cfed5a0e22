"""Medusa heads on the shipped target: speed, trees, accuracy, training, and outputs.

Everything runs on one thread, in fp32, and greedily unless a temperature is named. Prompts, rounds
and timing are those of the speculative benchmark. Times are CPU times. Counts (tokens per step,
accuracies, bytes, distances between distributions) are the same everywhere up to rounding.
"""

from __future__ import annotations

import copy
import functools
import itertools
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import speculative
from benchmarks.runner import Measurement, case
from benchmarks.speculative import PLAIN, Steady, Wrong
from labcore.attention import traffic
from labcore.data import python_sources
from labcore.decoding.contract import Accepted, Draft, Proposer, SamplingConfig
from labcore.decoding.draft_model import DraftModel
from labcore.decoding.generation import generate
from labcore.decoding.medusa.fused import FusedHeads
from labcore.decoding.medusa.heads import PROJECTIONS, MedusaHeads, save_heads
from labcore.decoding.medusa.known_text import replay_text
from labcore.decoding.medusa.proposer import Medusa
from labcore.decoding.medusa.shipped import pretrained_heads
from labcore.decoding.medusa.training import (
    HiddenStates,
    head_accuracies,
    hidden_states,
    label_ranks,
    medusa_loss,
    train_heads,
    training_bytes,
)
from labcore.decoding.medusa.trees import (
    Tree,
    chain_tree,
    dense_tree,
    expected_tokens,
    sparse_tree,
)
from labcore.decoding.ngram import NGram
from labcore.decoding.theory import exact
from labcore.decoding.trace import Statistics
from labcore.decoding.verify import VERIFIERS, TypicalAcceptance
from labcore.memory import Meter, estimate
from labcore.models import Llama, LlamaConfig, bits_per_byte, held_out
from labcore.optim import AdamW
from labcore.timing import paired

# Ways with at most five rows: four drafted tokens and the one that is always read.
DRAFTS, NGRAMS, CHAINS, FEW, PAIRS = (2, 4), (2, 4), (2, 3, 4), (2, 3, 4), ((2, 1),)
BUDGETS = (2, 4, 8, 16, 32, 64)  # nodes of sparse trees of any size
DENSE = ((2,), (2, 1), (2, 1, 1, 1), (4, 1, 1, 1), (4, 2, 1, 1), (4, 3, 2, 1))
HELD_OUT = 14  # prompts from a held-out text
# Trees are built from the heads' accuracy on the target's own continuations of these texts, which
# are neither prompts nor training data of the target or the heads.
CALIBRATION, TOP = 64, 10  # texts, ranks
# Chosen before the rounds that judge it: the fastest of an earlier run. The best of many ways in
# the same rounds owes part of its lead to noise.
NAMED, RACES = "Medusa sparse 2", 3
BARS = {"Medusa over plain": 1.1, "most tokens a step of Medusa": 1.6}
TEMPERATURES = (0.0, 0.7, 1.0)
CONTEXTS, COSTED = (64, 512), (2, 3, 4, 8, 16)
WINDOW = 256  # tokens per row of states
# For `projections`. The rate was chosen on seed 100 from 0.001 and 0.004.
STEPS, ROWS, RATE, WARMUP, SEEDS, PIECES = 80, 4, 4e-3, 10, (0, 1, 2), 16
BATCH, LENGTH, TIMED = 8, 128, 10  # for `training`; number of timed steps
FEWEST = 4  # the tree budget if only one is used
THRESHOLDS, TYPICAL, REPEATS = (0.09, 0.3), (4, 16), (0, 1, 2)
WORLDS, SMALL = 5, 4  # seeds of enumerated models, and their vocabulary
TRIAL = 10  # training steps in `layers`
KINDS = ("code", "prose")  # of held-out texts
TIED = ("low_rank", "tied")  # projections that read the backbone's matrix


# Heads and trees ---------------------------------------------------------------------------------
@functools.cache
def trained() -> MedusaHeads:
    """Return the heads of this course."""
    return pretrained_heads(speculative.shipped().target)


@functools.cache
def fused(heads: MedusaHeads) -> FusedHeads:
    """Return the fused version of the heads, which is timed."""
    return FusedHeads(heads)


def like(shape: MedusaHeads, backbone: Llama, **other: Any) -> MedusaHeads:
    """Return new heads of the same shape, except for what is named."""
    names = ("heads", "layers", "projection", "rank")
    return MedusaHeads(backbone, **{name: getattr(shape, name) for name in names} | other)


def encoded(text: str) -> list[int]:
    """Return the tokens of a text."""
    return speculative.shipped().tokenizer.encode(text)


def spread(tokens: Sequence[int], count: int, length: int) -> list[list[int]]:
    """Return `count` evenly spaced pieces of `length` tokens."""
    step = (len(tokens) - length) / max(1, count - 1)
    starts = [int(place * step) for place in range(count)]
    return [list(tokens[start : start + length]) for start in starts]


def held_out_rows(kind: str) -> list[list[int]]:
    """Return prompts from a text that no shipped model has seen."""
    return spread(encoded(held_out(kind)), HELD_OUT, speculative.SHORT)


def said(given: Sequence[list[int]], temperature: float = 0.0) -> list[list[int]]:
    """Return the target's own output for each prompt."""
    asked = [speculative.settings(temperature, place) for place in range(len(given))]
    return generate(speculative.shipped().fast_target, list(given), asked).tokens


@torch.inference_mode()
def behind(
    heads: int, given: Sequence[list[int]], outputs: Sequence[list[int]]
) -> list[HiddenStates]:
    """Return, row by row, the states for which all heads' labels are tokens of the output.

    A row whose output is shorter than the heads' reach is omitted.
    """
    found, ahead = [], heads + 1
    for prompt, output in zip(given, outputs, strict=True):
        text, first = torch.tensor([prompt + output]), len(prompt) - 1
        length = len(output) + 1 - ahead
        if length > 0:
            hidden = speculative.shipped().target(text).hidden[:, first : first + length]
            found.append(HiddenStates(text[:, first:], hidden, ahead))
    return found


def pooled(heads: MedusaHeads, every: Sequence[HiddenStates]) -> Tensor:
    """Return the frequencies of the ranks over all positions, fp64 [K, TOP]."""
    places = [one.tokens.numel() - len(one) * one.ahead for one in every]
    shares = [
        head_accuracies(heads, one, top=TOP) * n for one, n in zip(every, places, strict=True)
    ]
    return torch.stack(shares).sum(0) / sum(places)


@functools.cache
def calibration(temperature: float = 0.0) -> tuple[list[list[int]], list[list[int]]]:
    """Return beginnings of library files held out from training, and the target's continuations."""
    text = python_sources("held_out", max_bytes=5_000 * CALIBRATION).text
    given = spread(encoded(text), CALIBRATION, speculative.SHORT)
    return given, said(given, temperature)


@functools.cache
def calibration_states(heads: int, temperature: float) -> list[HiddenStates]:
    """Return the states of the calibration texts for this number of heads."""
    return behind(heads, *calibration(temperature))


@functools.cache
def calibrated(heads: MedusaHeads, temperature: float = 0.0) -> Tensor:
    """Return the table that trees and their expected lengths are computed from: fp64 [K, TOP]."""
    return pooled(heads, calibration_states(heads.heads, temperature))


def chains(lengths: Sequence[int]) -> dict[str, Tree]:
    """Return chain trees by name, at most as deep as there are heads."""
    return {f"chain {n}": chain_tree(n) for n in lengths if n <= trained().heads}


def dense(every: Sequence[Sequence[int]]) -> dict[str, Tree]:
    """Return dense trees by name, with their numbers of nodes."""
    trees = [dense_tree(widths) for widths in every if len(widths) <= trained().heads]
    return {f"dense {tree.size}": tree for tree in trees}


def sparse(budgets: Sequence[int], heads: MedusaHeads | None = None) -> dict[str, Tree]:
    """Return trees of the likeliest nodes according to the calibration."""
    table = calibrated(trained() if heads is None else heads)
    return {f"sparse {n}": sparse_tree(table, n) for n in budgets}


def small_trees() -> dict[str, Tree]:
    """Return the trees of at most five rows."""
    return chains(CHAINS) | dense(PAIRS) | sparse(FEW)


def proposers(trees: Mapping[str, Tree]) -> dict[str, Proposer]:
    """Return proposers with the shipped heads."""
    return {name: Medusa(fused(trained()), tree) for name, tree in trees.items()}


def about(tree: Tree) -> dict[str, Any]:
    """Describe a tree for a record's details."""
    return {"nodes": tree.size, "depth": tree.depth, "choices": [list(c) for c in tree.choices]}


def about_heads(heads: MedusaHeads) -> dict[str, Any]:
    """Describe the heads for a record's details."""
    names = ("heads", "layers", "projection", "rank")
    return {name: getattr(heads, name) for name in names}


def provenance() -> dict[str, Any]:
    """Describe what the trees were built from."""
    text = f"the target's greedy words behind {CALIBRATION} pieces of held-out library files"
    return {**about_heads(trained()), "calibrated on": text}


def counts_of(
    proposer: Proposer | None,
    given: Sequence[list[int]],
    temperature: float = 0.0,
    *,
    verifier: Any = "rejection",
    seed: int = 0,
) -> list[Statistics]:
    """Return the counts of drafted and accepted tokens, row by row."""
    asked = [speculative.settings(temperature, 1000 * seed + n) for n in range(len(given))]
    model = speculative.shipped().fast_target
    return generate(model, list(given), asked, proposer=proposer, verifier=verifier).per_row


def one(quantity: str, unit: str, value: float, **details: Any) -> Measurement:
    """Return a number without a spread."""
    return many(quantity, unit, [value], **details)


def many(quantity: str, unit: str, samples: Sequence[float], **details: Any) -> Measurement:
    """Return a measurement with a sample per round, prompt or seed."""
    return Measurement(quantity=quantity, unit=unit, samples=samples, details=details)


# Decoding ----------------------------------------------------------------------------------------
def decoding(given: Sequence[list[int]], at: str) -> list[Measurement]:
    """Time every way in the same rounds; return speeds, tokens per step and ratios with targets."""
    trees = {f"Medusa {name}": tree for name, tree in small_trees().items()}
    ways: dict[str, Proposer] = {
        f"n-gram {n}": NGram(speculative.MAXIMUM, 1, gamma=n) for n in NGRAMS
    }
    small = speculative.shipped().fast_draft
    ways |= {f"draft {n}": DraftModel(small, gamma=n) for n in DRAFTS}
    ways |= proposers(trees)
    calls = {PLAIN: speculative.ours(None)}
    calls |= {name: speculative.ours(proposer) for name, proposer in ways.items()}
    outputs = {name: [call(prompt) for prompt in given] for name, call in calls.items()}
    details = {
        **speculative.refuse_wrong(outputs, given),
        **provenance(),
        "tokens of each prompt": [len(prompt) for prompt in given],
        "tokens of each output": speculative.TOKENS,
        "weights packed in fp16": speculative.shipped().fast_target.packed,
        "heads packed in fp16": fused(trained()).packed,
        "dtype": "float32",
    }
    tokens = {name: sum(map(len, found)) for name, found in outputs.items()}
    speeds = speculative.race(calls, given, tokens)
    gap = details["largest gap, nats"]
    found = [
        one(f"largest gap of an output/{at}", "nats", gap, **details, exact=True),
        Measurement(
            quantity=f"tokens a second/{at}",
            unit="tokens/s",
            samples=speeds[PLAIN],
            peers={name: samples for name, samples in speeds.items() if name != PLAIN},
            details=details,
        ),
    ]
    plain_steps = [row.steps for row in counts_of(None, given)]
    tokens_a_step = {}
    for name, proposer in ways.items():
        per_row = counts_of(proposer, given)
        numbers = speculative.plain_numbers(Statistics.total(per_row))
        numbers |= about(trees[name]) if name in trees else {}
        tokens_a_step[name] = Statistics.total(per_row).tokens_per_step
        shares = [row.steps / steps for row, steps in zip(per_row, plain_steps, strict=True)]
        found += [
            one(f"tokens a step of {name}/{at}", "tokens", tokens_a_step[name], **numbers),
            many(f"forwards over plain's of {name}/{at}", "ratio", shares, **numbers),
        ]
    most = max(trees, key=lambda name: tokens_a_step[name])
    what = "most tokens a step of Medusa"
    told = {**about(trees[most]), "of": most, "bar": BARS[what]}
    found.append(one(f"{what}/{at}", "tokens", tokens_a_step[most], **told))
    two, what, alone = {name: calls[name] for name in (PLAIN, NAMED)}, "Medusa over plain", []
    for _ in range(RACES):
        race = speculative.race(two, given, tokens)
        alone += faster(race, NAMED, PLAIN)
    told = {**details, **about(trees[NAMED]), "of": NAMED, "bar": BARS[what]}
    found.append(many(f"{what}/{at}", "ratio", alone, **told))
    return found + ratios(speeds, at, details)


def faster(speeds: Mapping[str, Sequence[float]], one: str, other: str) -> list[float]:
    """Return the speedup, round by round."""
    return [a / b for a, b in zip(speeds[one], speeds[other], strict=True)]


def ratios(
    speeds: Mapping[str, Sequence[float]], at: str, details: Mapping[str, Any]
) -> list[Measurement]:
    """Return the best n-gram and best draft over plain decoding, and the named tree over them.

    Both are the best of a few in the same rounds, which favors them.
    """
    found = []
    for family in ("n-gram", "draft"):
        of_family = [name for name in speeds if name.startswith(family)]
        best = max(of_family, key=lambda name: statistics.median(speeds[name]))
        for what, of, beside in (
            (f"best {family} over plain", best, PLAIN),
            (f"Medusa over best {family}", NAMED, best),
        ):
            told = {**details, "of": of, "over": beside}
            found.append(many(f"{what}/{at}", "ratio", faster(speeds, of, beside), **told))
    return found


@case("decoding/64 tokens of code", minutes=4, needs="cpu")
def decoding_code() -> list[Measurement]:
    """Plain, n-gram, draft model and Medusa on the course's prompts."""
    at = f"{speculative.SHORT} tokens of code"
    return decoding(speculative.rows("code", speculative.SHORT), at)


@case("decoding/64 tokens of held-out code", minutes=2, needs="cpu")
def decoding_held_out() -> list[Measurement]:
    """The same on pieces of a text that no model has seen."""
    return decoding(held_out_rows("code"), f"{speculative.SHORT} tokens of held-out code")


# Trees -------------------------------------------------------------------------------------------
@case("trees/tokens", minutes=4)
def tokens_of_trees() -> list[Measurement]:
    """Tokens per step by tree and temperature, compared with independent heads."""
    given, found = speculative.rows("code", speculative.SHORT), []
    trees = sparse(BUDGETS) | dense(DENSE)
    for (name, tree), temperature in itertools.product(trees.items(), TEMPERATURES):
        per_row = counts_of(proposers({name: tree})[name], given, temperature)
        expected = expected_tokens(tree, calibrated(trained(), temperature))
        total = Statistics.total(per_row)
        at = f"{name}, temperature {temperature:g}"
        details = {**speculative.plain_numbers(total), **about(tree), **provenance()}
        each = many(f"tokens a step/{at}", "tokens", [x.tokens_per_step for x in per_row])
        found += [
            replace(each, peers={"expected": [expected]}, details=details),
            one(
                f"tokens a step, measured over expected/{at}",
                "ratio",
                total.tokens_per_step / expected,
                expected=expected,
                measured=total.tokens_per_step,
            ),
        ]
    return found


@case("trees/forwards", minutes=1, needs="cpu")
def forwards_of_trees() -> list[Measurement]:
    """v: the target's forward over a tree and the token before it, relative to one token."""
    target, found = speculative.shipped().fast_target, []
    sizes = sorted({*FEW, *BUDGETS})
    trees = {n: next(iter(sparse([n]).values())) for n in sizes}
    for context in CONTEXTS:
        chance = torch.Generator().manual_seed(0)
        width = max(sizes) + 1
        prompt = torch.randint(target.vocab_size, (1, max(context, width)), generator=chance)
        cache = target.new_cache(1, context + width)
        target(prompt[:, :context], cache=cache)
        before = torch.tensor([context])

        def over(nodes: int, parents: Sequence[int] | None, before: Tensor = before) -> Any:
            tree = None if parents is None else torch.tensor([parents], dtype=torch.int32)
            row = prompt[:, : nodes + 1]  # noqa: B023 - only called in this iteration
            return functools.partial(forward, target, cache, row, tree, before)  # noqa: B023

        calls = {"plain": over(0, None)}
        for n, tree in trees.items():
            calls[f"tree {n}"] = over(n, [-1, *(parent + 1 for parent in tree.parents)])
            calls[f"chain {n}"] = over(n, None)
        with torch.inference_mode():
            comparison = paired(calls, rounds=10 * speculative.ROUNDS)
        for n, tree in trees.items():
            quantity = f"v/{n + 1} rows, {context} before"
            samples = comparison.ratios(f"tree {n}", "plain")
            rows = many(quantity, "forwards over one token", samples, **about(tree))
            chain = comparison.ratios(f"chain {n}", "plain")
            found.append(replace(rows, peers={"chain of as many": chain}))
    return found


def forward(model: Any, cache: Any, tokens: Tensor, tree: Tensor | None, before: Tensor) -> None:
    """Run one forward and undo it."""
    model(tokens, cache=cache, tree=tree)
    cache.truncate(before)


# Costs -------------------------------------------------------------------------------------------
class WrongTree(Wrong):
    """Free trees of one shape, whose first tokens are always wrong."""

    def __init__(self, text: list[int], tree: Tree) -> None:
        super().__init__(text, tree.depth)
        self.ranks = tree.ranks
        self.parents = torch.tensor(tree.parents, dtype=torch.int32)

    def propose(
        self,
        contexts: Sequence[Sequence[int]],
        samplings: Sequence[SamplingConfig],  # noqa: ARG002 - part of the protocol
        max_tokens: Sequence[int],
        generators: Sequence[torch.Generator],  # noqa: ARG002
        *,
        hidden: Tensor | None = None,  # noqa: ARG002
    ) -> list[Draft]:
        """Return the tree, filled with vocabulary neighbors of the right token."""
        (context,), (most,) = contexts, max_tokens
        if len(context) >= len(self.text) or most < self.length:
            return [Draft.chain([])]
        vocab, right = speculative.shipped().fast_target.vocab_size, self.text[len(context)]
        tokens = [(right + 1 + rank) % vocab for rank in self.ranks]
        return [Draft(torch.tensor(tokens), self.parents)]


@case("cost/64 tokens of code", minutes=3, needs="cpu")
def costs() -> list[Measurement]:
    """v of each tree, c of its drafts, and tokens per step / (v + c) compared with the speedup."""
    given = speculative.rows("code", speculative.SHORT)[: speculative.COST_PROMPTS]
    trees = chains(CHAINS) | dense(PAIRS) | sparse(COSTED)
    drafts = proposers(trees)
    outputs = {PLAIN: [speculative.ours(None)(prompt) for prompt in given]}
    for name, proposer in drafts.items():
        outputs[name] = [speculative.ours(proposer)(prompt) for prompt in given]
    speculative.refuse_wrong(outputs, given)
    texts = [prompt + said for prompt, said in zip(given, outputs[PLAIN], strict=True)]
    ways: dict[str, Callable[[int], Proposer | None]] = {PLAIN: speculative.always(None)}
    for name, tree in trees.items():
        ways[name] = speculative.always(drafts[name])
        ways[f"v {name}"] = lambda place, tree=tree: WrongTree(texts[place], tree)  # type: ignore[misc]
    rounds = speculative.steady(ways, given, speculative.ROUNDS)
    plain = [x.step for x in rounds[PLAIN]]
    at, found = f"{speculative.SHORT} tokens of code", []
    for name, tree in trees.items():
        v = verification(rounds[f"v {name}"], plain)
        # Near the end of an output a tree is cut; the cost of fewer nodes is interpolated linearly.
        table = {n: [1 + (x - 1) * n / tree.size for x in v] for n in range(tree.size + 1)}
        drafting = [x.drafting / x.steps / t for x, t in zip(rounds[name], plain, strict=True)]
        _, *rest = speculative.predicted(name, rounds[name], plain, table, at)
        details = {**about(tree), **provenance(), "seconds of a plain step": plain}
        found += [
            many(f"v/{name}, {at}", "plain steps", v, **details),
            many(f"c/{name}, {at}", "plain steps a step", drafting, **details),
            *rest,
        ]
    return found


def verification(rounds: Sequence[Steady], plain: Sequence[float]) -> list[float]:
    """Return the cost of a step with a wrong draft, in plain steps, round by round.

    After an output that ended early there is no draft: the step is plain.
    """
    return [
        (x.seconds - x.sizes.count(0) * t) / max(1, x.steps - x.sizes.count(0)) / t
        for x, t in zip(rounds, plain, strict=True)
    ]


@case("cost/heads", minutes=0.5, needs="cpu")
@torch.inference_mode()
def cost_of_heads() -> list[Measurement]:
    """A call of the heads for one row, relative to the target's forward of one token.

    Training doesn't change the cost of heads. These are new heads, rounded like those from a file,
    which lets the fused version pack them.
    """
    pair, found = speculative.shipped(), []
    (context, *_), shape = CONTEXTS, trained()
    chance = torch.Generator().manual_seed(0)
    prompt = torch.randint(pair.fast_target.vocab_size, (1, context), generator=chance)
    cache = pair.fast_target.new_cache(1, context + 1)
    hidden = pair.fast_target(prompt, cache=cache).hidden[:, -1]
    last, before = prompt[:, -1:], torch.tensor([context])
    calls: dict[str, Callable[[], object]] = {
        "plain": functools.partial(forward, pair.fast_target, cache, last, None, before)
    }
    every = list(itertools.product(PROJECTIONS, range(1, shape.heads + 1)))
    packed = {}
    for projection, count in every:
        heads = like(shape, pair.target, projection=projection, heads=count).eval()
        heads.bfloat16().float()
        fast = FusedHeads(heads)
        packed[projection, count] = fast.packed
        calls[f"{projection} {count}"] = functools.partial(fast, hidden)
        calls[f"MedusaHeads {projection} {count}"] = functools.partial(heads, hidden)
    comparison = paired(calls, rounds=10 * speculative.ROUNDS)
    for projection, count in every:
        name = f"{projection} {count}"
        quantity = f"heads' forward/{projection}, {count} heads"
        samples = comparison.ratios(name, "plain")
        unfused = comparison.ratios(f"MedusaHeads {name}", "plain")
        told = {"packed": packed[projection, count], "context": context}
        item = many(quantity, "forwards of the target", samples, **told)
        found.append(replace(item, peers={"MedusaHeads": unfused}))
    return found


# Accuracy ----------------------------------------------------------------------------------------
@case("accuracy", minutes=0.5)
def accuracy() -> list[Measurement]:
    """Top-1 and top-5 accuracy of each head.

    The case also counts the tokens per step of trees if the target's output were a held-out text.
    """
    heads, target, found = trained(), speculative.shipped().target, []
    texts: dict[str, list[HiddenStates]] = {}
    for kind in KINDS:
        row = encoded(held_out(kind))
        states = hidden_states(
            target, row, length=min(WINDOW, len(row) // 2), ahead=heads.heads + 1
        )
        texts[f"held-out {kind}"] = [states]
        ranks = label_ranks(heads, states, top=TOP)
        for name, tree in (small_trees() | sparse(BUDGETS)).items():
            steps = [step for row in ranks for step in replay_text(tree, row)]
            settled = statistics.fmean(1 + len(step) for step in steps)
            at = f"held-out {kind}, {name}"
            found.append(one(f"tokens a step of the text/{at}", "tokens", settled, **about(tree)))
        share = float(own_accuracy(target, states))
        found.append(one(f"top-1/backbone, held-out {kind}", "share", share))
    for name, given in (
        ("code", speculative.rows("code", speculative.SHORT)),
        ("prose", speculative.rows("prose", speculative.SHORT)),
        ("held-out code", held_out_rows("code")),
    ):
        texts[f"own words behind {name}"] = behind(heads.heads, given, said(given))
    for text, every in texts.items():
        shares = pooled(heads, every)
        for i, row in enumerate(shares.tolist()):
            told = {
                **about_heads(heads),
                "places": sum(x.tokens.numel() - len(x) * x.ahead for x in every),
                "tokens ahead of the state": i + 2,
                "share of each rank": row,
                "exact": True,
            }
            found += [
                one(f"top-1/head {i}, {text}", "share", row[0], **told),
                one(f"top-5/head {i}, {text}", "share", sum(row[:5]), **told),
            ]
    return found


@torch.inference_mode()
def own_accuracy(target: Llama, states: HiddenStates) -> Tensor:
    """Return the backbone's own accuracy for the next token."""
    hidden, tokens = states.rows(torch.arange(len(states)))
    every = zip(hidden, tokens, strict=True)
    right = [(target.head(h.float()).argmax(-1) == t[1 : 1 + len(h)]) for h, t in every]
    return torch.cat(right).double().mean()


# Projections -------------------------------------------------------------------------------------
@functools.cache
def slice_of_corpus(tokens: int) -> tuple[int, ...]:
    """Return `tokens` tokens of the target's training data, in pieces from all over it."""
    text = python_sources("train").text
    size = 8 * tokens // PIECES + 8  # a token has about three characters
    starts = [place * (len(text) - size) // max(1, PIECES - 1) for place in range(PIECES)]
    every = [encoded(text[start : start + size])[: tokens // PIECES + 1] for start in starts]
    return tuple(itertools.chain.from_iterable(every))[:tokens]


def states_of_corpus(rows: int, length: int, heads: int) -> HiddenStates:
    """Return rows of cached states of the training data."""
    ahead = heads + 1
    target = speculative.shipped().target
    row = slice_of_corpus(rows * length + ahead)
    return hidden_states(target, list(row), length=length, ahead=ahead)


@case("projections", minutes=5)
def projections() -> list[Measurement]:
    """Heads that differ only in their projection, after the same short training."""
    shape, target = trained(), speculative.shipped().target
    states = states_of_corpus(STEPS * ROWS, WINDOW, shape.heads)
    text = encoded(held_out("code"))
    length = min(WINDOW, len(text) // 2)
    judged = [hidden_states(target, text, length=length, ahead=shape.heads + 1)]
    given = speculative.rows("code", speculative.SHORT)
    settings = {"steps": STEPS, "rows a step": ROWS, "tokens a row": WINDOW, "rate": RATE}
    found = judge("untrained", [like(shape, target, projection="tied")], judged, given, {})
    for projection in PROJECTIONS:
        every, losses = [], []
        for seed in SEEDS:
            torch.manual_seed(seed)  # draws a low rank's first factor
            heads = like(shape, target, projection=projection)
            curve = train_heads(
                heads,
                states,
                steps=STEPS,
                batch=ROWS,
                rate=RATE,
                warmup=WARMUP,
                seed=seed,
                progress=False,
            )
            every.append(heads)
            losses.append(statistics.fmean(curve.losses[-max(1, STEPS // 10) :]))
        parameters = sum(p.numel() for p in every[0].parameters())
        details = {**about_heads(every[0]), **settings}
        told = {**details, "exact": True}
        found += [
            one(f"parameters/{projection}", "parameters", parameters, **told),
            one(f"stored bytes/{projection}", "bytes", stored_bytes(every[0]), **told),
            many(f"loss of the last tenth/{projection}", "nats", losses, **details),
            *judge(projection, every, judged, given, details),
        ]
    return found


def judge(
    name: str,
    every: Sequence[MedusaHeads],
    judged: Sequence[HiddenStates],
    given: Sequence[list[int]],
    details: Mapping[str, Any],
) -> list[Measurement]:
    """Return accuracies on a held-out text, and tokens per step of each one's own small tree."""
    shares = [pooled(heads, judged) for heads in every]
    found = [
        many(f"top-1 of head {i}/{name}", "share", [float(x[i, 0]) for x in shares], **details)
        for i in range(every[0].heads)
    ]
    expected, measured = [], []
    for heads, table in zip(every, shares, strict=True):
        ((_, tree),) = sparse([FEWEST], heads.eval()).items()
        expected.append(expected_tokens(tree, table))
        proposer = Medusa(FusedHeads(heads), tree)
        measured.append(Statistics.total(counts_of(proposer, given)).tokens_per_step)
    at = f"{name}, sparse {FEWEST}"
    return [
        *found,
        many(f"expected tokens/{at}", "tokens", expected, **details),
        many(f"tokens a step/{at}", "tokens", measured, **details),
    ]


def stored_bytes(heads: MedusaHeads) -> int:
    """Return the size of the heads' file in bf16."""
    with tempfile.TemporaryDirectory() as folder:
        save_heads(copy.deepcopy(heads).bfloat16(), folder)
        return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


# Training ----------------------------------------------------------------------------------------
FULL = "backbone and heads"
WAYS = ("heads on cached states", "heads on the live backbone", FULL)


class Whole(nn.Module):
    """Everything that a way of training holds; tensors that are only read are buffers."""

    def __init__(self, heads: MedusaHeads, backbone: Llama | None) -> None:
        super().__init__()
        self.heads, self.backbone = heads, backbone
        if backbone is None and heads.projection in TIED:
            self.register_buffer("projection", heads.backbone_projection, persistent=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to train. step: runs one step. held: the module whose bytes count."""

    held: Whole
    optimizer: torch.optim.Optimizer
    step: Callable[[], object]

    @property
    def trained(self) -> int:
        """The number of parameters with a gradient."""
        return sum(p.numel() for p in self.held.parameters() if p.requires_grad)

    @property
    def frozen(self) -> int:
        """The number of parameters without a gradient, plus buffers."""
        every = itertools.chain(self.held.parameters(), self.held.buffers())
        return sum(x.numel() for x in every if not x.requires_grad)


def training_way(name: str, states: HiddenStates) -> Way:
    """Return training of new heads like the shipped ones, on the same batch in each step."""
    backbone = copy.deepcopy(speculative.shipped().target)
    backbone.requires_grad_(name == FULL)
    heads = like(trained(), backbone)
    held = Whole(heads, None if name == WAYS[0] else backbone)
    weights = [p for p in held.parameters() if p.requires_grad]
    optimizer = AdamW(weights, lr=1e-3, weight_decay=0.0)
    index = torch.arange(BATCH)
    live = replace(states, hidden=None, backbone=backbone)

    def step() -> None:
        optimizer.zero_grad()
        loss: Any = 0.0
        if name == FULL:
            tokens = states.tokens[index]
            out = backbone(tokens[:, : -states.ahead])
            hidden, labels = out.hidden, tokens[:, 1 : 1 + LENGTH].flatten()
            loss = F.cross_entropy(out.logits.flatten(0, 1), labels)
            del out
        else:
            hidden, tokens = (states if name == WAYS[0] else live).rows(index)
            hidden = hidden.float()
        one_by_one = (heads.head(i, hidden) for i in range(heads.heads))
        (loss + medusa_loss(one_by_one, tokens)[0]).backward()
        optimizer.step()

    return Way(held=held, optimizer=optimizer, step=step)


def kept_of_heads(heads: MedusaHeads) -> int:
    """Count the bytes that the heads' forward keeps for the backward.

    For each position and head these are the inputs of each block's silu, the inputs of later
    products with trained weights, and the log-probabilities. All heads share the states.
    """
    config = heads.config
    width, layers = config.hidden_size, heads.layers
    numbers = layers * width + (layers - 1) * width + config.vocab_size
    numbers += 0 if heads.projection == "tied" else width
    numbers += heads.rank if heads.projection == "low_rank" else 0
    return 4 * BATCH * LENGTH * (heads.heads * numbers + width)


def predicted_peak(name: str, way: Way) -> int:
    """Predict the peak: weights, states, what the forward keeps, and extra copies of the logits.

    The backward needs two copies, the gradients of the log-probabilities and of the logits. It
    needs three if two products are added while the previous head's logits still exist. There are no
    weight gradients yet; if they are larger than all that, the peak is in the optimizer's step.
    """
    told = training_bytes(way.trained, way.frozen)
    rest, heads = told["weights"] + told["optimizer states"], way.held.heads
    kept = kept_of_heads(heads)
    if name == FULL:
        kept += estimate(heads.config, batch=BATCH, length=LENGTH).activations
    logits = 4 * BATCH * LENGTH * heads.config.vocab_size
    logits *= 3 if heads.projection == "low_rank" else 2
    return rest + max(kept + logits, told["gradients"])


def flops(name: str, heads: MedusaHeads) -> int:
    """Count the multiplications and additions in a step's matrix products.

    Each gradient of a product costs as much as the product: the weight's if it is trained, and the
    input's if something before it is trained.
    """
    config, tokens = heads.config, BATCH * LENGTH
    width, vocab = config.hidden_size, config.vocab_size
    inner = [p for n, p in speculative.shipped().target.layers.named_parameters() if p.dim() == 2]
    matrices = sum(p.numel() for p in inner) + vocab * width
    shape = traffic.Shape(
        batch=BATCH,
        heads=config.num_attention_heads,
        kv_heads=config.kv_heads,
        length=LENGTH,
        head_dim=config.head_size,
        is_causal=True,
    )
    attention = config.num_hidden_layers * traffic.flops(shape)
    first = width * width * (3 if name == FULL else 2)  # only FULL needs the states' gradient
    each = first + 3 * (heads.layers - 1) * width * width
    each += vocab * width * (2 if heads.projection in TIED else 3)
    each += 3 * heads.rank * (width + vocab) if heads.projection == "low_rank" else 0
    total = 2 * tokens * heads.heads * each
    if name == WAYS[1]:
        total += 2 * tokens * matrices + attention
    elif name == FULL:
        backward = config.num_hidden_layers * traffic.flops(shape, "backward")
        total += 3 * 2 * tokens * matrices + attention + backward
    return total


@case("training", minutes=1, needs="cpu")
def training() -> list[Measurement]:
    """Bytes and seconds per step, measured and predicted, and relative to training everything."""
    states = states_of_corpus(BATCH, LENGTH, trained().heads)
    ways = {name: training_way(name, states) for name in WAYS}
    size = {"batch": BATCH, "length": LENGTH, **about_heads(trained())}
    peaks, predicted = {}, {}
    found = []
    for name, way in ways.items():
        with Meter(way.held, way.optimizer) as meter:
            for _ in range(2):
                way.step()
        most, told = meter.most, training_bytes(way.trained, way.frozen)
        peaks[name], predicted[name] = meter.peak.total, predicted_peak(name, way)
        lasting = most.parameters + most.gradients + most.optimizer
        details = {**size, "measured": meter.peak.parts(), "exact": True}
        bytes_ = one(f"bytes of weights, gradients and states/{name}", "bytes", lasting, **details)
        peak = one(f"peak bytes/{name}", "bytes", peaks[name], **details)
        found += [
            one(f"trained parameters/{name}", "parameters", way.trained, **details),
            replace(bytes_, peers={"predicted": [sum(told.values())]}),
            replace(peak, peers={"predicted": [predicted[name]]}),
        ]
    target = speculative.shipped().target
    rows, ahead = states.tokens[:, : -states.ahead], states.ahead

    def read() -> None:
        with torch.no_grad():
            target(rows)

    calls = {name: way.step for name, way in ways.items()} | {"states": read}
    comparison = paired(calls, rounds=TIMED, warmup=1)
    counted = {name: flops(name, trained()) for name in WAYS}
    for name in WAYS:
        details = {**size, "FLOPs": counted[name], "labels ahead": ahead}
        over = peaks[name] / peaks[FULL]
        ratio = one(f"peak over {FULL}/{name}", "ratio", over, **details, exact=True)
        times = many(f"time over {FULL}/{name}", "ratio", comparison.ratios(name, FULL), **details)
        samples = comparison.timings[name].samples
        found += [
            replace(ratio, peers={"predicted": [predicted[name] / predicted[FULL]]}),
            many(f"seconds a step/{name}", "s", samples, **details),
            replace(times, peers={"predicted": [counted[name] / counted[FULL]]}),
        ]
    once = comparison.ratios("states", WAYS[0])
    return [*found, many("computing a batch's states once", f"steps of {WAYS[0]}", once, **size)]


# Distributions -----------------------------------------------------------------------------------
class Biased:
    """A typical rule that records each output token's distance from the target's distribution.

    A draft isn't random: given the context, an accepted token is emitted with certainty, which is
    at a distance of 1 - p(token) from p. The token after it is drawn from p itself.
    """

    def __init__(self, rule: TypicalAcceptance) -> None:
        self.rule, self.distance, self.tokens = rule, 0.0, 0

    def __call__(self, p: Tensor, draft: Draft, generator: Any = None) -> Accepted:
        """Apply the inner rule and record the distance."""
        found = self.rule(p, draft, generator)
        path = list(found.path)
        before = draft.parents.long()[path] + 1
        self.distance += float((1 - p[before, draft.tokens[path]]).sum())
        self.tokens += len(path) + 1
        return found


@case("typical", minutes=2)
def typical() -> list[Measurement]:
    """Tokens per step that typical acceptance gains over lossless trees, and the bias it costs."""
    given, found = speculative.rows("code", speculative.SHORT), []
    trees = sparse(TYPICAL)
    for temperature, (name, tree) in itertools.product(filter(None, TEMPERATURES), trees.items()):
        proposer = proposers({name: tree})[name]
        lossless = [total_of(proposer, given, temperature, "rejection", seed) for seed in REPEATS]
        for threshold in THRESHOLDS:
            rules = [Biased(TypicalAcceptance(threshold=threshold)) for _ in REPEATS]
            lossy = [
                total_of(proposer, given, temperature, rule, seed)
                for rule, seed in zip(rules, REPEATS, strict=True)
            ]
            at = f"temperature {temperature:g}, {name}, threshold {threshold:g}"
            details = {**about(tree), "alpha": rules[0].rule.alpha, **provenance()}
            speed = [x.tokens_per_step for x in lossy]
            plain = [x.tokens_per_step for x in lossless]
            gain = [a / b for a, b in zip(speed, plain, strict=True)]
            away = [rule.distance / rule.tokens for rule in rules]
            tokens = many(f"tokens a step/{at}", "tokens", speed, **details)
            found += [
                replace(tokens, peers={"rejection sampling": plain}),
                many(f"tokens a step over lossless/{at}", "ratio", gain, **details),
                many(f"total variation a token/{at}", "probability", away, **details),
            ]
    return found


def total_of(
    proposer: Proposer, given: Sequence[list[int]], temperature: float, verifier: Any, seed: int
) -> Statistics:
    """Return the counts over all rows."""
    every = counts_of(proposer, given, temperature, verifier=verifier, seed=seed)
    return Statistics.total(every)


class TableHeads:
    """Heads that look up their output for each context; `context` is the current one."""

    def __init__(self, heads: int, seed: int) -> None:
        self.heads = heads
        self.context: tuple[int, ...] = ()
        self.config = LlamaConfig(
            vocab_size=SMALL,
            hidden_size=2,
            intermediate_size=2,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
        self.tables = [exact.random_table(SMALL, 1000 + 10 * seed + i) for i in range(heads)]

    def __call__(self, hidden: Tensor, count: int | None = None) -> Tensor:  # noqa: ARG002
        """Return log-probabilities [count, 1, V] for the current context."""
        return torch.stack([table(self.context).log()[None] for table in self.tables[:count]])


def drafted_by(heads: TableHeads, tree: Tree) -> exact.Propose:
    """Return Medusa's drafting as a function for enumeration."""
    proposer = Medusa(heads, tree)
    start, asked, chance = (0, 0), [SamplingConfig()], [torch.Generator()]

    def propose(context: tuple[int, ...], draws: Any) -> Draft:  # noqa: ARG001 - nothing is drawn
        heads.context = context
        hidden, most = torch.zeros(1, 2), [tree.depth]
        return proposer.propose([[*start, *context]], asked, most, chance, hidden=hidden)[0]

    return propose


@case("exact", minutes=0.5)
def every_outcome() -> list[Measurement]:
    """Distance of a step's distribution from the target's on small tables, by enumeration."""
    trees = {
        "chain 2": chain_tree(2),
        "dense 6": dense_tree((2, 2)),
        "sparse 4": Tree(((0,), (1,), (0, 0), (0, 1))),
        "sparse 5": Tree(((0,), (0, 0), (1,), (2,), (1, 0))),
    }
    found = []
    for (name, tree), rule in itertools.product(
        trees.items(), ("rejection", "sample_and_compare", "typical")
    ):
        samples = [
            exact.Case(
                exact.random_table(SMALL, seed), drafted_by(TableHeads(2, seed), tree), 3
            ).distance(VERIFIERS[rule])
            for seed in range(WORLDS)
        ]
        told = {**about(tree), "tokens in all": SMALL, "exact": True}
        found.append(many(f"total variation/{name}, {rule}", "probability", samples, **told))
    return found


@case("layers", minutes=1.5)
def layers() -> list[Measurement]:
    """Whether heads change the outputs, or the backbone's weights and bits per byte."""
    trees, found = sparse((FEWEST, max(BUDGETS))), []
    ways = proposers(trees)
    kinds = {
        "code": speculative.rows("code", speculative.SHORT),
        "prose": speculative.rows("prose", speculative.SHORT),
        "held-out code": held_out_rows("code"),
    }
    for kind, given in kinds.items():
        outputs = {PLAIN: [speculative.ours(None)(prompt) for prompt in given]}
        for name, proposer in ways.items():
            mine = [speculative.ours(proposer)(prompt) for prompt in given]
            proved = speculative.refuse_wrong({PLAIN: outputs[PLAIN], name: mine}, given)
            share = proved["identical to plain"][name] / len(given)
            told = {**proved, "exact": True}
            found += [
                one(f"identical outputs/{kind}, {name}", "share", share, **told),
                one(f"largest gap/{kind}, {name}", "nats", proved["largest gap, nats"], **told),
            ]
    return found + backbone_after_training()


def backbone_after_training() -> list[Measurement]:
    """Compare the backbone's weights and bits per byte before and after training its heads."""
    pair, found = speculative.shipped(), []
    before = {name: tensor.clone() for name, tensor in pair.target.state_dict().items()}
    bits = {kind: bits_per_byte(pair.target, held_out(kind), pair.tokenizer) for kind in KINDS}
    heads = like(trained(), pair.target)
    states = states_of_corpus(ROWS * TRIAL, WINDOW, heads.heads)
    curve = train_heads(heads, states, steps=TRIAL, batch=ROWS, warmup=1, progress=False)
    after = pair.target.state_dict()
    changed = sum(int((after[name] != tensor).sum()) for name, tensor in before.items())
    told = {"steps": TRIAL, "loss": [curve.losses[0], curve.losses[-1]], "exact": True}
    found.append(one("weights of the backbone that changed", "weights", changed, **told))
    for kind, first in bits.items():
        then = bits_per_byte(pair.target, held_out(kind), pair.tokenizer)
        details = {**told, "before": first, "after": then}
        what = "bits a byte of the backbone, after minus before"
        found.append(one(f"{what}/held-out {kind}", "bits a byte", then - first, **details))
    return found
