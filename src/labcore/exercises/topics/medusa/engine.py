"""Train Medusa heads on the texts of a small backbone, and let the backbone verify their drafts.

The backbone is one layer of attention whose weights fall by a constant factor per position. Its
logits at a node need only a sum over what the node sees, so all requests run side by side.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from labcore.exercises.topics.medusa.labels import NOTHING
from labcore.optim import rules

__all__ = ["CHECKPOINTS", "END", "EVERY", "HEADS", "REQUESTS", "Engine", "Log", "run", "training"]

VOCAB, WIDTH, HEADS = 16, 48, 3
END = 0  # the token that ends an output
CHECKPOINTS, EVERY = 7, 40  # the first one precedes training; EVERY is in steps
REQUESTS, PROMPT, LIMIT = 250, 4, 20
PARENTS = (-1, -1, 0, 0, 1, 2, 4)  # of the nodes; (0), (1), (0, 0), (0, 1), (1, 0), ...
RANKS = (0, 1, 0, 1, 0, 0, 0)
FADING = 0.5  # the factor of attention per position
TEXTS, LENGTH, BATCH, RATE = 500, 20, 24, 5e-3
SEED = 91


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Heads and the loop that uses them; each flag is a fault.

    shared: all heads are one module. early: each head learns the token before its own. thawed: the
    heads' loss trains the backbone too. stale: the heads read the state of the token before the
    last one read. siblings: a node sees all nodes that were written before it. uncut: the loop
    delivers the whole block in which a request ends.
    """

    shared: bool = False
    early: bool = False
    thawed: bool = False
    stale: bool = False
    siblings: bool = False
    uncut: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    """Measurements at each checkpoint of the training; tensors are [CHECKPOINTS].

    hits: the share of held-out labels that match a head's first choice, [CHECKPOINTS, HEADS].
    tokens: the tokens delivered per request and step. differing: the share of greedy outputs that
    differ from plain decoding before the training. drifted: the same for plain decoding at the
    checkpoint. longer: the share of outputs that are the plain one with more tokens after it.
    """

    hits: Tensor
    tokens: Tensor
    differing: Tensor
    drifted: Tensor
    longer: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Backbone:
    """own, past: embeddings [V, C] of a token for itself and for later tokens; out: [V, C]."""

    own: Tensor
    past: Tensor
    inner: Tensor
    out: Tensor

    def weights(self) -> tuple[Tensor, ...]:
        return self.own, self.past, self.inner, self.out

    def hidden(self, token: Tensor, mixed: Tensor) -> Tensor:
        """Return the state [..., C] at `token` [...]; `mixed` [..., C] sums up earlier tokens."""
        one = torch.tanh(self.own[token] + mixed)
        return one + torch.tanh(one @ self.inner)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.out.T + _bias()

    def states(self, tokens: Tensor) -> Tensor:
        """Return the states [B, T, C] of texts [B, T]."""
        positions = torch.arange(tokens.shape[1])
        gaps = (positions[:, None] - positions).clamp(min=0)
        weights = torch.where(gaps > 0, FADING**gaps, 0.0)
        return self.hidden(tokens, weights @ self.past[tokens])


@functools.cache
def _bias() -> Tensor:
    """Return a bias [V] that makes the end likelier, for backbone and heads alike."""
    return F.one_hot(torch.tensor(END), VOCAB).float()


@functools.cache
def _backbone() -> _Backbone:
    draw = torch.Generator().manual_seed(SEED)

    def some(*shape: int, scale: float) -> Tensor:
        return scale * torch.randn(*shape, generator=draw)

    return _Backbone(
        out=some(VOCAB, WIDTH, scale=0.9),
        own=some(VOCAB, WIDTH, scale=1.0),
        past=some(VOCAB, WIDTH, scale=0.7),
        inner=some(WIDTH, WIDTH, scale=1.5 * WIDTH**-0.5),
    )


@functools.cache
def _texts() -> Tensor:
    """Let the backbone write texts [2 * TEXTS, LENGTH]; the second half is held out."""
    backbone, draw = _backbone(), torch.Generator().manual_seed(SEED + 1)
    text = torch.randint(1, VOCAB, (2 * TEXTS, 2), generator=draw)
    mixed = FADING * backbone.past[text[:, 0]]
    while text.shape[1] < LENGTH:
        weights = backbone.logits(backbone.hidden(text[:, -1], mixed)).softmax(-1)
        mixed = FADING * (mixed + backbone.past[text[:, -1]])
        text = torch.cat((text, torch.multinomial(weights, 1, generator=draw)), 1)
    return text


