"""A speculative decoder over tables: two small models with known probabilities.

A model's next token depends on the last two tokens and on the position modulo PHASES. A draft model
that loses count of its tokens therefore guesses worse. All requests run side by side.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["BLOCKS", "END", "GAMMA", "REQUESTS", "Engine", "Log", "tables"]

VOCAB, PHASES, WIDTH = 12, 6, 32
END = 0  # the token that ends an output
GAMMA, BLOCKS, REQUESTS = 4, 16, 2000
TEMPERATURE = 0.5
SEED = 8


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One decoder. Each flag is a fault, except the last, which is a number format.

    softmaxed: the residual goes through a softmax. hole: after a full acceptance, the draft model
    does not read the last token that it drafted. unlike: only the target uses the temperature.
    past_end: a finished request keeps running, and its tokens count. narrow: the target computes in
    bfloat16, where a forward over several tokens sums in a different order than one over one token.
    """

    softmaxed: bool = False
    hole: bool = False
    unlike: bool = False
    past_end: bool = False
    narrow: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    """What is measured in each block; tensors are [BLOCKS].

    accepted: share of the drafted tokens that the log counts as accepted. distance: total variation
    between the delivered tokens and the plain target's distributions at their positions, both
    averaged. delivered: tokens per request for which the block is computed.
    differing: share of requests whose greedy output differs from plain greedy decoding so far.
    gap: the largest distance between the logits of the two tokens at a request's first difference,
    0.0 if no request differs.
    """

    accepted: Tensor
    distance: Tensor
    delivered: Tensor
    differing: Tensor
    gap: float


@functools.cache
def tables() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits [V, V, PHASES, V]: target, target in bfloat16 for one token and for many, draft."""
    draw = torch.Generator().manual_seed(SEED)
    before, last = (torch.randn(VOCAB, WIDTH, generator=draw) for _ in range(2))
    phase = torch.randn(PHASES, WIDTH, generator=draw)
    head = torch.randn(WIDTH, VOCAB, generator=draw) * WIDTH**-0.5
    popular = torch.linspace(1.6, -1.6, VOCAB)
    hidden = 0.5 * before[:, None, None] + 0.6 * last[:, None] + 0.8 * phase
    target = hidden @ head + popular
    products = (hidden[..., None] * head).bfloat16()
    one = _added(products, 1) + popular.bfloat16()
    many = _added(products, 4) + popular.bfloat16()
    draft = target + 0.6 * torch.randn(target.shape, generator=draw)
    for table in (target, one, many, draft):
        table[..., END] = 0.1
        table[:, END] = -torch.inf  # only the end follows the end
        table[:, END, :, END] = 0.0
    return target, one.float(), many.float(), draft


def _added(products: Tensor, parts: int) -> Tensor:
    """The sum over the width in bfloat16: `parts` running sums, then their sum."""
    total = torch.zeros_like(products[..., 0, :])
    for part in products.chunk(parts, dim=-2):
        running = torch.zeros_like(total)
        for term in part.unbind(-2):
            running = running + term
        total = total + running
    return total


def _probabilities(logits: Tensor, temperature: float) -> Tensor:
    if temperature:
        return (logits / temperature).softmax(-1)
    return torch.nn.functional.one_hot(logits.argmax(-1), VOCAB).float()


def _drawn(weights: Tensor, draw: torch.Generator) -> Tensor:
    return torch.multinomial(weights, 1, generator=draw)[:, 0]


def _starts() -> tuple[Tensor, Tensor]:
    """The last two tokens [R, 2] and the lengths [R] of the prompts."""
    draw = torch.Generator().manual_seed(SEED + 1)
    pair = torch.randint(1, VOCAB, (REQUESTS, 2), generator=draw)
    return pair, torch.randint(0, PHASES, (REQUESTS,), generator=draw)


def _look(table: Tensor, text: list[Tensor], position: Tensor) -> Tensor:
    return table[text[-2], text[-1], position % PHASES]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """tokens: [R, GAMMA + 1]; count: accepted [R]; p: the plain target's distributions."""

    tokens: Tensor
    count: Tensor
    p: Tensor


