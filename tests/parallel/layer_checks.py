"""Pairs of what a divided layer and a whole one compute, forward and backward."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from labcore.models.llama import RMSNorm
from labcore.parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    SequenceParallelNorm,
)
from labcore.parallel.regions import gather_from_ranks, rank_and_size
from labcore.parallel.vocabulary import (
    VocabParallelEmbedding,
    VocabParallelHead,
    vocab_parallel_cross_entropy,
)
from tests.parallel.pairs import Pairs
from tests.parallel.shapes import mine

# Under sequence parallelism 8 tokens; 5, which no N divides, without it.
B, T, SHORT, NARROW, WIDE, V = 3, 8, 5, 12, 20, 44


def random_linear(
    inner: int, outer: int, bias: bool, dtype: torch.dtype, g: torch.Generator
) -> nn.Linear:
    layer = nn.Linear(inner, outer, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(generator=g)
    return layer


def random(shape: tuple[int, ...], dtype: torch.dtype, g: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=g, dtype=dtype)


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def column(g: torch.Generator, *, dtype: torch.dtype) -> Pairs:
    for bias in (True, False):
        for gathered in (True, False):
            whole = random_linear(NARROW, WIDE, bias, dtype, g)
            own = ColumnParallelLinear.of(whole, gather_output=gathered)
            x = random((B, SHORT, NARROW), dtype, g)
            one, other = leaf(x), leaf(x)
            y, probe = whole(one), random((B, SHORT, WIDE), dtype, g)
            y.backward(probe)
            part = own(other)
            part.backward(probe if gathered else mine(probe, -1))
            label = f"bias={bias}, gathered={gathered}"
            yield f"{label}: y", part, y if gathered else mine(y, -1)
            yield f"{label}: x.grad", other.grad, one.grad
            yield f"{label}: weight.grad", own.weight.grad, mine(whole.weight.grad, 0)
            if bias:
                yield f"{label}: bias.grad", own.bias.grad, mine(whole.bias.grad, 0)


def row(g: torch.Generator, *, dtype: torch.dtype) -> Pairs:
    for bias in (True, False):
        for parallel in (True, False):
            whole = random_linear(WIDE, NARROW, bias, dtype, g)
            own = RowParallelLinear.of(whole, input_is_parallel=parallel)
            x = random((B, SHORT, WIDE), dtype, g)
            one, other = leaf(x), leaf(mine(x, -1) if parallel else x)
            y, probe = whole(one), random((B, SHORT, NARROW), dtype, g)
            y.backward(probe)
            part = own(other)
            part.backward(probe)
            label = f"bias={bias}, parallel={parallel}"
            yield f"{label}: y", part, y
            yield f"{label}: x.grad", other.grad, mine(one.grad, -1) if parallel else one.grad
            yield f"{label}: weight.grad", own.weight.grad, mine(whole.weight.grad, 1)
            if bias:
                yield f"{label}: bias.grad", own.bias.grad, whole.bias.grad


class Block(nn.Module):
    """A norm, a layer by columns, a bent line, a layer by rows, and the way around them."""

    def __init__(self, dtype: torch.dtype, g: torch.Generator) -> None:
        super().__init__()
        self.norm = RMSNorm(NARROW, 1e-6, dtype=dtype)
        nn.init.normal_(self.norm.weight, 1.0, 0.2, generator=g)
        self.up = random_linear(NARROW, WIDE, True, dtype, g)
        self.down = random_linear(WIDE, NARROW, True, dtype, g)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


def divided(whole: Block, dtype: torch.dtype) -> Block:
    block = Block(dtype, torch.Generator())
    block.norm = SequenceParallelNorm.of(whole.norm)
    block.up = ColumnParallelLinear.of(whole.up, sequence_parallel=True)
    block.down = RowParallelLinear.of(whole.down, sequence_parallel=True)
    return block


CUT = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


def sequence(g: torch.Generator, *, dtype: torch.dtype) -> Pairs:
    """Two blocks one after the other, between which each rank has its own tokens."""
    whole = [Block(dtype, g) for _ in range(2)]
    own = [divided(block, dtype) for block in whole]
    x, probe = random((B, T, NARROW), dtype, g), random((B, T, NARROW), dtype, g)
    one, other = leaf(x), leaf(mine(x, 1))
    y = whole[1](whole[0](one))
    part = own[1](own[0](other))
    y.backward(probe)
    part.backward(mine(probe, 1))
    yield "y", part, mine(y, 1)
    yield "all of y", gather_from_ranks(part, None, 1), y
    yield "x.grad", other.grad, mine(one.grad, 1)
    for number, (block, share) in enumerate(zip(whole, own, strict=True)):
        for name, parameter in block.named_parameters():
            wanted = mine(parameter.grad, CUT[name]) if name in CUT else parameter.grad
            yield f"{number}.{name}.grad", share.get_parameter(name).grad, wanted


def vocabulary(g: torch.Generator, *, dtype: torch.dtype) -> Pairs:
    """Embedding, head and loss; then the head tied to the embedding."""
    tokens = torch.randint(V, (B, T), generator=g)
    tokens[0, :2] = torch.tensor([0, V - 1])
    table = nn.Embedding(V, NARROW, dtype=dtype)
    nn.init.normal_(table.weight, generator=g)
    head = random_linear(NARROW, V, True, dtype, g)
    probe = random((B, T, V), dtype, g)
    embedded = table(tokens)
    logits = head(embedded.tanh())
    (logits * probe).sum().backward()
    for gathered in (True, False):
        own = VocabParallelEmbedding.of(table)
        last = VocabParallelHead.of(head, gather_output=gathered)
        found = own(tokens)
        ours = last(found.tanh())
        (ours * (probe if gathered else mine(probe, -1))).sum().backward()
        yield f"embedded, gathered={gathered}", found, embedded
        yield f"logits, gathered={gathered}", ours, logits if gathered else mine(logits, -1)
        for name, actual, expected in (
            ("table", own.weight, table.weight),
            ("weight", last.weight, head.weight),
            ("bias", last.bias, head.bias),
        ):
            yield f"{name}.grad, gathered={gathered}", actual.grad, mine(expected.grad, 0)
    spread = VocabParallelEmbedding.of(table, sequence_parallel=True)
    yield "embedded by tokens", spread(tokens), mine(embedded, 1)
    wide = random((B, T, NARROW), dtype, g)
    spread(tokens).backward(mine(wide, 1))
    (by_tokens,) = torch.autograd.grad(table(tokens), table.weight, wide)
    yield "table.grad by tokens", spread.weight.grad, mine(by_tokens, 0)


def cross_entropy(g: torch.Generator, *, dtype: torch.dtype) -> Pairs:
    logits = 30 * random((B, T, V), dtype, g)  # exp of the sum of them overflows
    labels = torch.randint(V, (B, T), generator=g)
    labels[0, :3] = torch.tensor([0, V - 1, -100])
    labels[2] = -100
    for reduction in ("mean", "sum", "none"):
        one, other = leaf(logits), leaf(mine(logits, -1))
        whole = F.cross_entropy(one.movedim(-1, 1), labels, reduction=reduction)
        loss = vocab_parallel_cross_entropy(other, labels, reduction=reduction)
        probe = torch.ones_like(whole) if whole.dim() == 0 else random((B, T), dtype, g)
        whole.backward(probe)
        loss.backward(probe)
        yield f"{reduction}: loss", loss, whole
        yield f"{reduction}: grad", other.grad, mine(one.grad, -1)
    strange = labels.where(labels != -100, 7)
    loss = vocab_parallel_cross_entropy(mine(logits, -1), strange, ignore_index=7)
    yield "ignored 7", loss, F.cross_entropy(logits.movedim(-1, 1), strange, ignore_index=7)
    half, wide = logits.to(torch.bfloat16), logits.to(torch.bfloat16).float().movedim(-1, 1)
    loss = vocab_parallel_cross_entropy(mine(half, -1), labels)
    # Both in float32, whatever the dtype of this check: rounded to what that can show.
    rounded = F.cross_entropy(wide, labels)
    close = (loss - rounded).abs() <= 1e-5 * rounded
    yield "bfloat16", torch.where(close, rounded, loss), rounded


def in_groups(g: torch.Generator, *, dtype: torch.dtype) -> Pairs:
    """Every second rank among themselves: a rank's place is that in its group."""
    rank, ranks = rank_and_size()
    groups = [dist.new_group(list(range(first, ranks, 2))) for first in range(2)]
    group = groups[rank % 2]
    place, size = rank // 2, ranks // 2
    up, down = (
        random_linear(NARROW, WIDE, True, dtype, g),
        random_linear(WIDE, NARROW, True, dtype, g),
    )
    table, head = nn.Embedding(V, NARROW, dtype=dtype), random_linear(NARROW, V, True, dtype, g)
    tokens, labels = torch.randint(V, (2, B, T), generator=g)
    own_table = VocabParallelEmbedding.of(table, group)
    own_up = ColumnParallelLinear.of(up, group)
    own_down = RowParallelLinear.of(down, group)
    own_head = VocabParallelHead.of(head, group, gather_output=False)
    whole = F.cross_entropy(head(down(F.silu(up(table(tokens))))).movedim(-1, 1), labels)
    logits = own_head(own_down(F.silu(own_up(own_table(tokens)))))
    loss = vocab_parallel_cross_entropy(logits, labels, group)
    whole.backward()
    loss.backward()
    yield "loss", loss, whole
    for name, own, weight, dim in (
        ("table", own_table, table, 0),
        ("up", own_up, up, 0),
        ("down", own_down, down, 1),
        ("head", own_head, head, 0),
    ):
        wanted = weight.weight.grad.tensor_split(size, dim)[place]
        yield f"{name}.weight.grad", own.weight.grad, wanted


