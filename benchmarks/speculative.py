"""Speculative decoding with the shipped models, against transformers: speed, costs, acceptance.

Everything runs on one thread, in fp32, and greedily unless a temperature is named. Times are CPU
times. Counts (acceptance, tokens per step, distances between distributions) are the same everywhere
up to rounding.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.runner import Measurement, case, exact, ratios, seen
from labcore.data import installed_prompts, installed_sources
from labcore.decoding.audit import near_tie_audit
from labcore.decoding.contract import Accepted, Draft, Proposer, SamplingConfig
from labcore.decoding.decoders import as_decoder
from labcore.decoding.draft_model import DraftModel
from labcore.decoding.eagle.proposer import Eagle
from labcore.decoding.eagle.shipped import pretrained_eagle
from labcore.decoding.generation import generate, stream
from labcore.decoding.medusa.heads import MedusaHeads
from labcore.decoding.medusa.proposer import Medusa
from labcore.decoding.medusa.shipped import pretrained_heads
from labcore.decoding.medusa.trees import Tree, chain_tree
from labcore.decoding.ngram import NGram
from labcore.decoding.proposers import Adaptive, Gated
from labcore.decoding.sampling import probabilities
from labcore.decoding.suffix import Suffix
from labcore.decoding.theory import exact as enumeration
from labcore.decoding.theory import speedup
from labcore.decoding.theory.overlap import one_token
from labcore.decoding.trace import Statistics
from labcore.decoding.verify import VERIFIERS, TypicalAcceptance, rejection_sampling
from labcore.models import DenseCache, Llama, Tokenizer, save_pretrained
from labcore.models.fused import FusedLlama
from labcore.models.shipped import (
    bits_per_byte,
    held_out,
    pretrained,
    prompts,
    shipped_tokenizer,
)
from labcore.serving.engine.engine import Engine
from labcore.timing import paired

CONSTANT = 4  # the draft length that is compared with transformers'
MAXIMUM = 3  # the longest n
CONFIDENCE = 0.4  # transformers' default threshold
GAP = 1e-3  # nats: a near tie
# Target ratios, by the quantity's first words and the kind of prompts.
BARS = {
    ("plain over transformers' plain", "code"): 1.5,
    ("draft over transformers' assisted", "code"): 1.8,
    ("best draft over plain", "code"): 1.15,
    ("n-gram over transformers' lookup", "code"): 1.5,
    ("n-gram over transformers' lookup", "long_code"): 1.5,
    ("best n-gram over plain", "long_code"): 1.1,
}
SHARES, GUESSES = (0.2, 0.4, 0.6, 0.8), 4  # of right guesses, and guesses per step
WITHIN = 0.15  # tolerance between a measured speedup and its prediction
TEMPERATURES, SEEDS = (0.0, 0.5, 1.0), (0, 1, 2, 3, 4)
THIRD_PARTY = "third-party code"
KINDS = ("copy", "code", "prose")
VOCABULARY = 4  # of the random models whose distributions are enumerated
SIBLINGS = 4  # tokens on one level of a tree


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much the cases measure."""

    prompts: int = 12  # at most, of each kind
    tokens: int = 128  # of each output
    rounds: int = 5
    short: int = 64  # tokens of a prompt
    long: int = 512
    drafts: tuple[int, ...] = (1, 2, 3, 4, 5)  # draft lengths of the draft model
    ngrams: tuple[int, ...] = (2, 4, 8)  # lengths of n-gram drafts
    adaptive: int = 8  # the longest draft if the length adapts
    cost_prompts: int = 4
    forwards: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)  # tokens of a forward
    contexts: tuple[int, ...] = (64, 512)  # tokens before it
    lengths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)  # draft lengths whose acceptance is counted
    bursty: int = 4  # the one of which P(accepted | the one before) is counted
    read: int = 200_000  # the most characters of a text whose bits are counted
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)  # rows
    batch_tokens: int = 64  # of each output in a batch
    batch_rounds: int = 7
    wrong: tuple[int, ...] = (1, 2, 4, 8)  # lengths of wrong drafts in a batch
    outputs: int = 4  # of the same prompt, for a memory
    maxima: tuple[int, ...] = (1, 2, 3, 5)  # longest n of a lookup
    slacks: tuple[int, ...] = (0, 1, 2, 3)
    thresholds: tuple[float, ...] = (0.03, 0.09, 0.3)
    blocks: tuple[int, ...] = (2, 4, 8)  # draft lengths that are verified as blocks
    tables: int = 20  # random models whose distributions are enumerated
    worlds: int = 5  # seeds of the enumerated cases, and of typical acceptance's texts


FULL = Sizes()
SMALL = Sizes(
    prompts=2, tokens=12, rounds=2, short=6, long=16, drafts=(1, 4), ngrams=(2,), adaptive=4,
    cost_prompts=2, forwards=(1, 2), contexts=(4,), lengths=(1, 3), bursty=3,
    read=300, batches=(1, 3), batch_tokens=12, batch_rounds=2, wrong=(1, 4), outputs=2,
    maxima=(1, 3), slacks=(0, 1), thresholds=(0.09,), blocks=(3,), tables=2,
)  # fmt: skip

PLAIN, PEER = "labcore plain", "transformers plain"
Decode = Callable[[list[int]], list[int]]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Target and draft."""

    target: Llama
    draft: Llama
    tokenizer: Tokenizer


@functools.cache
def shipped() -> Pair:
    """Return the models of this course."""
    return Pair(
        target=pretrained("target"), draft=pretrained("draft"), tokenizer=shipped_tokenizer()
    )


def packed() -> bool:
    """Return whether the target's fused form, which `generate` chooses, reads weights in fp16."""
    return FusedLlama(shipped().target).packed


def draft_model() -> DraftModel:
    """Return drafts by the draft model as one would use them: while it's confident."""
    return DraftModel(shipped().draft, gamma=6, confidence=CONFIDENCE)


def rows(kind: str, length: int, count: int) -> list[list[int]]:
    """Return the last `length` tokens of the first `count` prompts of a kind."""
    texts = installed_prompts(count) if kind == THIRD_PARTY else prompts(kind)[:count]
    return [shipped().tokenizer.encode(text)[-length:] for text in texts]


def origin(kind: str) -> dict[str, Any]:
    """Return where prompts of a kind come from, for a record's details."""
    if kind != THIRD_PARTY:
        return {"kind of prompts": kind}
    files = [f"{x.package} {x.version}, {x.file}, {x.sha256}" for x in installed_sources()]
    return {"kind of prompts": kind, "package, file and SHA-256": files}


def settings(tokens: int, temperature: float = 0.0, seed: int = 0) -> SamplingConfig:
    """Return the sampling settings of every request here."""
    return SamplingConfig(temperature=temperature, max_tokens=tokens, seed=seed)


def ours(proposer: Proposer | None, tokens: int) -> Decode:
    """Return greedy decoding by labcore, one prompt at a time."""
    # Chosen once: to see whether a Llama has changed takes as long as several tokens.
    target = as_decoder(shipped().target)

    def decode(prompt: list[int]) -> list[int]:
        return generate(target, [prompt], settings(tokens), proposer=proposer).tokens[0]

    return decode


def of_transformers(model: Llama) -> Any:
    """Load the same weights in transformers."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, folder)
        peer = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return peer.eval()


def theirs(model: Any, tokens: int, **options: Any) -> Decode:
    """Return greedy decoding by transformers' generate."""

    def decode(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        asked = {"do_sample": False, "max_new_tokens": tokens, "pad_token_id": 0, **options}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **asked)
        return [int(token) for token in out[0, len(prompt) :]]

    return decode


