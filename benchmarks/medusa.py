"""Medusa heads on the shipped target: speed, trees, accuracy, training, and outputs.

Everything runs on one thread, in fp32, and greedily unless a temperature is named. Prompts, rounds
and timing are those of the speculative benchmark. Times are CPU times. Counts (tokens per step,
accuracies, bytes, distances between distributions) are the same everywhere up to rounding.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import random
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
from benchmarks.runner import Measurement, case, exact, ratios, seen
from benchmarks.speculative import PLAIN, Wrong
from labcore.attention import traffic
from labcore.data import python_sources
from labcore.decoding.contract import Accepted, Draft, Proposer, SamplingConfig
from labcore.decoding.draft_model import DraftModel
from labcore.decoding.eagle.proposer import Eagle
from labcore.decoding.eagle.shipped import pretrained_eagle
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
    live_states,
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
from labcore.decoding.theory import exact as enumeration
from labcore.decoding.trace import Statistics
from labcore.decoding.verify import VERIFIERS, TypicalAcceptance
from labcore.memory import Meter, estimate
from labcore.models import Llama, LlamaConfig, bits_per_byte, held_out, windows
from labcore.models.fused import FusedLlama
from labcore.models.recipes import RECIPES, corpus, tokens_of
from labcore.optim import AdamW
from labcore.studies.medusa import Trained, mix, predictions, train_both, train_new
from labcore.timing import paired

PAIRS = ((2, 1),)  # widths of the one dense tree of at most five rows
TOP = 10  # ranks
# Chosen before the rounds that judge it: the fastest of an earlier run. The best of many ways in
# the same rounds owes part of its lead to noise.
NAMED, RACES = "Medusa sparse 2", 3
BARS = {"Medusa over plain": 1.1, "most tokens a step of Medusa": 1.6}
EAGLE = "EAGLE-like head"
EAGLE_BARS = {"held-out code": 1.5, "prose": 1.0}  # over plain
TEMPERATURES, THRESHOLDS = (0.0, 0.7, 1.0), (0.09, 0.3)
RATE = 4e-3  # for `projections`; chosen on seed 100 from 0.001 and 0.004
FEWEST = 4  # the tree budget if only one is used
VOCABULARY = 4  # of enumerated models
KINDS = ("code", "prose")  # of held-out texts
TIED = ("low_rank", "tied")  # projections that read the backbone's matrix


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much the cases measure."""

    prompts: int = speculative.FULL.prompts
    tokens: int = speculative.FULL.tokens
    rounds: int = speculative.FULL.rounds
    short: int = speculative.FULL.short
    cost_prompts: int = speculative.FULL.cost_prompts
    # Ways with at most five rows: four drafted tokens and the one that is always read.
    drafts: tuple[int, ...] = (2, 4)
    ngrams: tuple[int, ...] = (2, 4)
    chains: tuple[int, ...] = (2, 3, 4)
    few: tuple[int, ...] = (2, 3, 4)  # nodes of sparse trees
    budgets: tuple[int, ...] = (2, 4, 8, 16, 32, 64)  # nodes of sparse trees of any size
    dense: tuple[tuple[int, ...], ...] = (
        *((2,), (2, 1), (2, 1, 1, 1), (4, 1, 1, 1)),
        *((4, 2, 1, 1), (4, 3, 2, 1)),
    )
    held_out: int = 14  # prompts from a held-out text
    # Trees are built from the heads' accuracy on the target's own continuations of these texts,
    # which are neither prompts nor training data of the target or the heads.
    calibration: int = 64
    contexts: tuple[int, ...] = (64, 512)
    costed: tuple[int, ...] = (2, 3, 4, 8, 16)
    window: int = 256  # tokens per row of states
    # For `projections`.
    steps: int = 80
    rows: int = 4
    warmup: int = 10
    seeds: tuple[int, ...] = (0, 1, 2)
    pieces: int = 16
    # For `training`.
    batch: int = 8
    length: int = 128
    timed: int = 10  # steps
    typical: tuple[int, ...] = (4, 16)  # nodes
    repeats: tuple[int, ...] = (0, 1, 2)
    worlds: int = 5  # seeds of enumerated models
    at_once: tuple[int, ...] = (1, 4, 8, 16)  # requests


FULL = Sizes()
SMALL = Sizes(
    prompts=2, tokens=16, rounds=2, short=6, cost_prompts=2, drafts=(2,), ngrams=(2,),
    chains=(2, 4), few=(2, 3), budgets=(2, 6), dense=((2,), (2, 1, 1, 1)), held_out=2,
    calibration=3, contexts=(4,), costed=(3,), window=16, steps=2, rows=2, warmup=1, seeds=(0, 1),
    pieces=2, batch=2, length=8, timed=2, typical=(3,), repeats=(0, 1), worlds=2, at_once=(1, 3),
)  # fmt: skip


# Heads and trees ---------------------------------------------------------------------------------
@functools.cache
def trained() -> MedusaHeads:
    """Return the heads of this course."""
    return pretrained_heads(speculative.shipped().target)


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


def held_out_rows(kind: str, sizes: Sizes) -> list[list[int]]:
    """Return prompts from a text that no shipped model has seen."""
    return spread(encoded(held_out(kind)), sizes.held_out, sizes.short)


def prompts(kind: str, sizes: Sizes) -> list[list[int]]:
    """Return the course's prompts of a kind."""
    return speculative.rows(kind, sizes.short, sizes.prompts)