def drawn(g: torch.Generator, *, dtype: torch.dtype) -> Pairs:
    """Fresh layers are the parts of a fresh whole layer of the same seed."""
    seed = int(torch.randint(2**31, (), generator=g))

    def fresh(kind: type[nn.Module], *sizes: int) -> nn.Module:
        torch.manual_seed(seed)
        return kind(*sizes, dtype=dtype)

    whole = fresh(nn.Linear, NARROW, WIDE)
    own = fresh(ColumnParallelLinear, NARROW, WIDE)
    yield "column", own.weight, mine(whole.weight, 0)
    yield "column's bias", own.bias, mine(whole.bias, 0)
    own = fresh(RowParallelLinear, NARROW, WIDE)
    yield "row", own.weight, mine(whole.weight, 1)
    yield "row's bias", own.bias, whole.bias
    table = fresh(nn.Embedding, V, NARROW)
    yield "table", fresh(VocabParallelEmbedding, V, NARROW).weight, mine(table.weight, 0)
    head = fresh(nn.Linear, NARROW, V)
    yield "head", fresh(VocabParallelHead, NARROW, V).weight, mine(head.weight, 0)


def as_torch_divides(g: torch.Generator, *, dtype: torch.dtype) -> Pairs:
    """The block, the embedding and the head that torch's parallelize_module divides."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    theirs = Block(dtype, g)
    own = divided(theirs, dtype)
    plan = {
        "norm": SequenceParallel(use_local_output=True),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(theirs, mesh, plan)
    x, probe = random((B, T, NARROW), dtype, g), random((B, T, NARROW), dtype, g)
    one, other = leaf(mine(x, 1)), leaf(mine(x, 1))
    y, ours = theirs(one), own(other)
    y.backward(mine(probe, 1))
    ours.backward(mine(probe, 1))
    yield "y", ours, y
    yield "x.grad", other.grad, one.grad
    for name, parameter in theirs.named_parameters():
        wanted = parameter.grad.full_tensor()
        wanted = mine(wanted, CUT[name]) if name in CUT else wanted
        yield f"{name}.grad", own.get_parameter(name).grad, wanted
    tokens = torch.randint(V, (B, SHORT), generator=g)
    pair = nn.Sequential(nn.Embedding(V, NARROW, dtype=dtype), nn.Linear(NARROW, V, dtype=dtype))
    with torch.no_grad():
        for parameter in pair.parameters():
            parameter.normal_(generator=g)
    ours = nn.Sequential(VocabParallelEmbedding.of(pair[0]), VocabParallelHead.of(pair[1]))
    into = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(pair, mesh, {"0": into, "1": ColwiseParallel(output_layouts=Replicate())})
    logits, gathered = pair(tokens), ours(tokens)
    probe = random((B, SHORT, V), dtype, g)
    logits.backward(probe)
    gathered.backward(probe)
    yield "logits", gathered, logits
    for name, parameter in pair.named_parameters():
        yield f"{name}.grad", ours.get_parameter(name).grad, mine(parameter.grad.full_tensor(), 0)


CHECKS = {
    "column": column,
    "row": row,
    "sequence": sequence,
    "vocabulary": vocabulary,
    "cross entropy": cross_entropy,
    "in groups": in_groups,
    "drawn": drawn,
    "as torch divides": as_torch_divides,
}