def draft_models(sizes: Sizes) -> dict[str, Proposer]:
    """Return the draft model, and beside it drafts of constant lengths and one that adapts."""
    small = shipped().draft
    found: dict[str, Proposer] = {f"draft {n}": DraftModel(small, gamma=n) for n in sizes.drafts}
    found["draft adaptive"] = Adaptive(DraftModel(small, gamma=sizes.adaptive), start=2)
    return found | {"draft model": draft_model()}


def ngrams(sizes: Sizes) -> dict[str, Proposer]:
    """Return n-gram proposers."""
    return {f"n-gram {n}": NGram(MAXIMUM, 1, gamma=n) for n in sizes.ngrams}


def suffixes(sizes: Sizes) -> dict[str, Proposer]:
    """Return suffix decoding without a memory, because each round decodes the same prompts."""
    return {f"suffix {sizes.adaptive}": Suffix(gamma=sizes.adaptive, memory=0)}


def peers(model: Any, sizes: Sizes, *, drafts: bool) -> dict[str, Decode]:
    """Return transformers' own methods, with the same draft lengths."""
    found = {PEER: theirs(model, sizes.tokens)}
    if drafts:
        small = of_transformers(shipped().draft)
        small.generation_config.num_assistant_tokens = CONSTANT
        small.generation_config.num_assistant_tokens_schedule = "constant"
        small.generation_config.assistant_confidence_threshold = 0.0  # or it drafts fewer
        assisted = theirs(model, sizes.tokens, assistant_model=small)
        found[f"transformers assisted {CONSTANT}"] = assisted
    for length in sizes.ngrams:
        options = {"prompt_lookup_num_tokens": length, "max_matching_ngram_size": MAXIMUM}
        found[f"transformers lookup {length}"] = theirs(model, sizes.tokens, **options)
    return found


def refuse_wrong(
    outputs: Mapping[str, list[list[int]]], given: Sequence[list[int]]
) -> dict[str, Any]:
    """Check that each output is greedy: equal to the plain one, or different only by near ties.

    Raises RuntimeError for a wrong output, which must not be timed.
    """
    same, worst = {}, 0.0
    for name, found in outputs.items():
        same[name] = 0
        for prompt, tokens, plain in zip(given, found, outputs[PLAIN], strict=True):
            same[name] += tokens == plain
            if tokens == plain and name != PLAIN:
                continue
            audit = near_tie_audit(shipped().target, prompt, tokens, gap=GAP)
            if not audit.passed:
                raise RuntimeError(
                    f"each output must be greedy up to near ties of {GAP} nats, got a gap of "
                    f"{audit.worst:.3g} nats from {name}"
                )
            worst = max(worst, audit.worst)
    return {"prompts": len(given), "identical to plain": same, "largest gap, nats": worst}


def counted(proposer: Proposer | None, given: Sequence[list[int]], tokens: int) -> Statistics:
    """Return the counts of a proposer's drafted and accepted tokens in greedy decoding."""
    target = shipped().target
    return generate(target, list(given), settings(tokens), proposer=proposer).statistics