def said(given: Sequence[list[int]], tokens: int, temperature: float = 0.0) -> list[list[int]]:
    """Return the target's own output for each prompt."""
    asked = [speculative.settings(tokens, temperature, place) for place in range(len(given))]
    return generate(speculative.shipped().target, list(given), asked).tokens


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
def calibration(sizes: Sizes, temperature: float = 0.0) -> tuple[list[list[int]], list[list[int]]]:
    """Return beginnings of library files held out from training, and the target's continuations."""
    text = python_sources("held_out", max_bytes=5_000 * sizes.calibration).text
    given = spread(encoded(text), sizes.calibration, sizes.short)
    return given, said(given, sizes.tokens, temperature)


@functools.cache
def calibration_states(heads: int, sizes: Sizes, temperature: float) -> list[HiddenStates]:
    """Return the states of the calibration texts for this number of heads."""
    return behind(heads, *calibration(sizes, temperature))


@functools.cache
def calibrated(heads: MedusaHeads, sizes: Sizes, temperature: float = 0.0) -> Tensor:
    """Return the table that trees and their expected lengths are computed from: fp64 [K, TOP]."""
    return pooled(heads, calibration_states(heads.heads, sizes, temperature))


def chains(lengths: Sequence[int]) -> dict[str, Tree]:
    """Return chain trees by name, at most as deep as there are heads."""
    return {f"chain {n}": chain_tree(n) for n in lengths if n <= trained().heads}


def dense(every: Sequence[Sequence[int]]) -> dict[str, Tree]:
    """Return dense trees by name, with their numbers of nodes."""
    trees = [dense_tree(widths) for widths in every if len(widths) <= trained().heads]
    return {f"dense {tree.size}": tree for tree in trees}


def sparse(
    budgets: Sequence[int], sizes: Sizes, heads: MedusaHeads | None = None
) -> dict[str, Tree]:
    """Return trees of the likeliest nodes according to the calibration."""
    table = calibrated(trained() if heads is None else heads, sizes)
    return {f"sparse {n}": sparse_tree(table, n) for n in budgets}


def small_trees(sizes: Sizes) -> dict[str, Tree]:
    """Return the trees of at most five rows."""
    return chains(sizes.chains) | dense(PAIRS) | sparse(sizes.few, sizes)


def proposers(trees: Mapping[str, Tree]) -> dict[str, Proposer]:
    """Return proposers with the shipped heads."""
    return {name: Medusa(trained(), tree) for name, tree in trees.items()}


def about(tree: Tree) -> dict[str, Any]:
    """Describe a tree for a record's details."""
    return {"nodes": tree.size, "depth": tree.depth, "choices": [list(c) for c in tree.choices]}


def about_heads(heads: MedusaHeads) -> dict[str, Any]:
    """Describe the heads for a record's details."""
    names = ("heads", "layers", "projection", "rank")
    return {name: getattr(heads, name) for name in names}


def provenance(sizes: Sizes) -> dict[str, Any]:
    """Describe what the trees were built from."""
    text = f"the target's greedy words behind {sizes.calibration} pieces of held-out library files"
    return {**about_heads(trained()), "calibrated on": text}


def counts_of(
    proposer: Proposer | None,
    given: Sequence[list[int]],
    tokens: int,
    temperature: float = 0.0,
    *,
    verifier: Any = "rejection",
    seed: int = 0,
) -> list[Statistics]:
    """Return the counts of drafted and accepted tokens, row by row."""
    asked = [speculative.settings(tokens, temperature, 1000 * seed + n) for n in range(len(given))]
    model = speculative.shipped().target
    return generate(model, list(given), asked, proposer=proposer, verifier=verifier).per_row


def tokens_per_step(*arguments: Any, **options: Any) -> float:
    """Return the tokens per step over all rows; the arguments are those of `counts_of`."""
    return Statistics.total(counts_of(*arguments, **options)).tokens_per_step


# Decoding ----------------------------------------------------------------------------------------
def decoding(given: Sequence[list[int]], at: str, sizes: Sizes) -> list[Measurement]:
    """Time every way in the same rounds; return speeds, tokens per step and ratios with targets."""
    trees = {f"Medusa {name}": tree for name, tree in small_trees(sizes).items()}
    ways: dict[str, Proposer] = {
        f"n-gram {n}": NGram(speculative.MAXIMUM, 1, gamma=n) for n in sizes.ngrams
    }
    small = speculative.shipped().draft
    ways |= {f"draft {n}": DraftModel(small, gamma=n) for n in sizes.drafts}
    ways["draft model"] = speculative.draft_model()
    ways |= proposers(trees)
    calls = {PLAIN: speculative.ours(None, sizes.tokens)}
    calls |= {name: speculative.ours(proposer, sizes.tokens) for name, proposer in ways.items()}
    outputs = {name: [call(prompt) for prompt in given] for name, call in calls.items()}
    details = {
        **speculative.refuse_wrong(outputs, given),
        **provenance(sizes),
        "tokens of each prompt": [len(prompt) for prompt in given],
        "tokens of each output": sizes.tokens,
        "weights packed in fp16": speculative.packed(),
        "heads packed in fp16": FusedHeads(trained()).packed,
        "dtype": "float32",
    }
    tokens = {name: sum(map(len, found)) for name, found in outputs.items()}
    speeds = speculative.race(calls, given, tokens, sizes.rounds)
    others = {name: samples for name, samples in speeds.items() if name != PLAIN}
    gap = details["largest gap, nats"]
    found = [
        exact(f"largest gap of an output/{at}", "nats", gap, **details),
        seen(f"tokens a second/{at}", "tokens/s", speeds[PLAIN], peers=others, **details),
    ]
    plain_steps = [row.steps for row in counts_of(None, given, sizes.tokens)]
    tokens_a_step = {}
    for name, proposer in ways.items():
        per_row = counts_of(proposer, given, sizes.tokens)
        numbers = speculative.plain_numbers(Statistics.total(per_row))
        numbers |= about(trees[name]) if name in trees else {}
        tokens_a_step[name] = Statistics.total(per_row).tokens_per_step
        shares = ratios([row.steps for row in per_row], plain_steps)
        found += [
            seen(f"tokens a step of {name}/{at}", "tokens", [tokens_a_step[name]], **numbers),
            seen(f"forwards over plain's of {name}/{at}", "ratio", shares, **numbers),
        ]
    most = max(trees, key=lambda name: tokens_a_step[name])
    what = "most tokens a step of Medusa"
    told = {**about(trees[most]), "of": most, "bar": BARS[what]}
    found.append(seen(f"{what}/{at}", "tokens", [tokens_a_step[most]], **told))
    two, what, alone = {name: calls[name] for name in (PLAIN, NAMED)}, "Medusa over plain", []
    for _ in range(RACES):
        race = speculative.race(two, given, tokens, sizes.rounds)
        alone += ratios(race[NAMED], race[PLAIN])
    told = {**details, **about(trees[NAMED]), "of": NAMED, "bar": BARS[what]}
    found.append(seen(f"{what}/{at}", "ratio", alone, **told))
    return found + speed_ratios(speeds, at, details)