def _labels(tokens: Tensor, first: int) -> Tensor:
    """Label [HEADS, B, T]: head i gets the token `first` + i positions ahead, none after an end."""
    ended = (tokens == END).cumsum(1) > 0
    open_text = torch.cat((torch.zeros_like(ended[:, :1]), ended[:, :-1]), 1)
    valid = tokens.masked_fill(open_text, NOTHING)
    found = []
    for head in range(HEADS):
        shift = first + head
        found.append(F.pad(valid[:, shift:], (0, shift), value=NOTHING))
    # The state of the end predicts nothing either: all later tokens come after the end.
    return torch.stack(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Checkpoint:
    """block: [HEADS, C, C]; out: [HEADS, V, C]; hits: [HEADS] on the labels of the training."""

    backbone: _Backbone
    block: Tensor
    out: Tensor
    hits: Tensor

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [HEADS, ..., V] of states [..., C]."""
        return _head_logits(hidden, self.block, self.out)


def _head_logits(hidden: Tensor, block: Tensor, out: Tensor) -> Tensor:
    flat = hidden.reshape(-1, WIDTH)
    inner = flat + F.silu(flat @ block)  # [HEADS, rows, C]
    return (inner @ out.mT).view(HEADS, *hidden.shape[:-1], VOCAB) + _bias()


@functools.cache
def training(shared: bool, early: bool, thawed: bool) -> tuple[_Checkpoint, ...]:
    """Train the heads, always on the same batches, and return all checkpoints."""
    start, draw = _backbone(), torch.Generator().manual_seed(SEED + 2)
    count = 1 if shared else HEADS
    block = torch.zeros(count, WIDTH, WIDTH, requires_grad=True)
    out = start.out.expand(count, VOCAB, WIDTH).clone().requires_grad_()
    backbone, trained = start, [block, out]
    if thawed:  # The heads have their own `out`.
        own, past, inner = (one.clone().requires_grad_() for one in start.weights()[:3])
        backbone = _Backbone(own=own, past=past, inner=inner, out=start.out)
        trained += own, past, inner
    moments: list[rules.State] = [{} for _ in trained]
    seen, held = _texts().chunk(2)
    frozen = start.states(seen)
    first = 1 if early else 2
    labels, held_labels = _labels(seen, first), _labels(held, first)
    found = []
    for step in range((CHECKPOINTS - 1) * EVERY + 1):
        if step % EVERY == 0:
            found.append(_checkpoint(backbone, block, out, held, held_labels))
        rows = torch.randint(TEXTS, (BATCH,), generator=draw)
        logits = _head_logits(
            backbone.states(seen[rows]) if thawed else frozen[rows],
            block.expand(HEADS, -1, -1),
            out.expand(HEADS, -1, -1),
        )
        loss = sum(
            0.8**head * F.cross_entropy(logits[head].flatten(0, 1), labels[head, rows].flatten())
            for head in range(HEADS)
        )
        grads = torch.autograd.grad(torch.as_tensor(loss), trained)
        # Every optimizer of torch first loads its compiler, which takes seconds; a rule does not.
        for i, (weight, grad) in enumerate(zip(trained, grads, strict=True)):
            weight.data, moments[i] = rules.adamw(weight.data, grad, moments[i], lr=RATE)
    return tuple(found)


@torch.no_grad()
def _checkpoint(
    backbone: _Backbone, block: Tensor, out: Tensor, held: Tensor, labels: Tensor
) -> _Checkpoint:
    own, past, inner, last = (one.detach().clone() for one in backbone.weights())
    block = block.detach().expand(HEADS, -1, -1).clone()
    out = out.detach().expand(HEADS, -1, -1).clone()
    copied = _Backbone(own=own, past=past, inner=inner, out=last)
    best = _head_logits(copied.states(held), block, out).argmax(-1)
    hits = [(best[i] == labels[i])[labels[i] != NOTHING].float().mean() for i in range(HEADS)]
    return _Checkpoint(backbone=copied, block=block, out=out, hits=torch.stack(hits))


@functools.cache
def _seen(siblings: bool) -> tuple[Tensor, Tensor]:
    """Return how much of each token goes into each past, [N + 1, N + 1], and depths [N + 1]."""
    size = len(PARENTS) + 1
    above = torch.tensor([0, *(parent + 1 for parent in PARENTS)])
    sees, depths = torch.eye(size, dtype=torch.bool), torch.zeros(size, dtype=torch.long)
    for node in range(1, size):
        sees[node] |= sees[above[node]]
        depths[node] = depths[above[node]] + 1
    if siblings:
        sees = torch.ones(size, size, dtype=torch.bool).tril()
    sees &= ~torch.eye(size, dtype=torch.bool)
    return sees * FADING ** (depths[:, None] - depths), depths


def _prompts() -> Tensor:
    draw = torch.Generator().manual_seed(SEED + 3)
    return torch.randint(1, VOCAB, (REQUESTS, PROMPT), generator=draw)


def _plain(backbone: _Backbone) -> Tensor:
    """Decode greedily, token by token: outputs [REQUESTS, LIMIT], -1 after the end."""
    root, mixed = _read(backbone)
    found, alive = [], torch.ones(REQUESTS, dtype=torch.bool)
    for _ in range(LIMIT):
        token = backbone.logits(backbone.hidden(root, mixed)).argmax(-1)
        mixed = FADING * (mixed + backbone.past[root])
        found.append(torch.where(alive, token, -1))
        alive = alive & (token != END)
        root = token
    return torch.stack(found, 1)


def _read(backbone: _Backbone) -> tuple[Tensor, Tensor]:
    """Return the prompts' last tokens, still unread, and the weighted sum of the earlier ones."""
    prompts = _prompts()
    falling = FADING ** torch.arange(PROMPT - 1, 0, -1)
    mixed = (falling[:, None] * backbone.past[prompts[:, :-1]]).sum(1)
    return prompts[:, -1], mixed


def _kept(tokens: Tensor, wanted: Tensor) -> Tensor:
    """Mark the root and the nodes on the accepted path: bool [REQUESTS, N + 1]."""
    passed = [torch.ones_like(tokens[:, 0], dtype=torch.bool)]
    for node, parent in enumerate(PARENTS, 1):
        passed.append(passed[parent + 1] & (tokens[:, node] == wanted[:, parent + 1]))
    return torch.stack(passed, 1)


def _drafted(engine: Engine, point: _Checkpoint) -> tuple[Tensor, int]:
    """Decode greedily with drafts, and verify each block in one forward.

    Returns outputs [REQUESTS, LIMIT], -1 after a request's end, and the steps of all requests.
    """
    backbone, rows = point.backbone, torch.arange(REQUESTS)
    root, mixed = _read(backbone)
    prompts = _prompts()
    last = backbone.states(prompts[:, :-1])[:, -2:]  # at the last two tokens read
    weights, depths = _seen(engine.siblings)
    size = torch.zeros(REQUESTS, dtype=torch.long)
    written = torch.full((REQUESTS, LIMIT), -1)
    alive, steps = torch.ones(REQUESTS, dtype=torch.bool), 0
    while alive.any():
        steps += int(alive.sum())
        best = point.logits(last[:, 0 if engine.stale else 1]).topk(2).indices
        nodes = [best[depth - 1, :, rank] for depth, rank in zip(depths[1:], RANKS, strict=True)]
        tokens = torch.stack((root, *nodes), 1)  # [REQUESTS, N + 1]
        past = FADING ** depths[:, None] * mixed[:, None] + weights @ backbone.past[tokens]
        hidden = backbone.hidden(tokens, past)
        wanted = backbone.logits(hidden).argmax(-1)
        kept = _kept(tokens, wanted)
        at = (kept * torch.arange(len(PARENTS) + 1)).amax(1)  # the deepest has the last number
        above = torch.tensor([0, *(parent + 1 for parent in PARENTS)])[at]
        before = torch.where((at == 0)[:, None], last[:, 1], hidden[rows, above])
        last = torch.stack((before, hidden[rows, at]), 1)
        for node in range(1, len(PARENTS) + 2):
            token = tokens[:, node] if node <= len(PARENTS) else wanted[rows, at]
            inside = alive & (size < LIMIT)
            if node <= len(PARENTS):
                inside = inside & kept[:, node]
            written[rows[inside], size[inside]] = token[inside]
            size = size + inside
        # The cache holds the path's own keys, whatever its nodes have seen.
        lines = kept * FADING ** (depths[at][:, None] - depths)
        deep = (FADING ** depths[at].float())[:, None]
        mixed = FADING * (deep * mixed + (lines[..., None] * backbone.past[tokens]).sum(1))
        root = wanted[rows, at]
        ended = (written == END).cumsum(1)
        if not engine.uncut:
            after_end = (ended > 0) & ((written != END) | (ended > 1))
            written = written.masked_fill(after_end, -1)
        alive = alive & (ended[:, -1] == 0) & (size < LIMIT)
    return written, steps


@functools.cache
@torch.no_grad()
def run(engine: Engine) -> Log:
    """Train the engine's heads and decode with them at every checkpoint."""
    before = _plain(_backbone())
    columns: dict[str, list[Tensor]] = {
        name: [] for name in ("hits", "tokens", "differing", "drifted", "longer")
    }
    with torch.enable_grad():
        points = training(engine.shared, engine.early, engine.thawed)
    for point in points:
        outputs, steps = _drafted(engine, point)
        plain = _plain(point.backbone)
        cut = torch.where(plain == -1, -1, outputs)
        columns["hits"].append(point.hits)
        columns["tokens"].append((outputs >= 0).sum() / steps)
        columns["differing"].append((outputs != before).any(1).float().mean())
        columns["drifted"].append((outputs != plain).any(1).float().mean())
        more = (outputs != plain).any(1) & (cut == plain).all(1)
        columns["longer"].append(more.float().mean())
    return Log(**{name: torch.stack(values) for name, values in columns.items()})