class _Run:
    """The state of all requests of one engine."""

    def __init__(self, engine: Engine, temperature: float) -> None:
        self.engine, self.temperature = engine, temperature
        self.draw = torch.Generator().manual_seed(SEED + 2)
        pair, self.position = _starts()
        self.text = [*pair.unbind(1)]
        self.lost = torch.zeros_like(self.position)  # tokens that the draft model never read
        target, one, many, self.draft = tables()
        self.plain, self.target = (one, many) if engine.narrow else (target, target)

    def block(self) -> _Block:
        """Draft and judge a block, and drop what was rejected."""
        warm = 1.0 if self.engine.unlike else self.temperature
        text, position = [*self.text], self.position
        p, q, plain = [], [], []
        for step in range(GAMMA + 1):
            p.append(_probabilities(_look(self.target, text, position), self.temperature))
            plain.append(p[-1])
            if self.engine.narrow:
                plain[-1] = _probabilities(_look(self.plain, text, position), self.temperature)
            if step < GAMMA:
                logits = _look(self.draft, text, position - self.lost)
                q.append(_probabilities(logits, warm))
                text.append(_drawn(q[-1], self.draw))
                position = position + 1
        drafted = torch.stack(text[2:], 1)
        count, last = self._judge(torch.stack(p, 1), torch.stack(q, 1), drafted)
        tokens = torch.cat((drafted, last[:, None]), 1).scatter(1, count[:, None], last[:, None])
        both = torch.cat((torch.stack(self.text, 1), tokens), 1)
        self.text = [both.gather(1, (count + back)[:, None])[:, 0] for back in (1, 2)]
        self.position = self.position + count + 1
        if self.engine.hole:
            self.lost = self.lost + (count == GAMMA).long()
        return _Block(tokens=tokens, count=count, p=torch.stack(plain, 1))

    def _judge(self, p: Tensor, q: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor]:
        """How many tokens are accepted [R], and the token after them [R]; p: [R, GAMMA + 1, V]."""
        at = drafted[..., None]
        ratios = (p[:, :-1].gather(2, at) / q.gather(2, at))[..., 0]
        passed = torch.rand(ratios.shape, generator=self.draw) < ratios
        count = passed.long().cumprod(1).sum(1)
        rows = torch.arange(len(p))
        mine = p[rows, count]
        theirs = q[rows, count.clamp(max=GAMMA - 1)]
        left = (mine - theirs).clamp(min=0)
        if self.engine.softmaxed:
            left = left.softmax(-1)
        whole = (count == GAMMA) | (left.sum(-1) == 0)
        return count, _drawn(torch.where(whole[:, None], mine, left), self.draw)


@functools.cache
def run(engine: Engine) -> Log:
    """Run BLOCKS blocks of REQUESTS requests, once sampled and once greedy."""
    requests = _Run(engine, TEMPERATURE)
    alive = torch.ones(REQUESTS, dtype=torch.bool)
    offsets = torch.arange(GAMMA + 1)
    columns: dict[str, list[Tensor]] = {"accepted": [], "distance": [], "delivered": []}
    for _ in range(BLOCKS):
        block = requests.block()
        inside = offsets <= block.count[:, None]
        ends = (block.tokens == END) & inside
        first = torch.where(ends, offsets, GAMMA + 1).amin(1)
        mine = inside & (offsets <= first[:, None]) & alive[:, None]
        accepted = mine & (offsets < block.count[:, None])
        computed = alive.sum()
        total = accepted.sum()
        if engine.past_end:
            computed, total = torch.tensor(REQUESTS), block.count.sum()
        columns["accepted"].append(total / (computed * GAMMA))
        shares = torch.bincount(block.tokens[mine], minlength=VOCAB) / mine.sum()
        columns["distance"].append((shares - block.p[mine].mean(0)).abs().sum() / 2)
        columns["delivered"].append(mine.sum() / computed)
        alive = alive & (first > GAMMA)
    differing, gap = _greedy(engine)
    return Log(
        **{name: torch.stack(values) for name, values in columns.items()},
        differing=differing,
        gap=gap,
    )


def _greedy(engine: Engine) -> tuple[Tensor, float]:
    """The `differing` and the `gap` of `Log`."""
    requests = _Run(engine, 0.0)
    plain = _Run(engine, 0.0)
    differs = torch.zeros(REQUESTS, dtype=torch.bool)
    shares, gap = [], 0.0
    for _ in range(BLOCKS):
        block = requests.block()
        for offset in range(GAMMA + 1):
            going = offset <= block.count
            logits = _look(plain.plain, plain.text, plain.position)
            token = block.tokens[:, offset]
            new = going & ~differs & (token != logits.argmax(-1))
            if new.any():
                chosen = logits.gather(1, token[:, None])[:, 0]
                gap = max(gap, float((logits.amax(-1) - chosen)[new].max()))
            differs = differs | new
            # The comparison is with the plain target's choice after the text so far.
            pair = zip((plain.text[1], token), plain.text, strict=True)
            plain.text = [torch.where(going, new_one, old) for new_one, old in pair]
            plain.position = plain.position + going
        shares.append(differs.float().mean())
    return torch.stack(shares), gap