def steps_of(model: Any, decode: Decode, given: Sequence[list[int]]) -> int:
    """Return how many forwards of a transformers model it takes to continue all prompts."""
    forwards = 0

    def note(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    hook = model.register_forward_hook(note)
    try:
        for prompt in given:
            decode(prompt)
    finally:
        hook.remove()
    return forwards


def plain_numbers(found: Statistics) -> dict[str, Any]:
    """Return counts for a record's details, with None for an undefined fraction."""
    every = {
        "acceptance rate": found.acceptance_rate,
        "alpha": found.alpha,
        "tokens a step": found.tokens_per_step,
        "steps": float(found.steps),
        "drafted": float(found.drafted),
        "tokens": float(found.tokens),
    }
    return {name: None if math.isnan(value) else value for name, value in every.items()}


def race(
    calls: Mapping[str, Decode], given: Sequence[list[int]], tokens: Mapping[str, int], rounds: int
) -> dict[str, list[float]]:
    """Return each way's tokens per second, round by round: all ways on every prompt, shuffled.

    tokens: number of tokens that each way generates for all prompts.
    """
    seconds = {name: [0.0] * rounds for name in calls}
    for place, prompt in enumerate(given):
        comparison = paired(
            {name: functools.partial(call, prompt) for name, call in calls.items()},
            rounds=rounds,
            warmup=1,
            seed=place,
        )
        for name, timing in comparison.timings.items():
            for turn, sample in enumerate(timing.samples):
                seconds[name][turn] += sample
    return {name: [tokens[name] / sample for sample in seconds[name]] for name in calls}


def decoding(kind: str, length: int, sizes: Sizes, *, drafts: bool) -> list[Measurement]:
    """Time every way in the same rounds, then return the ratios with targets."""
    given = rows(kind, length, sizes.prompts)
    model = of_transformers(shipped().target)
    proposers = {**(draft_models(sizes) if drafts else {}), **ngrams(sizes), **suffixes(sizes)}
    calls = {PLAIN: ours(None, sizes.tokens)}
    calls |= {f"labcore {n}": ours(p, sizes.tokens) for n, p in proposers.items()}
    others = peers(model, sizes, drafts=drafts)
    calls |= others
    outputs = {name: [call(prompt) for prompt in given] for name, call in calls.items()}
    details = {
        **refuse_wrong(outputs, given),
        "tokens of each prompt": [len(prompt) for prompt in given],
        **origin(kind),
        "tokens of each output": sizes.tokens,
        "weights packed in fp16": packed(),
        "dtype": "float32",
    }
    tokens = {name: sum(map(len, found)) for name, found in outputs.items()}
    speeds = race(calls, given, tokens, sizes.rounds)
    others_speeds = {name: samples for name, samples in speeds.items() if name != PLAIN}
    at, gap = f"{length} tokens of {kind}", details["largest gap, nats"]
    found = [
        exact(f"largest gap of an output/{at}", "nats", gap, **details),
        seen(f"tokens a second/{at}", "tokens/s", speeds[PLAIN], peers=others_speeds, **details),
    ]
    for name, proposer in proposers.items():
        numbers = plain_numbers(counted(proposer, given, sizes.tokens))
        samples, told = [numbers["tokens a step"] or 0.0], {**details, **numbers}
        found.append(seen(f"tokens a step of labcore {name}/{at}", "tokens", samples, **told))
    for name, call in others.items():
        samples = [tokens[name] / steps_of(model, call, given)]
        told = {**details, "steps": "all forwards of the target, the prompt's included"}
        found.append(seen(f"tokens a step of {name}/{at}", "tokens", samples, **told))
    return found + speed_ratios(speeds, kind, at, details, lookups=sizes.ngrams, drafts=drafts)


def speed_ratios(
    speeds: Mapping[str, list[float]],
    kind: str,
    at: str,
    details: Mapping[str, Any],
    *,
    lookups: Sequence[int],
    drafts: bool,
) -> list[Measurement]:
    """Return ratios of two ways' speeds, round by round, with their targets."""

    def best(family: str) -> str:
        ways = [name for name in speeds if name.startswith(f"labcore {family}")]
        return max(ways, key=lambda name: statistics.median(speeds[name]))

    def over(what: str, name: str, other: str, suffix: str = "") -> Measurement:
        bar = BARS.get((what, kind))
        told = {**details, "of": name, "over": other, **({"bar": bar} if bar else {})}
        samples = ratios(speeds[name], speeds[other])
        return seen(f"{what}{suffix}/{at}", "ratio", samples, **told)

    found = [over("plain over transformers' plain", PLAIN, PEER)]
    if drafts:
        assisted = f"transformers assisted {CONSTANT}"
        pair = (f"labcore draft {CONSTANT}", assisted)
        found.append(over("draft over transformers' assisted", *pair, suffix=f" of {CONSTANT}"))
        found.append(over("best draft over plain", best("draft"), PLAIN))
    found.append(over("best n-gram over plain", best("n-gram"), PLAIN))
    found.append(over("suffix over plain", best("suffix"), PLAIN))
    found.append(over("suffix over best n-gram", best("suffix"), best("n-gram")))
    for n in lookups:
        pair = (f"labcore n-gram {n}", f"transformers lookup {n}")
        found.append(over("n-gram over transformers' lookup", *pair, suffix=f" of {n}"))
    return found


@case("decoding/64 tokens of code", minutes=6, needs="cpu")
def decoding_short(sizes: Sizes = FULL) -> list[Measurement]:
    """Plain, draft model and n-gram, ours and transformers', after short prompts."""
    return decoding("code", sizes.short, sizes, drafts=True)


@case("decoding/512 tokens of code", minutes=4, needs="cpu")
def decoding_long(sizes: Sizes = FULL) -> list[Measurement]:
    """N-gram with more text to look up."""
    return decoding("long_code", sizes.long, sizes, drafts=False)


@case("decoding/64 tokens of third-party code", minutes=6, needs="cpu")
def decoding_third_party(sizes: Sizes = FULL) -> list[Measurement]:
    """The same as after short prompts, on packages that no model of this course has seen."""
    return decoding(THIRD_PARTY, sizes.short, sizes, drafts=True)


@case("decoding/512 tokens of third-party code", minutes=4, needs="cpu")
def decoding_third_party_long(sizes: Sizes = FULL) -> list[Measurement]:
    """The same as after long prompts."""
    return decoding(THIRD_PARTY, sizes.long, sizes, drafts=False)


class Metered:
    """A proposer whose time and drafts are recorded."""

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner
        self.reads_hidden = getattr(inner, "reads_hidden", True)
        if hasattr(inner, "observe"):  # whoever asks sees whether this proposer does
            self.observe = functools.partial(self._timed, inner.observe)
        self.forget()

    def forget(self) -> None:
        """Reset the counts."""
        self.seconds = 0.0
        self.sizes: list[list[int]] = []  # for each step, the draft length of each row
        self.accepted: list[list[int]] = []

    def propose(self, *arguments: Any, **options: Any) -> list[Draft]:
        """Call the inner proposer."""
        drafts: list[Draft] = self._timed(self.inner.propose, *arguments, **options)
        self.sizes.append([len(draft) for draft in drafts])
        return drafts

    def commit(self, accepted: Sequence[Accepted]) -> None:
        """Call the inner proposer."""
        self._timed(self.inner.commit, accepted)
        self.accepted.append([len(one.path) for one in accepted])

    def _timed(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        found = call(*arguments, **options)
        self.seconds += time.perf_counter() - begin
        return found

    def outcomes(self) -> list[list[bool]]:
        """Return, for each row, which judged tokens were accepted, without the row's last step."""
        found = []
        by_row = (zip(*steps, strict=True) for steps in (self.sizes, self.accepted))
        for sizes, accepted in zip(*by_row, strict=True):
            last = max((step for step, size in enumerate(sizes) if size), default=0)
            found.append(speedup.judged(accepted[:last], sizes[:last]))
        return found


class Free:
    """Drafts that cost no model's pass, because the target's outputs are known.

    texts: prompts, each with the target's output. A subclass drafts one row at a time.
    """

    def __init__(self, texts: Sequence[list[int]]) -> None:
        self.texts, self.vocab = texts, shipped().target.config.vocab_size

    def draft(self, row: list[int], most: int) -> Draft:
        """Return a draft after `row` of depth at most `most`."""
        raise NotImplementedError

    def propose(
        self,
        contexts: Sequence[Sequence[int]],
        samplings: Sequence[SamplingConfig],  # noqa: ARG002 - part of the protocol
        max_tokens: Sequence[int],
        generators: Sequence[torch.Generator],  # noqa: ARG002
        *,
        hidden: Tensor | None = None,  # noqa: ARG002
    ) -> list[Draft]:
        """Return a draft per row."""
        pairs = zip(contexts, max_tokens, strict=True)
        return [self.draft(list(context), most) for context, most in pairs]

    def commit(self, accepted: Sequence[Accepted]) -> None:
        """Do nothing."""


class Wrong(Free):
    """Trees of one shape whose first tokens are always wrong: neighbors of the right one."""

    def __init__(self, texts: Sequence[list[int]], tree: Tree) -> None:
        super().__init__(texts)
        self.depth = tree.depth
        cuts = [tree.cut(depth) for depth in range(tree.depth + 1)]
        self.ranks = [torch.tensor(cut.ranks, dtype=torch.int64) for cut in cuts]
        self.parents = [torch.tensor(cut.parents, dtype=torch.int32) for cut in cuts]

    def draft(self, row: list[int], most: int) -> Draft:
        """Return the tree, or an empty one past the end of the known output."""
        size = len(row)
        right = [text[size] for text in self.texts if size < len(text) and text[:size] == row]
        depth = min(self.depth, most) if right else 0
        tokens = (self.ranks[depth] + 1 + right[0]) % self.vocab if right else self.ranks[0]
        return Draft(tokens, self.parents[depth])


class Spoiled(Free):
    """Chains of the right tokens, each replaced by a wrong one by chance.

    share: the probability that a token stays right.
    """

    def __init__(self, texts: Sequence[list[int]], length: int, share: float) -> None:
        super().__init__(texts)
        self.length, self.share = length, share

    def draft(self, row: list[int], most: int) -> Draft:
        """Return the output's next tokens, spoiled in the same way when a context recurs."""
        size = len(row)
        known = next(text for text in self.texts if text[:size] == row)
        dice = random.Random(str(row))
        right = known[size : size + min(self.length, most)]
        return Draft.chain([(t + (dice.random() >= self.share)) % self.vocab for t in right])


@dataclass(kw_only=True)
class Steady:
    """Steps of some outputs in which all rows decoded, so without the prompts' forwards."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    drafting: float = 0.0
    sizes: list[float] = field(default_factory=list)  # drafted per row, in each step

    @property
    def step(self) -> float:
        """Seconds per step."""
        return self.seconds / self.steps

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def run(self, prompt: list[int], proposer: Proposer | None, tokens: int) -> None:
        """Add one output; with wrong drafts, only the steps that have room for a whole draft."""
        room = tokens - 1 - proposer.depth if isinstance(proposer, Wrong) else None
        meter = None if proposer is None else Metered(proposer)
        blocks = stream(shipped().target, prompt, settings(tokens), proposer=meter)
        next(blocks)
        if meter is not None:
            meter.forget()
        begin = time.perf_counter()
        lengths = [len(block) for block in itertools.islice(blocks, room)]
        self.seconds += time.perf_counter() - begin
        self.tokens += sum(lengths)
        self.steps += len(lengths)
        self.drafting += 0.0 if meter is None else meter.seconds
        self.sizes += [0] * len(lengths) if meter is None else [size for (size,) in meter.sizes]


def steady(
    ways: Mapping[str, Callable[[int], Proposer | None]],
    given: Sequence[list[int]],
    tokens: int,
    rounds: int,
) -> dict[str, list[Steady]]:
    """Run every way on every prompt, in shuffled order; return a `Steady` per round.

    ways: functions of the prompt's index, because some proposers know the output.
    """
    dice, found = random.Random(0), {name: [Steady() for _ in range(rounds)] for name in ways}
    for turn in range(-1, rounds):  # the first turn warms up
        for place, prompt in enumerate(given):
            for name in dice.sample(list(ways), len(ways)):
                into = found[name][turn] if turn >= 0 else Steady()
                into.run(prompt, ways[name](place), tokens)
    return found


def always(proposer: Proposer | None) -> Callable[[int], Proposer | None]:
    """Use the same proposer for every prompt."""
    return lambda place: proposer  # noqa: ARG005


def costs(kind: str, length: int, proposers: Mapping[str, Any], sizes: Sizes) -> list[Measurement]:
    """Measure v for each number of tokens and the cost of drafting, and predict speedups."""
    given = rows(kind, length, sizes.cost_prompts)
    plain = ours(None, sizes.tokens)
    texts = [prompt + plain(prompt) for prompt in given]
    longest = max(proposer.gamma for proposer in proposers.values())
    ways: dict[str, Callable[[int], Proposer | None]] = {PLAIN: always(None)}
    for size in range(1, longest + 1):
        ways[f"v {size}"] = lambda place, size=size: Wrong([texts[place]], chain_tree(size))  # type: ignore[misc]
    ways |= {name: always(proposer) for name, proposer in proposers.items()}
    rounds = steady(ways, given, sizes.tokens, sizes.rounds)
    at = f"{length} tokens of {kind}"
    one = [x.step for x in rounds[PLAIN]]
    table = {n: verification(rounds[f"v {n}"], one) for n in range(1, longest + 1)}
    told: dict[str, Any] = {"seconds of a plain step": one, "packed": packed()}
    found = [
        seen(f"v/{size + 1} tokens behind {at}", "plain steps", samples, **told)
        for size, samples in table.items()
    ]
    table[0] = [1.0] * sizes.rounds
    for name in proposers:
        found += predicted(name, rounds[name], one, table, at)
    return found


def verification(rounds: Sequence[Steady], plain: Sequence[float]) -> list[float]:
    """Return the cost of a step with a wrong draft, in plain steps, round by round.

    After an output that ended early there is no draft: the step is plain.
    """
    return [
        (x.seconds - x.sizes.count(0) * t) / max(1, x.steps - x.sizes.count(0)) / t
        for x, t in zip(rounds, plain, strict=True)
    ]


def predicted(
    name: str,
    rounds: Sequence[Steady],
    one: Sequence[float],
    v: Mapping[int, Sequence[float]],
    at: str,
) -> list[Measurement]:
    """Return a way's drafting cost, and its measured and predicted speedup.

    The prediction is tokens per step / (v + drafting cost). one: seconds per plain step. v: the
    cost of verifying a draft of that length, in plain steps. Both are round by round.
    """
    drafting = [x.drafting / x.steps / t for x, t in zip(rounds, one, strict=True)]
    drafted = [max(1, sum(x.sizes)) / x.steps for x in rounds]
    verifying = [
        statistics.fmean(v[int(size)][turn] for size in x.sizes) for turn, x in enumerate(rounds)
    ]
    measured = [x.tokens / x.seconds * t for x, t in zip(rounds, one, strict=True)]
    expected = [
        x.tokens / x.steps / (a + b) for x, a, b in zip(rounds, verifying, drafting, strict=True)
    ]
    details: dict[str, Any] = {
        "tokens a step": rounds[0].tokens / rounds[0].steps,
        "drafted a step": drafted[0],
        "v of its steps": statistics.median(verifying),
        "cost of drafting a step": statistics.median(drafting),
        "seconds per drafted token": rounds[0].drafting / max(1, sum(rounds[0].sizes)),
    }
    tokens_a_step = [x.tokens / x.steps for x in rounds]

    def ratio(what: str, samples: Sequence[float], **more: Any) -> Measurement:
        return seen(f"{what}/{name}, {at}", "ratio", samples, **details, **more)

    unit = "plain steps a drafted token"
    return [
        seen(f"c/{name}, {at}", unit, ratios(drafting, drafted), **details),
        ratio("speed-up", measured, peers={"predicted": expected}),
        ratio("tokens a step over speed-up", ratios(tokens_a_step, measured)),
        ratio("speed-up, predicted over measured", ratios(expected, measured), within=WITHIN),
    ]


@case("cost/64 tokens of code", minutes=2.5, needs="cpu")
def cost_short(sizes: Sizes = FULL) -> list[Measurement]:
    """Costs and predictions for drafts of all lengths."""
    ways = {**draft_models(sizes), **ngrams(sizes), **suffixes(sizes)}
    return costs("code", sizes.short, ways, sizes)


@case("cost/64 tokens of prose", minutes=2, needs="cpu")
def cost_prose(sizes: Sizes = FULL) -> list[Measurement]:
    """The same after prose, for the draft model and one draft length each."""
    ways: dict[str, Proposer] = {
        "draft model": draft_model(),
        f"draft {CONSTANT}": DraftModel(shipped().draft, gamma=CONSTANT),
        f"n-gram {CONSTANT}": NGram(MAXIMUM, 1, gamma=CONSTANT),
        **suffixes(sizes),
    }
    return costs("prose", sizes.short, ways, sizes)


@case("cost/512 tokens of code", minutes=1.5, needs="cpu")
def cost_long(sizes: Sizes = FULL) -> list[Measurement]:
    """The same for lookups after long prompts."""
    return costs("long_code", sizes.long, {**ngrams(sizes), **suffixes(sizes)}, sizes)


@case("cost/512 tokens of copy", minutes=1.5, needs="cpu")
def cost_copy(sizes: Sizes = FULL) -> list[Measurement]:
    """The same for lookups where the output repeats the prompt."""
    return costs("copy", sizes.long, {**ngrams(sizes), **suffixes(sizes)}, sizes)


@case("cost/64 tokens of third-party code", minutes=2.5, needs="cpu")
def cost_third_party(sizes: Sizes = FULL) -> list[Measurement]:
    """The same as after code, on packages that no model of this course has seen."""
    ways = {**draft_models(sizes), **ngrams(sizes), **suffixes(sizes)}
    return costs(THIRD_PARTY, sizes.short, ways, sizes)


@case("cost/forwards", minutes=0.5, needs="cpu")
def forwards(sizes: Sizes = FULL) -> list[Measurement]:
    """v of the forward alone: with packed weights, and with torch's linear layers."""
    pair, found = shipped(), []
    fast, small = FusedLlama(pair.target), FusedLlama(pair.draft)
    for context in sizes.contexts:
        chance = torch.Generator().manual_seed(0)
        prompt = torch.randint(fast.vocab_size, (1, context), generator=chance)
        room = context + max(sizes.forwards)
        forms: dict[str, tuple[Any, Any]] = {
            "labcore": (fast, fast.new_cache(1, room)),
            "Llama": (pair.target, DenseCache(pair.target.config, batch=1, capacity=room)),
            "draft": (small, small.new_cache(1, room)),
        }
        calls = {}
        with torch.inference_mode():
            for name, (model, cache) in forms.items():
                model(prompt, cache=cache)
                for width in sizes.forwards:
                    tokens, before = prompt[:, :width], torch.tensor([context])
                    calls[name, width] = functools.partial(forward, model, cache, tokens, before)
            named = {f"{name} {width}": call for (name, width), call in calls.items()}
            comparison = paired(named, rounds=10 * sizes.rounds)
        unit = "forwards over one token"
        for width in sizes.forwards:
            if width > 1:
                quantity = f"forward over {width} tokens/{context} before"
                samples = comparison.ratios(f"labcore {width}", "labcore 1")
                peer = {"Llama": comparison.ratios(f"Llama {width}", "Llama 1")}
                found.append(seen(quantity, unit, samples, peers=peer, packed=fast.packed))
        for what, name in (("forward of the draft", "draft 1"), ("forward of Llama", "Llama 1")):
            samples = comparison.ratios(name, "labcore 1")
            found.append(seen(f"{what}/{context} before", "forwards of the target", samples))
    return found


def forward(model: Any, cache: Any, tokens: Tensor, before: Tensor) -> None:
    """Run one forward and undo it."""
    model(tokens, cache=cache)
    cache.truncate(before)


def outcomes_of(
    proposer: Proposer,
    given: Sequence[list[int]],
    tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> tuple[list[Statistics], list[list[bool]]]:
    """Return the counts and outcomes of each row of a batch, with a separate seed per row."""
    meter = Metered(proposer)
    asked = [settings(tokens, temperature, 1000 * seed + place) for place in range(len(given))]
    done = generate(shipped().target, list(given), asked, proposer=meter)
    return done.per_row, meter.outcomes()


def seeds_for(temperature: float) -> tuple[int, ...]:
    """Return the seeds; greedy outputs aren't random and need only one."""
    return SEEDS if temperature else SEEDS[:1]


def finite(samples: Iterable[float]) -> list[float]:
    """Drop undefined fractions (NaN)."""
    return [sample for sample in samples if not math.isnan(sample)]


@case("share", minutes=2, needs="cpu")
def share(sizes: Sizes = FULL) -> list[Measurement]:
    """Speed by the share of guesses that pass: four free guesses per step, spoiled by chance."""
    given, plain = rows("code", sizes.short, sizes.prompts), ours(None, sizes.tokens)
    texts = [prompt + plain(prompt) for prompt in given]
    proposers = {one: Spoiled(texts, GUESSES, one) for one in SHARES}
    ways = {PLAIN: always(None), **{str(one): always(way) for one, way in proposers.items()}}
    rounds = steady(ways, given, sizes.tokens, sizes.rounds)
    speed = {name: [run.speed for run in every] for name, every in rounds.items()}
    found = []
    for one, way in proposers.items():
        told = plain_numbers(counted(way, given, sizes.tokens))
        samples = ratios(speed[str(one)], speed[PLAIN])
        found.append(seen(f"speed-up/{one} of the guesses right", "ratio", samples, **told))
    for few, many in itertools.pairwise(map(str, SHARES)):
        quantity = f"speed, {many} of the guesses right over {few}"
        found.append(seen(quantity, "ratio", ratios(speed[many], speed[few])))
    return found


@case("acceptance", minutes=2)
def acceptance(sizes: Sizes = FULL) -> list[Measurement]:
    """Acceptance and tokens per step by draft length and temperature, against closed forms."""
    small, found = shipped().draft, []
    asked = (rows("code", sizes.short, sizes.prompts), sizes.tokens)
    for temperature in TEMPERATURES:
        after: list[tuple[float, float]] = []
        for gamma in sizes.lengths:
            runs = [
                outcomes_of(DraftModel(small, gamma=gamma), *asked, temperature, seed)
                for seed in seeds_for(temperature)
            ]
            every = [one for run in runs for one in run[0]]
            counts = [Statistics.total(run[0]) for run in runs]
            pairs = [pooled(run[1]) for run in runs]
            after += pairs if gamma == sizes.bursty else []
            at = f"temperature {temperature:g}, {gamma} drafted"
            places = [[p.alpha for p in one.by_position if p.tried] for one in counts]
            details = {
                **plain_numbers(counts[0]),
                "alpha of each place": places[0],
                "P(accepted | accepted), P(accepted | rejected)": [
                    None if math.isnan(x) else x for x in pairs[0]
                ],
            }
            chains = {
                "i.i.d.": [speedup.expected_tokens(one.alpha, gamma) for one in counts],
                "by place": [speedup.expected_tokens_of(one) for one in places],
                "bursts": [
                    speedup.bursty_tokens(*pair, gamma) for pair in pairs if len(finite(pair)) == 2
                ],
            }
            alphas, rates, tokens = (
                finite(getattr(one, name) for one in every)
                for name in ("alpha", "acceptance_rate", "tokens_per_step")
            )
            peer = {"accepted / drafted": rates}
            closed = {name: samples for name, samples in chains.items() if samples}
            found += [
                seen(f"alpha/{at}", "probability", alphas, peers=peer, **details),
                seen(f"tokens a step/{at}", "tokens", tokens, peers=closed, **details),
            ]
        for place, before in enumerate(("an accepted", "a rejected")):
            if samples := finite(pair[place] for pair in after):
                quantity = f"P(accepted) behind {before} one/temperature {temperature:g}"
                found.append(seen(quantity, "probability", samples, drafted=sizes.bursty))
    return found


LOOKUPS: dict[str, Callable[[Sizes], Proposer]] = {
    "n-gram 4": lambda sizes: NGram(MAXIMUM, 1, gamma=4),  # noqa: ARG005
    "n-gram 8": lambda sizes: NGram(MAXIMUM, 1, gamma=sizes.adaptive),
    "suffix 8": lambda sizes: Suffix(gamma=sizes.adaptive, memory=0),
    "suffix tree 8": lambda sizes: Suffix(gamma=sizes.adaptive, memory=0, tree=True),
}


@case("suffix", minutes=4)
def suffix(sizes: Sizes = FULL) -> list[Measurement]:
    """Suffix decoding beside n-grams, by text; and with a memory, on one prompt's many outputs."""
    every = (
        *(("code", sizes.short), ("long_code", sizes.long), ("copy", sizes.long)),
        *(("prose", sizes.short), (THIRD_PARTY, sizes.short), (THIRD_PARTY, sizes.long)),
    )
    found = []
    for (kind, length), (name, way) in itertools.product(every, LOOKUPS.items()):
        counts = outcomes_of(way(sizes), rows(kind, length, sizes.prompts), sizes.tokens)[0]
        at, total = f"{name}, {length} tokens of {kind}", Statistics.total(counts)
        told = {**plain_numbers(total), **origin(kind)}
        per_step = [one.tokens_per_step for one in counts]
        found += [
            seen(f"tokens per step/{at}", "tokens", per_step, **told),
            exact(f"drafted per step/{at}", "tokens", total.drafted / total.steps, **told),
        ]
        if total.drafted:
            found.append(exact(f"accepted of drafted/{at}", "share", total.acceptance_rate, **told))
    return found + remembered(sizes)


def remembered(sizes: Sizes) -> list[Measurement]:
    """Return tokens per step of each further output of the same prompts, which the memory helps."""
    found, given = [], rows("code", sizes.short, sizes.prompts)
    for temperature in filter(None, TEMPERATURES):
        ways = {"memory": Suffix(gamma=sizes.adaptive)}
        ways["no memory"] = Suffix(gamma=sizes.adaptive, memory=0)
        for turn, (name, way) in itertools.product(range(sizes.outputs), ways.items()):
            counts = outcomes_of(way, given, sizes.tokens, temperature, turn)[0]
            at = f"{name}, temperature {temperature:g}, output {turn + 1} of a prompt"
            per_step = [one.tokens_per_step for one in counts]
            found.append(seen(f"tokens per step/{at}", "tokens", per_step))
    return found


@case("texts", minutes=3)
def texts(sizes: Sizes = FULL) -> list[Measurement]:
    """How hard each text is for the target, and what is accepted after it, by draft and n-gram."""
    pair, found = shipped(), []
    read = {"held-out code": held_out("code"), "held-out prose": held_out("prose")}
    read |= {f"{x.file} of {x.package} {x.version}": x.text for x in installed_sources()}
    for name, text in read.items():
        head = text[: sizes.read]
        bits = bits_per_byte(pair.target, head, pair.tokenizer)
        found.append(exact(f"bits per byte/{name}", "bits", bits, characters=len(head)))
    small = pair.draft
    ways: dict[str, Callable[[], Proposer]] = {
        f"draft {CONSTANT}": functools.partial(DraftModel, small, gamma=CONSTANT),
        f"n-gram {CONSTANT}": functools.partial(NGram, MAXIMUM, 1, gamma=CONSTANT),
        f"suffix {sizes.adaptive}": functools.partial(Suffix, gamma=sizes.adaptive, memory=0),
    }
    asked = itertools.product(("code", THIRD_PARTY), TEMPERATURES, ways.items())
    for kind, temperature, (name, way) in asked:
        given = rows(kind, sizes.short, sizes.prompts)
        counts = [
            Statistics.total(outcomes_of(way(), given, sizes.tokens, temperature, seed)[0])
            for seed in seeds_for(temperature)
        ]
        at, told = f"{name}, {kind}, temperature {temperature:g}", origin(kind)
        for quantity, unit, samples in (
            ("alpha", "probability", [one.alpha for one in counts]),
            ("accepted of drafted", "share", [one.acceptance_rate for one in counts]),
            ("tokens per step", "tokens", [one.tokens_per_step for one in counts]),
        ):
            if samples := finite(samples):
                found.append(seen(f"{quantity}/{at}", unit, samples, **told))
    return found


def pooled(outcomes: Sequence[Sequence[bool]]) -> tuple[float, float]:
    """Return P(accepted | accepted) and P(accepted | rejected), pooled over separate rows."""
    after: dict[bool, list[bool]] = {True: [], False: []}
    for row in outcomes:
        for before, now in itertools.pairwise(row):
            after[before].append(now)
    shares = [statistics.fmean(x) if x else math.nan for x in (after[True], after[False])]
    return shares[0], shares[1]


@case("ngram", minutes=2)
def ngram(sizes: Sizes = FULL) -> list[Measurement]:
    """Tokens per step of n-gram lookup by its options, on copying, code and prose."""
    found = []
    for kind in KINDS:
        given = rows(kind, sizes.long, sizes.prompts)
        every = itertools.product(sizes.maxima, ("latest", "earliest"))
        options = [(n, occurrence, 0.0) for n, occurrence in every]
        options += [(MAXIMUM, "latest", t) for t in TEMPERATURES if t]
        for n, occurrence, temperature in options:
            lookup = functools.partial(NGram, n, 1, gamma=sizes.adaptive, occurrence=occurrence)
            counts = [
                one
                for seed in seeds_for(temperature)
                for one in outcomes_of(lookup(), given, sizes.tokens, temperature, seed)[0]
            ]
            warm = f", temperature {temperature:g}" if temperature else ""
            quantity = f"tokens a step/{kind}, n up to {n}, {occurrence}{warm}"
            samples = [one.tokens_per_step for one in counts]
            told = {**plain_numbers(Statistics.total(counts)), "gamma": sizes.adaptive}
            found.append(seen(quantity, "tokens", samples, **told))
    return found


GATE_COUNTS: dict[str, tuple[str, Callable[[Statistics], float]]] = {
    "acceptance rate": ("share", lambda one: one.acceptance_rate),
    "tokens a step": ("tokens", lambda one: one.tokens_per_step),
    "drafted a token": ("tokens", lambda one: one.drafted / one.tokens),
}


@case("gate", minutes=3, needs="cpu")
def gate(sizes: Sizes = FULL) -> list[Measurement]:
    """Drafts that continue while n-grams confirm them: the gain of each extra unconfirmed token."""
    found = []
    ways: dict[str, Proposer] = {
        f"slack {slack}": Gated(draft_model(), NGram(MAXIMUM, 1), slack) for slack in sizes.slacks
    }
    ways["no gate"] = draft_model()
    ways["n-gram alone"] = NGram(MAXIMUM, 1, gamma=sizes.adaptive)
    timed = {name: always(proposer) for name, proposer in {PLAIN: None, **ways}.items()}
    for kind in ("long_code", "prose"):
        given = rows(kind, sizes.long, sizes.prompts)
        rounds = steady(timed, given, sizes.tokens, sizes.rounds)
        times = {name: [x.seconds / x.tokens for x in every] for name, every in rounds.items()}
        counts = {name: outcomes_of(way, given, sizes.tokens)[0] for name, way in ways.items()}
        for name, every in counts.items():
            at, details = f"{kind}, {name}", plain_numbers(Statistics.total(every))
            for quantity, (unit, of) in GATE_COUNTS.items():
                gated, ungated = list(map(of, every)), list(map(of, counts["no gate"]))
                if samples := finite(gated):
                    found.append(seen(f"{quantity}/{at}", unit, samples, **details))
                if samples := finite(ratios(gated, ungated)):
                    found.append(seen(f"{quantity} over no gate/{at}", "ratio", samples, **details))
            for what, other, unit in (
                ("time a token", PLAIN, "plain times"),
                ("time a token over no gate", "no gate", "ratio"),
            ):
                samples = ratios(times[name], times[other])
                found.append(seen(f"{what}/{at}", unit, samples, **details))
    return found


@torch.inference_mode()
def distributions(sizes: Sizes, temperature: float, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return p and q, fp32 [T, V], after each token of the target's output for each prompt."""
    pair, found = shipped(), []
    for place, prompt in enumerate(rows("code", sizes.short, sizes.prompts)):
        asked = settings(sizes.tokens, temperature, 1000 * seed + place)
        said = generate(pair.target, [prompt], asked)
        text = torch.tensor([prompt + said.tokens[0]])
        p, q = (
            probabilities(model(text).logits[0, len(prompt) - 1 : -1], asked)
            for model in (pair.target, pair.draft)
        )
        found.append((p, q))
    return found


def typical_law(
    rule: TypicalAcceptance, p: Tensor, drafts: Tensor, *, following: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the distribution [T, V] of the next token, and P(a drafted token is accepted) [T].

    p: [T, V]. drafts: q [T, V] if one token is drawn from it, or the tokens themselves, int64
    [T, K], which nobody draws: siblings, of which the first typical one is accepted. following:
    the distribution [T, V] of the token that replaces an untypical draft; None means p.
    """
    bound = rule.bound(p)[:, None]
    if drafts.is_floating_point():
        taken = drafts * (p > bound)
    else:
        typical = p.gather(1, drafts) > bound
        first = drafts.gather(1, typical.int().argmax(-1, keepdim=True))
        taken = torch.zeros_like(p).scatter_(1, first, typical.any(-1, keepdim=True).to(p.dtype))
    accepted = taken.sum(-1)
    return taken + (1 - accepted)[:, None] * (p if following is None else following), accepted


def drafts_of(q: Tensor) -> dict[str, Tensor]:
    """Return the kinds of drafts that both rules judge, from q [T, V]; see `typical_law`."""
    likeliest = q.topk(SIBLINGS).indices
    return {
        "drawn from q": q,
        "the argmax of q": likeliest[:, :1],
        f"the top {SIBLINGS} of q": likeliest,
    }


def lossless_acceptance(p: Tensor, drafts: Tensor) -> float:
    """Return P(a drafted token is accepted) by rejection sampling; arguments as in `typical_law`.

    A token that nobody draws is accepted with its own probability, and so is the next sibling.
    """
    kept = torch.minimum(p, drafts) if drafts.is_floating_point() else p.gather(1, drafts)
    return float(kept.sum(-1).mean())


@case("typical", minutes=1)
def typical(sizes: Sizes = FULL) -> list[Measurement]:
    """What typical acceptance gains over rejection sampling and how far its output moves.

    Medusa's drafts are the heads' likeliest tokens, which nobody draws, and rejection sampling
    accepts fewer of those than of drawn ones. So both kinds are judged.
    """
    found = []
    for temperature in filter(None, TEMPERATURES):
        every = [distributions(sizes, temperature, seed) for seed in range(sizes.worlds)]
        # fp32 rows sum to 1 only to seven digits, which would look like a bias.
        wide = [[torch.cat(x).double() for x in zip(*one, strict=True)] for one in every]
        pairs = [[x / x.sum(-1, keepdim=True) for x in one] for one in wide]
        p, q = pairs[0]
        kept = max(one_token(p[i], q[i]).distance(p[i]) for i in range(0, len(p), 16))
        told = {"largest of rejection sampling": kept, "tokens": len(p)}
        for threshold, name in itertools.product(sizes.thresholds, drafts_of(q)):
            rule = TypicalAcceptance(threshold=threshold)
            judged = [(p, drafts_of(q)[name]) for p, q in pairs]
            at = f"{name}, temperature {temperature:g}, threshold {threshold:g}"
            found += typical_numbers(rule, judged, at, told)
    return found + enumerated(sizes.tables)


def typical_numbers(
    rule: TypicalAcceptance,
    judged: Sequence[tuple[Tensor, Tensor]],
    at: str,
    told: Mapping[str, Any],
) -> list[Measurement]:
    """Return acceptance and distance for one kind of drafts; judged: p and drafts, by seed."""
    lossless = [lossless_acceptance(*one) for one in judged]
    laws = [typical_law(rule, *one) for one in judged]
    accepted = [float(share.mean()) for _, share in laws]
    away = [variation(law, p) for (law, _), (p, _) in zip(laws, judged, strict=True)]
    greedy = [F.one_hot(p.argmax(-1), p.shape[-1]).to(p.dtype) for p, _ in judged]
    as_medusa = [
        variation(typical_law(rule, p, drafts, following=best)[0], p)
        for (p, drafts), best in zip(judged, greedy, strict=True)
    ]
    more = [a - b for a, b in zip(accepted, lossless, strict=True)]
    unit, peer = "probability", {"rejection sampling": lossless}
    best = {"next token by argmax": as_medusa}
    return [
        seen(f"P(accepted)/{at}", unit, accepted, peers=peer, **told),
        seen(f"P(accepted) minus rejection sampling's/{at}", "difference", more, **told),
        seen(f"total variation per token/{at}", unit, away, peers=best, **told),
    ]


def variation(law: Tensor, p: Tensor) -> float:
    """Return the mean total variation of two distributions [T, V] over T."""
    return float((law - p).abs().sum(-1).mean() / 2)


@case("exact", minutes=0.5)
def every_outcome(sizes: Sizes = FULL) -> list[Measurement]:
    """Largest distance from the target's distribution over all cases, by enumerating outcomes."""
    found = []
    for name in ("rejection", "block", "sample_and_compare", "typical"):
        samples = [
            max(one.distance(VERIFIERS[name]) for one in enumeration.cases(seed).values())
            for seed in range(sizes.worlds)
        ]
        every = list(enumeration.cases())
        found.append(seen(f"total variation/{name}", "probability", samples, cases=every))
    return found


def acceptance_of(p: Tensor, draft: Draft) -> dict[str, float]:
    """Return by how much a drawn chain raises each rule's expected accepted tokens.

    The probability that at least i tokens are accepted is the mean over drafts of the product of
    min(1, p / q) up to i by rejection sampling, and of w_i = min(1, w_(i-1) p / q) by block
    verification. So the second is never smaller, draft by draft.
    """
    place = torch.arange(len(draft))
    by_token = weight = 1.0
    found = {"rejection": 0.0, "block": 0.0}
    if draft.q is None:
        raise ValueError("a draft must have the q it was drawn from, got None")
    for ratio in (p[place, draft.tokens] / draft.q[place, draft.tokens]).tolist():
        by_token, weight = by_token * min(1.0, ratio), min(1.0, weight * ratio)
        found["rejection"] += by_token
        found["block"] += weight
    return found


class Judged:
    """Rejection sampling that notes what each rule accepts of its drafts in expectation."""

    def __init__(self) -> None:
        self.expected: list[dict[str, float]] = []

    def __call__(self, p: Tensor, draft: Draft, generator: Any = None) -> Accepted:
        """Verify a draft."""
        if len(draft):
            self.expected.append(acceptance_of(p, draft))
        return rejection_sampling(p, draft, generator)


@case("block", minutes=2)
def block(sizes: Sizes = FULL) -> list[Measurement]:
    """Tokens per step by block verification and by rejection sampling, on the same drafts."""
    small, found = shipped().draft, []
    every = itertools.product(filter(None, TEMPERATURES), sizes.blocks)
    for (temperature, gamma), kind in itertools.product(every, ("code", "prose")):
        given, runs = rows(kind, sizes.short, sizes.prompts), []
        for seed in SEEDS:
            seeds = range(1000 * seed, 1000 * seed + len(given))
            asked = [settings(sizes.tokens, temperature, one) for one in seeds]
            runs.append(Judged())
            way = DraftModel(small, gamma=gamma)
            generate(shipped().target, given, asked, proposer=way, verifier=runs[-1])
        by_token, by_block = (
            [1 + statistics.fmean(one[rule] for one in run.expected) for run in runs]
            for rule in ("rejection", "block")
        )
        at = f"{kind}, temperature {temperature:g}, {gamma} drafted"
        peer, gain = {"rejection sampling": by_token}, ratios(by_block, by_token)
        found += [
            seen(f"tokens per step/{at}", "tokens", by_block, peers=peer),
            seen(f"tokens per step over rejection sampling's/{at}", "ratio", gain),
        ]
    return found


def enumerated(tables: int) -> list[Measurement]:
    """Return the same for random models with few enough tokens to enumerate every outcome."""
    found = []
    for gamma in (1, 2, 3):
        biases, left = [], 0.0
        for seed in range(tables):
            p, q = (enumeration.random_table(VOCABULARY, 2 * seed + i) for i in range(2))
            proposed = enumeration.chain_proposal(q, gamma)
            rule = TypicalAcceptance()
            biases.append(enumeration.typical_bias(rule, p, proposed, gamma))
            law = enumeration.output_law(rejection_sampling, p, proposed, gamma)
            left = max(left, enumeration.total_variation(law, enumeration.target_law(p, gamma)))
        quantity = f"total variation/{gamma} drafted, {VOCABULARY} tokens in all"
        told: dict[str, Any] = {"largest of rejection sampling": left, "exact": True}
        found.append(seen(quantity, "probability", biases, **told))
    return found


# Batches in the engine ---------------------------------------------------------------------------
@functools.cache
def shipped_heads() -> MedusaHeads:
    """Return the Medusa heads of this course."""
    return pretrained_heads(shipped().target)


BATCHED: dict[str, Callable[[], Proposer]] = {
    "n-gram 2": lambda: NGram(MAXIMUM, 1, gamma=2),
    "n-gram 4": lambda: NGram(MAXIMUM, 1, gamma=4),
    "suffix 8": lambda: Suffix(gamma=8, memory=0),
    "draft model": draft_model,
    "Medusa chain 2": lambda: Medusa(shipped_heads(), chain_tree(2)),
    "Medusa tree 4": lambda: Medusa(shipped_heads(), Tree(((0,), (0, 0), (0, 0, 0), (1,)))),
    "EAGLE-like head": lambda: Eagle(pretrained_eagle(shipped().target)),
}
"""What is compared in batches."""


class Batch:
    """An engine with `rows` slots, which stay full as long as requests wait."""

    def __init__(self, rows: int, proposer: Proposer | None) -> None:
        self.rows = rows
        self.meter = None if proposer is None else Metered(proposer)
        self.engine = Engine(
            shipped().target,
            num_blocks=16 * rows + 16,
            max_num_seqs=rows,
            enable_prefix_caching=False,
            proposer=self.meter,
        )

    def serve(self, given: Sequence[list[int]], tokens: int) -> tuple[list[list[int]], Steady]:
        """Return the outputs of requests that all come at once, and the full steps."""
        engine, full = self.engine, Steady()
        said: dict[str, list[int]] = {}
        for prompt in given:
            said[engine.submit(prompt, settings(tokens))] = []
        while not engine.idle:
            before = 0.0 if self.meter is None else self.meter.seconds
            for news in engine.step():
                said[news.id] += news.tokens
            (record,) = engine.trace[-1:]
            if len(record.decodes) < self.rows or record.chunks:
                continue
            full.seconds += record.seconds
            full.tokens += record.emitted
            full.steps += 1
            full.drafting += 0.0 if self.meter is None else self.meter.seconds - before
            full.sizes.append(record.drafted / self.rows)
        return list(said.values()), full


def requests(sizes: Sizes) -> list[list[int]]:
    """Return prompts of this course and of third-party code in turn."""
    every = (rows(kind, sizes.short, sizes.prompts) for kind in ("code", THIRD_PARTY))
    return [prompt for pair in zip(*every, strict=True) for prompt in pair]


@case("batch", minutes=12, needs="cpu")
def batch(sizes: Sizes = FULL) -> list[Measurement]:
    """Every method in the engine at several batch sizes: speed, tokens per step, and costs.

    v(n) is a step that reads n tokens per row, of which all but one are wrong, over a plain step of
    as many rows. A method's speed-up is tokens per step and row / (v + drafting cost): predicted
    once with the measured v, on lines between the measured n, and once with a roofline's.
    """
    timed = {rows: serve_all(rows, sizes) for rows in sizes.batches}
    roof = fitted({rows: runs for rows, (runs, _) in timed.items()}, sizes)
    found = []
    for rows, (runs, told) in timed.items():
        found += batch_numbers(rows, runs, told, roof, sizes)
    return found


def serve_all(rows: int, sizes: Sizes) -> tuple[dict[str, list[Steady]], dict[str, Any]]:
    """Serve the same requests by every way, in shuffled rounds; return full steps and details."""
    given, tokens = requests(sizes), sizes.batch_tokens
    said = Batch(rows, None).serve(given, tokens)[0]
    known = [prompt + output for prompt, output in zip(given, said, strict=True)]
    ways: dict[str, Proposer | None] = {PLAIN: None, **{n: make() for n, make in BATCHED.items()}}
    ways |= {f"v {size}": Wrong(known, chain_tree(size)) for size in sizes.wrong}
    engines = {name: Batch(rows, way) for name, way in ways.items()}
    runs: dict[str, list[Steady]] = {name: [] for name in ways}
    outputs, dice = {}, random.Random(rows)
    for turn in range(-1, sizes.batch_rounds):  # the first turn warms up
        for name in dice.sample(list(ways), len(ways)):
            outputs[name], full = engines[name].serve(given, tokens)
            if turn >= 0:
                runs[name].append(full)
    return runs, refuse_wrong(outputs, given)


def fitted(timed: Mapping[int, Mapping[str, Sequence[Steady]]], sizes: Sizes) -> speedup.Roofline:
    """Return a roofline through two measured steps: the one with fewest tokens and with most.

    The first is taken to be bound by memory and the second by arithmetic. So it describes this
    model in this engine, with all that a step costs, and not the processor.
    """
    fewest, most, widest = min(timed), max(timed), max(sizes.wrong)
    least = statistics.median(one.step for one in timed[fewest][PLAIN])
    largest = statistics.median(one.step for one in timed[most][f"v {widest}"])
    of = functools.partial(speedup.Roofline.of, shipped().target.config)
    context = sizes.short + sizes.batch_tokens // 2
    read = of(flops=1e30, bandwidth=1.0).seconds(1, batch=fewest, context=context)
    computed = of(flops=1.0, bandwidth=1e30).seconds(widest + 1, batch=most, context=context)
    return of(flops=computed / largest, bandwidth=read / least)


def batch_numbers(
    rows: int,
    runs: Mapping[str, Sequence[Steady]],
    told: Mapping[str, Any],
    roof: speedup.Roofline,
    sizes: Sizes,
) -> list[Measurement]:
    """Return the numbers of one batch size, round by round."""
    plain, at = runs[PLAIN], f"{rows} rows"
    context = sizes.short + sizes.batch_tokens // 2
    widths = [1, *(size + 1 for size in sizes.wrong)]
    lines = {n: roof.cost(n, batch=rows, context=context) for n in range(1, widths[-1] + 1)}
    measured = {1: [1.0] * len(plain)}
    for size in sizes.wrong:
        steps = [one.step for one in runs[f"v {size}"]]
        measured[size + 1] = ratios(steps, [one.step for one in plain])
    details: dict[str, Any] = {**told, "seconds of a plain step": [one.step for one in plain]}
    gap = told["largest gap, nats"]
    found = [
        exact(f"largest gap of an output/{at}", "nats", gap, **details),
        seen(f"tokens per second/plain, {at}", "tokens/s", [x.speed for x in plain], **details),
    ]
    for n in widths:
        quantity, peer = f"v/{n} tokens per row, {at}", {"roofline": [lines[n]]}
        found.append(seen(quantity, "plain steps", measured[n], peers=peer, **details))
    for name in BATCHED:
        costs = [{n: measured[n][turn] for n in widths} for turn in range(len(plain))]
        found += method_numbers(runs[name], plain, costs, lines, f"{name}, {at}")
    return found


def method_numbers(
    runs: Sequence[Steady],
    plain: Sequence[Steady],
    measured: Sequence[Mapping[int, float]],
    lines: Mapping[int, float],
    at: str,
) -> list[Measurement]:
    """Return a method's speed-up, measured and predicted, and what it's made of, by round.

    measured: v by tokens per row, for each round. lines: the same by the roofline.
    """
    rows = plain[0].tokens / plain[0].steps
    per_step = [run.tokens / run.steps / rows for run in runs]
    drafting = [run.drafting / run.steps / base.step for run, base in zip(runs, plain, strict=True)]
    predicted = [
        tokens / (cost_of_steps(run, costs) + cost)
        for run, tokens, cost, costs in zip(runs, per_step, drafting, measured, strict=True)
    ]
    by_roofline = [
        tokens / (cost_of_steps(run, lines) + cost)
        for run, tokens, cost in zip(runs, per_step, drafting, strict=True)
    ]
    speedups = ratios([one.speed for one in runs], [one.speed for one in plain])
    peers, over = {"predicted": predicted, "roofline": by_roofline}, ratios(predicted, speedups)
    told: dict[str, Any] = {
        "steps": runs[0].steps,
        "drafted per step and row": statistics.fmean(runs[0].sizes),
    }
    return [
        seen(f"tokens per step and row/{at}", "tokens", per_step, **told),
        seen(f"drafting per step/{at}", "plain steps", drafting, **told),
        seen(f"speed-up/{at}", "ratio", speedups, peers=peers, **told),
        seen(f"speed-up, predicted over measured/{at}", "ratio", over, within=WITHIN),
    ]


def cost_of_steps(run: Steady, v: Mapping[int, float]) -> float:
    """Return the mean cost of a run's steps in plain steps, with v on lines between its places."""
    read = [1 + drafted for drafted in run.sizes]
    return float(numpy.interp(read, list(v), list(v.values())).mean())