def speed_ratios(
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
            found.append(seen(f"{what}/{at}", "ratio", ratios(speeds[of], speeds[beside]), **told))
    return found


@case("decoding/64 tokens of code", minutes=4, needs="cpu")
def decoding_code(sizes: Sizes = FULL) -> list[Measurement]:
    """Plain, n-gram, draft model and Medusa on the course's prompts."""
    return decoding(prompts("code", sizes), f"{sizes.short} tokens of code", sizes)


@case("decoding/64 tokens of held-out code", minutes=2, needs="cpu")
def decoding_held_out(sizes: Sizes = FULL) -> list[Measurement]:
    """The same on pieces of a text that no model has seen."""
    at = f"{sizes.short} tokens of held-out code"
    return decoding(held_out_rows("code", sizes), at, sizes)


# Trees -------------------------------------------------------------------------------------------
@case("trees/tokens", minutes=4)
def tokens_of_trees(sizes: Sizes = FULL) -> list[Measurement]:
    """Tokens per step by tree and temperature, compared with independent heads."""
    given, found = prompts("code", sizes), []
    trees = sparse(sizes.budgets, sizes) | dense(sizes.dense)
    for (name, tree), temperature in itertools.product(trees.items(), TEMPERATURES):
        per_row = counts_of(proposers({name: tree})[name], given, sizes.tokens, temperature)
        expected = expected_tokens(tree, calibrated(trained(), sizes, temperature))
        total, each = Statistics.total(per_row), [x.tokens_per_step for x in per_row]
        at, peer = f"{name}, temperature {temperature:g}", {"expected": [expected]}
        details = {**speculative.plain_numbers(total), **about(tree), **provenance(sizes)}
        found += [
            seen(f"tokens a step/{at}", "tokens", each, peers=peer, **details),
            seen(
                f"tokens a step, measured over expected/{at}",
                "ratio",
                [total.tokens_per_step / expected],
                expected=expected,
                measured=total.tokens_per_step,
            ),
        ]
    return found


@case("trees/forwards", minutes=1, needs="cpu")
def forwards_of_trees(sizes: Sizes = FULL) -> list[Measurement]:
    """v: the target's forward over a tree and the token before it, relative to one token."""
    target, found = FusedLlama(speculative.shipped().target), []
    every = sorted({*sizes.few, *sizes.budgets})
    trees = {n: next(iter(sparse([n], sizes).values())) for n in every}
    for context in sizes.contexts:
        chance = torch.Generator().manual_seed(0)
        width = max(every) + 1
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
            comparison = paired(calls, rounds=10 * sizes.rounds)
        for n, tree in trees.items():
            quantity = f"v/{n + 1} rows, {context} before"
            unit, samples = "forwards over one token", comparison.ratios(f"tree {n}", "plain")
            peer = {"chain of as many": comparison.ratios(f"chain {n}", "plain")}
            found.append(seen(quantity, unit, samples, peers=peer, **about(tree)))
    return found


def forward(model: Any, cache: Any, tokens: Tensor, tree: Tensor | None, before: Tensor) -> None:
    """Run one forward and undo it."""
    model(tokens, cache=cache, tree=tree)
    cache.truncate(before)


# Costs -------------------------------------------------------------------------------------------
@case("cost/64 tokens of code", minutes=3, needs="cpu")
def costs(sizes: Sizes = FULL) -> list[Measurement]:
    """v of each tree, c of its drafts, and tokens per step / (v + c) compared with the speedup."""
    given = speculative.rows("code", sizes.short, sizes.cost_prompts)
    trees = chains(sizes.chains) | dense(PAIRS) | sparse(sizes.costed, sizes)
    drafts: dict[str, Proposer | None] = {PLAIN: None, **proposers(trees)}
    calls = {name: speculative.ours(way, sizes.tokens) for name, way in drafts.items()}
    outputs = {name: [call(prompt) for prompt in given] for name, call in calls.items()}
    speculative.refuse_wrong(outputs, given)
    texts = [prompt + said for prompt, said in zip(given, outputs[PLAIN], strict=True)]
    ways = {PLAIN: speculative.always(None)}
    for name, tree in trees.items():
        ways[name] = speculative.always(drafts[name])
        ways[f"v {name}"] = lambda place, tree=tree: Wrong([texts[place]], tree)  # type: ignore[misc]
    rounds = speculative.steady(ways, given, sizes.tokens, sizes.rounds)
    plain = [x.step for x in rounds[PLAIN]]
    at, found = f"{sizes.short} tokens of code", []
    for name, tree in trees.items():
        v = speculative.verification(rounds[f"v {name}"], plain)
        # Near the end of an output a tree is cut; the cost of fewer nodes is interpolated linearly.
        table = {n: [1 + (x - 1) * n / tree.size for x in v] for n in range(tree.size + 1)}
        drafting = [x.drafting / x.steps / t for x, t in zip(rounds[name], plain, strict=True)]
        _, *rest = speculative.predicted(name, rounds[name], plain, table, at)
        details = {**about(tree), **provenance(sizes), "seconds of a plain step": plain}
        found += [
            seen(f"v/{name}, {at}", "plain steps", v, **details),
            seen(f"c/{name}, {at}", "plain steps a step", drafting, **details),
            *rest,
        ]
    return found


@case("cost/heads", minutes=0.5, needs="cpu")
@torch.inference_mode()
def cost_of_heads(sizes: Sizes = FULL) -> list[Measurement]:
    """A call of the heads for one row, relative to the target's forward of one token.

    Training doesn't change the cost of heads. These are new heads, rounded like those from a file,
    which lets the fused version pack them.
    """
    pair, found = speculative.shipped(), []
    (context, *_), shape = sizes.contexts, trained()
    target = FusedLlama(pair.target)
    chance = torch.Generator().manual_seed(0)
    prompt = torch.randint(target.vocab_size, (1, context), generator=chance)
    cache = target.new_cache(1, context + 1)
    hidden = target(prompt, cache=cache).hidden[:, -1]
    last, before = prompt[:, -1:], torch.tensor([context])
    calls: dict[str, Callable[[], object]] = {
        "plain": functools.partial(forward, target, cache, last, None, before)
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
    comparison = paired(calls, rounds=10 * sizes.rounds)
    for projection, count in every:
        name = f"{projection} {count}"
        quantity = f"heads' forward/{projection}, {count} heads"
        unit, samples = "forwards of the target", comparison.ratios(name, "plain")
        peer = {"MedusaHeads": comparison.ratios(f"MedusaHeads {name}", "plain")}
        told: dict[str, Any] = {"packed": packed[projection, count], "context": context}
        found.append(seen(quantity, unit, samples, peers=peer, **told))
    return found


# Accuracy ----------------------------------------------------------------------------------------
@case("accuracy", minutes=0.5)
def accuracy(sizes: Sizes = FULL) -> list[Measurement]:
    """Top-1 and top-5 accuracy of each head.

    The case also counts the tokens per step of trees if the target's output were a held-out text.
    """
    heads, target, found = trained(), speculative.shipped().target, []
    texts: dict[str, list[HiddenStates]] = {}
    for kind in KINDS:
        row = encoded(held_out(kind))
        length = min(sizes.window, len(row) // 2)
        states = hidden_states(target, row, length=length, ahead=heads.heads + 1)
        texts[f"held-out {kind}"] = [states]
        ranks = label_ranks(heads, states, top=TOP)
        for name, tree in (small_trees(sizes) | sparse(sizes.budgets, sizes)).items():
            steps = [step for row in ranks for step in replay_text(tree, row)]
            settled = statistics.fmean(1 + len(step) for step in steps)
            at = f"held-out {kind}, {name}"
            found.append(
                seen(f"tokens a step of the text/{at}", "tokens", [settled], **about(tree))
            )
        share = float(own_accuracy(target, states))
        found.append(seen(f"top-1/backbone, held-out {kind}", "share", [share]))
    for name, given in (
        ("code", prompts("code", sizes)),
        ("prose", prompts("prose", sizes)),
        ("held-out code", held_out_rows("code", sizes)),
    ):
        outputs = said(given, sizes.tokens)
        texts[f"own words behind {name}"] = behind(heads.heads, given, outputs)
    for text, every in texts.items():
        shares = pooled(heads, every)
        for i, row in enumerate(shares.tolist()):
            told = {
                **about_heads(heads),
                "places": sum(x.tokens.numel() - len(x) * x.ahead for x in every),
                "tokens ahead of the state": i + 2,
                "share of each rank": row,
            }
            found += [
                exact(f"top-1/head {i}, {text}", "share", row[0], **told),
                exact(f"top-5/head {i}, {text}", "share", sum(row[:5]), **told),
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
def slice_of_corpus(tokens: int, pieces: int) -> tuple[int, ...]:
    """Return `tokens` tokens of the target's training data, in pieces from all over it."""
    text = python_sources("train").text
    size = 8 * tokens // pieces + 8  # a token has about three characters
    starts = [place * (len(text) - size) // max(1, pieces - 1) for place in range(pieces)]
    every = [encoded(text[start : start + size])[: tokens // pieces + 1] for start in starts]
    return tuple(itertools.chain.from_iterable(every))[:tokens]


def states_of_corpus(rows: int, length: int, heads: int, pieces: int) -> HiddenStates:
    """Return rows of cached states of the training data."""
    ahead = heads + 1
    target = speculative.shipped().target
    row = slice_of_corpus(rows * length + ahead, pieces)
    return hidden_states(target, list(row), length=length, ahead=ahead)


@case("projections", minutes=5)
def projections(sizes: Sizes = FULL) -> list[Measurement]:
    """Heads that differ only in their projection, after the same short training."""
    shape, target = trained(), speculative.shipped().target
    rows = sizes.steps * sizes.rows
    states = states_of_corpus(rows, sizes.window, shape.heads, sizes.pieces)
    text = encoded(held_out("code"))
    length = min(sizes.window, len(text) // 2)
    judged = [hidden_states(target, text, length=length, ahead=shape.heads + 1)]
    settings = {
        "steps": sizes.steps,
        "rows a step": sizes.rows,
        "tokens a row": sizes.window,
        "rate": RATE,
    }
    found = judge("untrained", [like(shape, target, projection="tied")], judged, sizes, {})
    for projection in PROJECTIONS:
        every, losses = [], []
        for seed in sizes.seeds:
            torch.manual_seed(seed)  # draws a low rank's first factor
            heads = like(shape, target, projection=projection)
            curve = train_heads(
                heads,
                states,
                steps=sizes.steps,
                batch=sizes.rows,
                rate=RATE,
                warmup=sizes.warmup,
                seed=seed,
                progress=False,
            )
            every.append(heads)
            losses.append(statistics.fmean(curve.losses[-max(1, sizes.steps // 10) :]))
        parameters = sum(p.numel() for p in every[0].parameters())
        details = {**about_heads(every[0]), **settings}
        found += [
            exact(f"parameters/{projection}", "parameters", parameters, **details),
            exact(f"stored bytes/{projection}", "bytes", stored_bytes(every[0]), **details),
            seen(f"loss of the last tenth/{projection}", "nats", losses, **details),
            *judge(projection, every, judged, sizes, details),
        ]
    return found


def judge(
    name: str,
    every: Sequence[MedusaHeads],
    judged: Sequence[HiddenStates],
    sizes: Sizes,
    details: Mapping[str, Any],
) -> list[Measurement]:
    """Return accuracies on a held-out text, and tokens per step of each one's own small tree."""
    shares = [pooled(heads, judged) for heads in every]
    found = [
        seen(f"top-1 of head {i}/{name}", "share", [float(x[i, 0]) for x in shares], **details)
        for i in range(every[0].heads)
    ]
    expected, measured, given = [], [], prompts("code", sizes)
    for heads, table in zip(every, shares, strict=True):
        ((_, tree),) = sparse([FEWEST], sizes, heads.eval()).items()
        expected.append(expected_tokens(tree, table))
        proposer = Medusa(heads, tree)
        measured.append(tokens_per_step(proposer, given, sizes.tokens))
    at = f"{name}, sparse {FEWEST}"
    return [
        *found,
        seen(f"expected tokens/{at}", "tokens", expected, **details),
        seen(f"tokens a step/{at}", "tokens", measured, **details),
    ]


def stored_bytes(heads: MedusaHeads) -> int:
    """Return the size of the heads' file in bf16."""
    with tempfile.TemporaryDirectory() as folder:
        save_heads(copy.deepcopy(heads).bfloat16(), folder)
        return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


# Training ----------------------------------------------------------------------------------------
EVERYTHING = "backbone and heads"
WAYS = ("heads on cached states", "heads on the live backbone", EVERYTHING)


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
    backbone.requires_grad_(name == EVERYTHING)
    heads = like(trained(), backbone)
    held = Whole(heads, None if name == WAYS[0] else backbone)
    weights = [p for p in held.parameters() if p.requires_grad]
    optimizer = AdamW(weights, lr=1e-3, weight_decay=0.0)
    index, length = torch.arange(len(states)), states.tokens.shape[1] - states.ahead
    live = replace(states, hidden=None, backbone=backbone)

    def step() -> None:
        optimizer.zero_grad()
        loss: Any = 0.0
        if name == EVERYTHING:
            tokens = states.tokens[index]
            out = backbone(tokens[:, :length])
            hidden, labels = out.hidden, tokens[:, 1 : 1 + length].flatten()
            loss = F.cross_entropy(out.logits.flatten(0, 1), labels)
            del out
        else:
            hidden, tokens = (states if name == WAYS[0] else live).rows(index)
            hidden = hidden.float()
        one_by_one = (heads.head(i, hidden) for i in range(heads.heads))
        (loss + medusa_loss(one_by_one, tokens)[0]).backward()
        optimizer.step()

    return Way(held=held, optimizer=optimizer, step=step)


def kept_of_heads(heads: MedusaHeads, sizes: Sizes) -> int:
    """Count the bytes that the heads' forward keeps for the backward.

    For each position and head these are the inputs of each block's silu, the inputs of later
    products with trained weights, and the log-probabilities. All heads share the states.
    """
    config = heads.config
    width, layers = config.hidden_size, heads.layers
    numbers = layers * width + (layers - 1) * width + config.vocab_size
    numbers += 0 if heads.projection == "tied" else width
    numbers += heads.rank if heads.projection == "low_rank" else 0
    return 4 * sizes.batch * sizes.length * (heads.heads * numbers + width)


def predicted_peak(name: str, way: Way, sizes: Sizes) -> int:
    """Predict the peak: weights, states, what the forward keeps, and extra copies of the logits.

    The backward needs two copies, the gradients of the log-probabilities and of the logits. It
    needs three if two products are added while the previous head's logits still exist. There are no
    weight gradients yet; if they are larger than all that, the peak is in the optimizer's step.
    """
    told = training_bytes(way.trained, way.frozen)
    rest, heads = told["weights"] + told["optimizer states"], way.held.heads
    kept = kept_of_heads(heads, sizes)
    if name == EVERYTHING:
        kept += estimate(heads.config, batch=sizes.batch, length=sizes.length).activations
    logits = 4 * sizes.batch * sizes.length * heads.config.vocab_size
    logits *= 3 if heads.projection == "low_rank" else 2
    return rest + max(kept + logits, told["gradients"])


def flops(name: str, heads: MedusaHeads, sizes: Sizes) -> int:
    """Count the multiplications and additions in a step's matrix products.

    Each gradient of a product costs as much as the product: the weight's if it is trained, and the
    input's if something before it is trained.
    """
    config, tokens = heads.config, sizes.batch * sizes.length
    width, vocab = config.hidden_size, config.vocab_size
    inner = [p for n, p in speculative.shipped().target.layers.named_parameters() if p.dim() == 2]
    matrices = sum(p.numel() for p in inner) + vocab * width
    shape = traffic.Shape(
        batch=sizes.batch,
        heads=config.num_attention_heads,
        kv_heads=config.kv_heads,
        length=sizes.length,
        head_dim=config.head_size,
        is_causal=True,
    )
    attention = config.num_hidden_layers * traffic.flops(shape)
    # Only EVERYTHING needs the states' gradient.
    first = width * width * (3 if name == EVERYTHING else 2)
    each = first + 3 * (heads.layers - 1) * width * width
    each += vocab * width * (2 if heads.projection in TIED else 3)
    each += 3 * heads.rank * (width + vocab) if heads.projection == "low_rank" else 0
    total = 2 * tokens * heads.heads * each
    if name == WAYS[1]:
        total += 2 * tokens * matrices + attention
    elif name == EVERYTHING:
        backward = config.num_hidden_layers * traffic.flops(shape, "backward")
        total += 3 * 2 * tokens * matrices + attention + backward
    return total


@case("training", minutes=1, needs="cpu")
def training(sizes: Sizes = FULL) -> list[Measurement]:
    """Bytes and seconds per step, measured and predicted, and relative to training everything."""
    states = states_of_corpus(sizes.batch, sizes.length, trained().heads, sizes.pieces)
    ways = {name: training_way(name, states) for name in WAYS}
    size = {"batch": sizes.batch, "length": sizes.length, **about_heads(trained())}
    peaks, predicted = {}, {}
    found = []
    for name, way in ways.items():
        with Meter(way.held, way.optimizer) as meter:
            for _ in range(2):
                way.step()
        most, told = meter.most, sum(training_bytes(way.trained, way.frozen).values())
        peaks[name], predicted[name] = meter.peak.total, predicted_peak(name, way, sizes)
        lasting = most.parameters + most.gradients + most.optimizer
        details = {**size, "measured": meter.peak.parts()}
        what = "bytes of weights, gradients and states"
        found += [
            exact(f"trained parameters/{name}", "parameters", way.trained, **details),
            exact(f"{what}/{name}", "bytes", lasting, predicted=told, **details),
            exact(f"peak bytes/{name}", "bytes", peaks[name], predicted=predicted[name], **details),
        ]
    target = speculative.shipped().target
    rows, ahead = states.tokens[:, : -states.ahead], states.ahead

    def read() -> None:
        with torch.no_grad():
            target(rows)

    calls = {name: way.step for name, way in ways.items()} | {"states": read}
    comparison = paired(calls, rounds=sizes.timed, warmup=1)
    counted = {name: flops(name, trained(), sizes) for name in WAYS}
    for name in WAYS:
        details = {**size, "FLOPs": counted[name], "labels ahead": ahead}
        over, expected = (x[name] / x[EVERYTHING] for x in (peaks, predicted))
        times = comparison.ratios(name, EVERYTHING)
        peer = {"predicted": [counted[name] / counted[EVERYTHING]]}
        samples = comparison.timings[name].samples
        found += [
            exact(f"peak over {EVERYTHING}/{name}", "ratio", over, predicted=expected, **details),
            seen(f"seconds a step/{name}", "s", samples, **details),
            seen(f"time over {EVERYTHING}/{name}", "ratio", times, peers=peer, **details),
        ]
    once = comparison.ratios("states", WAYS[0])
    return [*found, seen("computing a batch's states once", f"steps of {WAYS[0]}", once, **size)]


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
def typical(sizes: Sizes = FULL) -> list[Measurement]:
    """Tokens per step that typical acceptance gains over lossless trees, and the bias it costs."""
    given, found = prompts("code", sizes), []
    trees = sparse(sizes.typical, sizes)
    for temperature, (name, tree) in itertools.product(filter(None, TEMPERATURES), trees.items()):
        proposer = proposers({name: tree})[name]
        asked = (proposer, given, sizes.tokens, temperature)
        plain = [tokens_per_step(*asked, seed=seed) for seed in sizes.repeats]
        for threshold in THRESHOLDS:
            rules = [Biased(TypicalAcceptance(threshold=threshold)) for _ in sizes.repeats]
            lossy = [
                tokens_per_step(*asked, verifier=rule, seed=seed)
                for rule, seed in zip(rules, sizes.repeats, strict=True)
            ]
            at = f"temperature {temperature:g}, {name}, threshold {threshold:g}"
            details = {**about(tree), "alpha": rules[0].rule.alpha, **provenance(sizes)}
            away = [rule.distance / rule.tokens for rule in rules]
            peer, gain = {"rejection sampling": plain}, ratios(lossy, plain)
            found += [
                seen(f"tokens a step/{at}", "tokens", lossy, peers=peer, **details),
                seen(f"tokens a step over lossless/{at}", "ratio", gain, **details),
                seen(f"total variation a token/{at}", "probability", away, **details),
            ]
    return found


class TableHeads:
    """Heads that look up their output for each context; `context` is the current one."""

    def __init__(self, heads: int, seed: int) -> None:
        self.heads = heads
        self.context: tuple[int, ...] = ()
        self.config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=2,
            intermediate_size=2,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
        self.tables = [
            enumeration.random_table(VOCABULARY, 1000 + 10 * seed + i) for i in range(heads)
        ]

    def __call__(self, hidden: Tensor, count: int | None = None) -> Tensor:  # noqa: ARG002
        """Return log-probabilities [count, 1, V] for the current context."""
        return torch.stack([table(self.context).log()[None] for table in self.tables[:count]])


def drafted_by(heads: TableHeads, tree: Tree) -> enumeration.Propose:
    """Return Medusa's drafting as a function for enumeration."""
    proposer = Medusa(heads, tree)
    start, asked, chance = (0, 0), [SamplingConfig()], [torch.Generator()]

    def propose(context: tuple[int, ...], draws: Any) -> Draft:  # noqa: ARG001 - nothing is drawn
        heads.context = context
        hidden, most = torch.zeros(1, 2), [tree.depth]
        return proposer.propose([[*start, *context]], asked, most, chance, hidden=hidden)[0]

    return propose


@case("exact", minutes=0.5)
def every_outcome(sizes: Sizes = FULL) -> list[Measurement]:
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
            enumeration.Case(
                enumeration.random_table(VOCABULARY, seed), drafted_by(TableHeads(2, seed), tree), 3
            ).distance(VERIFIERS[rule])
            for seed in range(sizes.worlds)
        ]
        told = {**about(tree), "tokens in all": VOCABULARY, "exact": True}
        found.append(seen(f"total variation/{name}, {rule}", "probability", samples, **told))
    return found


# The EAGLE-like head ------------------------------------------------------------------------------
def eagle_prompts(sizes: Sizes) -> dict[str, list[list[int]]]:
    """Return prompts of `short` tokens by kind."""
    return {
        "code": prompts("code", sizes),
        "held-out code": held_out_rows("code", sizes),
        "prose": held_out_rows("prose", sizes),
        speculative.THIRD_PARTY: prompts(speculative.THIRD_PARTY, sizes),
    }


def eagle_ways(sizes: Sizes) -> dict[str, Proposer]:
    """Return the head with the settings that it ships with, and two Medusa trees beside it."""
    trees = sparse((2, FEWEST), sizes)
    named = {f"Medusa {name}": proposer for name, proposer in proposers(trees).items()}
    return {EAGLE: Eagle(pretrained_eagle(speculative.shipped().target)), **named}


@case("eagle/tokens", minutes=2)
def tokens_of_eagle(sizes: Sizes = FULL) -> list[Measurement]:
    """Count tokens per step on each kind of prompts; temperatures as in `TEMPERATURES`."""
    found, ways = [], eagle_ways(sizes)
    for kind, given in eagle_prompts(sizes).items():
        for temperature in TEMPERATURES:
            for name, proposer in ways.items():
                per_row = counts_of(proposer, given, sizes.tokens, temperature)
                total = Statistics.total(per_row)
                steps = [row.tokens_per_step for row in per_row]
                told = {
                    **speculative.plain_numbers(total),
                    "drafted per step": total.drafted / total.steps,
                }
                at = f"{kind}, temperature {temperature}"
                found.append(seen(f"tokens per step of {name}/{at}", "tokens", steps, **told))
    return found


@case("eagle/speed", minutes=5, needs="cpu")
def speed_of_eagle(sizes: Sizes = FULL) -> list[Measurement]:
    """Race the head against plain decoding and Medusa on each kind of prompts, greedily."""
    found, ways = [], eagle_ways(sizes)
    calls = {PLAIN: speculative.ours(None, sizes.tokens)}
    calls |= {name: speculative.ours(proposer, sizes.tokens) for name, proposer in ways.items()}
    for kind, given in eagle_prompts(sizes).items():
        outputs = {name: [call(prompt) for prompt in given] for name, call in calls.items()}
        details = speculative.refuse_wrong(outputs, given)
        tokens = {name: sum(map(len, said)) for name, said in outputs.items()}
        speeds = speculative.race(calls, given, tokens, sizes.rounds)
        others = {name: samples for name, samples in speeds.items() if name != PLAIN}
        quantity = f"tokens a second/{kind}"
        found.append(seen(quantity, "tokens/s", speeds[PLAIN], peers=others, **details))
        for name, samples in others.items():
            bar = EAGLE_BARS.get(kind) if name == EAGLE else None
            told = details if bar is None else {**details, "bar": bar}
            shares = ratios(samples, speeds[PLAIN])
            found.append(seen(f"{name} over plain/{kind}", "ratio", shares, **told))
    return found


# Requests at once --------------------------------------------------------------------------------
@case("requests", minutes=3, needs="cpu")
def requests(sizes: Sizes = FULL) -> list[Measurement]:
    """Tokens per second of an engine whose slots stay full, with two small trees and without."""
    trees: dict[str, Proposer | None] = {**proposers(sparse((2, FEWEST), sizes))}
    given, found = speculative.requests(speculative.Sizes(prompts=sizes.prompts)), []
    for rows in sizes.at_once:
        engines = {
            name: speculative.Batch(rows, way) for name, way in ({PLAIN: None} | trees).items()
        }
        runs: dict[str, list[speculative.Steady]] = {name: [] for name in engines}
        outputs, dice = {}, random.Random(rows)
        for turn in range(-1, sizes.rounds):  # the first turn warms up
            for name in dice.sample(list(engines), len(engines)):
                outputs[name], full = engines[name].serve(given, sizes.tokens)
                if turn >= 0:
                    runs[name].append(full)
        proved, at = speculative.refuse_wrong(outputs, given), f"{rows} at once"
        plain = [one.speed for one in runs[PLAIN]]
        found += [
            exact(f"largest gap of an output/{at}", "nats", proved["largest gap, nats"], **proved),
            seen(f"tokens per second/plain, {at}", "tokens/s", plain),
        ]
        for name in trees:
            steps = [one.tokens / one.steps / rows for one in runs[name]]
            speeds = ratios([one.speed for one in runs[name]], plain)
            found += [
                seen(f"tokens per step and row/{name}, {at}", "tokens", steps),
                seen(f"speed-up/{name}, {at}", "ratio", speeds),
            ]
    return found


# Predictions -------------------------------------------------------------------------------------
FASTEST = 1e-3  # the heads' learning rate in `unfrozen`, fixed beforehand, as are the next two
SLOWER = 0.25  # the backbone's, over that
PARTS = 8  # of a judged text, for the interval


@case("mixture", minutes=0.5)
def mixture(sizes: Sizes = FULL) -> list[Measurement]:
    """Whether the heads' earlier predictions of a token improve the backbone's own.

    The mixture's weights are tuned on the first half of a held-out text, judged on the second.
    """
    heads, target, found = trained(), speculative.shipped().target, []
    for kind in KINDS:
        text = encoded(held_out(kind))
        length = min(sizes.window, len(text) // 4)
        chances = predictions(target, heads, text, length=length)
        tuned, judged = chances.tensor_split(2)
        parts = [mix(tuned, part) for part in judged.tensor_split(min(PARTS, len(judged)))]
        at = f"held-out {kind}"
        weights: dict[str, Any] = {"weights, the backbone's first": list(parts[0].weights)}
        found += [
            seen(f"nats per token, backbone alone/{at}", "nats", [x.alone for x in parts]),
            seen(
                f"nats per token, mixed minus alone/{at}",
                "nats",
                [x.mixed - x.alone for x in parts],
                **weights,
            ),
            exact(f"the backbone's weight/{at}", "share", parts[0].weights[0], **weights),
        ]
    return found


@case("unfrozen", minutes=5)
def unfrozen(sizes: Sizes = FULL) -> list[Measurement]:
    """What the shipped heads gain if the backbone is trained on with them, and what it becomes.

    Both forms train for the same steps on the same batches, from the shipped weights.
    """
    pair, heads = speculative.shipped(), trained()
    ahead, rows = heads.heads + 1, sizes.steps * sizes.rows
    row = list(slice_of_corpus(rows * sizes.window + ahead, sizes.pieces))
    states = live_states(pair.target, row, length=sizes.window, ahead=ahead)
    settings: dict[str, Any] = {
        "steps": sizes.steps,
        "rows per step": sizes.rows,
        "rate": FASTEST,
    }
    gains: dict[str, list[float]] = {}
    for seed in sizes.seeds:
        numbers = []
        for slower in (None, SLOWER):
            both = train_both(
                pair.target,
                heads,
                states,
                steps=sizes.steps,
                batch=sizes.rows,
                rate=FASTEST,
                slower=slower,
                seed=seed,
            )
            numbers.append(after_training(both, sizes))
        for name, frozen in numbers[0].items():
            gains.setdefault(name, []).append(numbers[1][name] - frozen)
            gains.setdefault(f"{name}, frozen", []).append(frozen)
    return [
        seen(
            name if name.endswith("frozen") else f"{name}, unfrozen minus frozen",
            "bits per byte" if name.startswith("bits") else "share",
            samples,
            **settings,
        )
        for name, samples in gains.items()
    ]


def after_training(both: Trained, sizes: Sizes) -> dict[str, float]:
    """Return the heads' top-1 on held-out texts and the backbone's bits per byte there."""
    found: dict[str, float] = {}
    for kind in KINDS:
        text = encoded(held_out(kind))
        length = min(sizes.window, len(text) // 2)
        ahead = both.heads.heads + 1
        judged = hidden_states(both.backbone, text, length=length, ahead=ahead)
        shares = head_accuracies(both.heads, judged, top=TOP)
        for i in range(both.heads.heads):
            found[f"top-1 of head {i}/held-out {kind}"] = float(shares[i, 0])
        bits = bits_per_byte(both.backbone, held_out(kind), speculative.shipped().tokenizer)
        found[f"bits per byte of the backbone/held-out {kind}"] = bits
    return found


# Multi-token prediction --------------------------------------------------------------------------
GUESSED = 3  # tokens after the next: four in all, as Gloeckle et al. recommend
LONGER = 30  # times `steps` and `warmup`, because the model starts from nothing


@case("mtp", minutes=20)
def multi_token_prediction(sizes: Sizes = FULL) -> list[Measurement]:
    """A model trained from scratch with its heads, and one alone that gets its heads afterward.

    Both read the same batches, from the same first weights. Rate, decay, clipping and schedule are
    those of the shipped draft; the heads' rate is the same, and that of `projections`.
    """
    pair, length = speculative.shipped(), sizes.length
    recipe = replace(
        RECIPES["draft"], config=replace(pair.draft.config, max_position_embeddings=length),
        steps=LONGER * sizes.steps, warmup=LONGER * sizes.warmup, batch=sizes.rows, length=length,
        long_steps=0, long_length=length,
    )  # fmt: skip
    text, count = tokens_of(corpus(), pair.tokenizer), recipe.steps * recipe.batch
    rows, _ = windows(text, batch=count, length=length + GUESSED)(0)  # each is read once
    trained_in = functools.partial(train_new, rows, recipe, heads=GUESSED)
    judged_in = replace(sizes, window=length)
    ways = [
        [after_training(trained_in(joint=way, seed=seed), judged_in) for seed in sizes.seeds]
        for way in (True, False)
    ]
    told = {name: getattr(recipe, name) for name in ("steps", "batch", "length", "rate", "warmup")}
    found = []
    for name in ways[0][0]:
        what, kind = name.split("/held-out ")
        form, unit, scale = "frozen", "share", 1.0
        if what.startswith("bits"):
            scale = math.log(2) * len(held_out(kind).encode()) / len(encoded(held_out(kind)))
            what, form, unit = "nats per token of the model", "alone", "nats"
        joint, apart = ([scale * one[name] for one in way] for way in ways)
        gains = [a - b for a, b in zip(joint, apart, strict=True)]
        for samples, of in ((apart, form), (gains, f"joint minus {form}")):
            found.append(seen(f"{what}/held-out {kind}, {of}", unit, samples, **told))
    return found
