"""Divided layers compute, forward and backward, their part of what whole layers compute."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from labcore import processes
from labcore.parallel import layers, regions, vocabulary
from labcore.parallel.layers import ColumnParallelLinear, RowParallelLinear, SequenceParallelNorm
from labcore.parallel.regions import gather_from_ranks, gather_sequence, rank_and_size
from labcore.parallel.vocabulary import (
    VocabParallelEmbedding,
    VocabParallelHead,
    vocab_parallel_cross_entropy,
)
from tests.parallel.layer_checks import CHECKS, NARROW, SHORT, WIDE, B, Block, T, V, divided
from tests.parallel.pairs import Differences, differences, module_seed, say

COUNTS = (2, 4)
DTYPES = (torch.float32, torch.float64)
# As many roundings in both: a gradient that is small everywhere is held to its own largest number.
LIMITS = {dtype: 4_500 * torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}


def faults() -> Iterator[tuple[str, str, mock._patch]]:
    """(name, the check that shows it, the patch that plants it)."""

    def bias_everywhere(self: RowParallelLinear, x: Tensor) -> Tensor:
        if not self.input_is_parallel:
            x = layers.scatter_to_ranks(x, self.group)
        leave = layers.scatter_sequence if self.sequence_parallel else layers.reduce_from_ranks
        return leave(F.linear(x, self.weight, self.bias), self.group)

    gather, reduce = regions._all_gather, regions._all_reduce

    def reversed_gather(x: Tensor, group: object, dim: int) -> Tensor:
        return torch.cat(gather(x, group, dim).chunk(rank_and_size()[1], dim)[::-1], dim)

    def mean(x: Tensor, group: object) -> Tensor:
        return reduce(x, group) / rank_and_size()[1]

    def other_row(tokens: Tensor, vocab: int, group: object) -> tuple[Tensor, Tensor]:
        index, own = index_of(tokens, vocab, group)
        return index, own | (index == 0)  # row 0 counts for the tokens of other ranks too

    def same(x: Tensor, group: object = None, dim: int = 0) -> Tensor:
        return x

    def gather_only(x: Tensor, group: object = None, dim: int = 1) -> Tensor:
        return gather_from_ranks(x, group, dim)

    index_of = vocabulary._own_index
    plant = functools.partial(mock.patch.object, layers)
    plant_word = functools.partial(mock.patch.object, vocabulary)
    yield (
        "bias on every rank",
        "row",
        mock.patch.object(RowParallelLinear, "forward", bias_everywhere),
    )
    yield (
        "bias on every rank, divided",
        "sequence",
        mock.patch.object(RowParallelLinear, "forward", bias_everywhere),
    )
    wrong = mock.patch.object(regions, "_all_gather", reversed_gather)
    yield "gather in the wrong order", "column", wrong
    yield "no sum in the column's backward", "column", plant("copy_to_ranks", same)
    yield "no sum of the norm's gradient", "sequence", plant("copy_to_ranks", same)
    yield "no reduce-scatter in the backward", "sequence", plant("gather_sequence", gather_only)
    yield "no sum after the rows", "row", plant("reduce_from_ranks", same)
    yield "mean instead of sum", "row", mock.patch.object(regions, "_all_reduce", mean)
    yield "row 0 for strangers", "vocabulary", plant_word("_own_index", other_row)
    yield "a sum of each rank's own", "cross entropy", plant_word("reduce_from_ranks", same)


def refusals() -> list[str]:
    ranks = rank_and_size()[1]
    odd = NARROW * ranks + 1
    asked = (
        lambda: ColumnParallelLinear(NARROW, odd),
        lambda: RowParallelLinear.of(nn.Linear(odd, NARROW)),
        lambda: VocabParallelEmbedding(odd, NARROW),
        lambda: VocabParallelHead(NARROW, odd),
        lambda: RowParallelLinear(WIDE, NARROW, sequence_parallel=True)(
            torch.zeros(B, ranks + 1, WIDE // ranks)
        ),
        lambda: vocab_parallel_cross_entropy(torch.zeros(B, T, V), torch.zeros(B, T + 1).long()),
        lambda: vocab_parallel_cross_entropy(torch.zeros(T, V), torch.zeros(T).long(), None,
                                             reduction="average"),
        lambda: VocabParallelEmbedding.of(nn.Embedding(V, NARROW, padding_idx=0, max_norm=1.0)),
    )  # fmt: skip
    told = []
    for ask in asked:
        with pytest.raises(ValueError) as problem:
            ask()
        told.append(str(problem.value))
    floats = torch.zeros(T)
    mistaken = {
        "linear must be of class Linear, got Embedding": lambda: RowParallelLinear.of(
            nn.Embedding(V, V)
        ),
        "linear must be of class Linear, got ReLU": lambda: VocabParallelHead.of(nn.ReLU()),
        "embedding must be of class Embedding, got Linear": lambda: VocabParallelEmbedding.of(
            nn.Linear(V, V)
        ),
        "norm must be of class RMSNorm, got LayerNorm": lambda: SequenceParallelNorm.of(
            nn.LayerNorm(V)
        ),
        "labels must be integers, got torch.float32": lambda: vocab_parallel_cross_entropy(
            torch.zeros(T, V), floats
        ),
    }
    for words, ask in mistaken.items():
        with pytest.raises(TypeError, match=re.escape(words)):
            ask()
    table = VocabParallelEmbedding(V, NARROW)
    for token in (V, -1, 3 * V, -V - 1):
        with pytest.raises(IndexError):
            table(torch.tensor([[0, token]]))
        with pytest.raises((IndexError, RuntimeError)):
            vocab_parallel_cross_entropy(torch.zeros(2, V // ranks), torch.tensor([0, token]))
    return told


def properties() -> dict[str, bool]:
    """What a divided layer keeps of the whole one, and what it lets go."""
    whole = nn.Linear(NARROW, WIDE).eval().requires_grad_(False)
    own, other = ColumnParallelLinear.of(whole), RowParallelLinear.of(whole)
    pointers = {p.untyped_storage().data_ptr() for p in whole.parameters()}
    copied = {p.untyped_storage().data_ptr() for m in (own, other) for p in m.parameters()}
    ranks = rank_and_size()[1]
    text = f"in_features={NARROW}, out_features={WIDE}, bias=True, ranks={ranks}"
    return {
        "frozen": not any(p.requires_grad for m in (own, other) for p in m.parameters()),
        "evaluates": not (own.training or other.training),
        "names": list(own.state_dict()) == list(whole.state_dict()) == list(other.state_dict()),
        "copies": not pointers & copied,
        "share": own.weight.untyped_storage().nbytes() * ranks == whole.weight.nbytes,
        "share by rows": other.weight.untyped_storage().nbytes() * ranks == whole.weight.nbytes,
        "contiguous": other.weight.is_contiguous(),
        "told": text in repr(own) and text in repr(other),
    }


def everything(seed: int) -> tuple[dict[torch.dtype, Differences], Differences, list[str], dict]:
    torch.manual_seed(seed)  # one seed on all ranks, for what is drawn without a generator
    found = {
        dtype: differences(
            {name: functools.partial(check, dtype=dtype) for name, check in CHECKS.items()}, seed
        )
        for dtype in DTYPES
    }
    planted: Differences = {}
    for name, shown_by, patch in faults():
        check = functools.partial(CHECKS[shown_by], dtype=torch.float64)
        with patch:
            planted |= differences({name: check}, seed)
    return found, planted, refusals(), properties()


@pytest.fixture(scope="module", params=COUNTS)
def runs(request: pytest.FixtureRequest) -> tuple[int, list]:
    came = processes.run(everything, request.param, module_seed(), timeout_s=300)
    return request.param, list(map(list, zip(*came, strict=True)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CHECKS)
def test_divided_layers_equal_whole_ones(name: str, dtype: torch.dtype, runs) -> None:
    _, (found, *_) = runs
    assert not say([one[dtype] for one in found], name, LIMITS[dtype])


def test_each_planted_fault_is_seen(runs) -> None:
    _, (_, planted, *_) = runs
    assert len(planted[0]) == 10
    for name in planted[0]:
        assert say(planted, name, 1e-3), name


def test_what_does_not_fit_is_refused_by_name(runs) -> None:
    ranks, (_, _, told, _) = runs
    odd = NARROW * ranks + 1
    vocabulary_told = f"vocab_size must .* {ranks} ranks, got {odd}"
    for sentences in told:
        for sentence, words in zip(
            sentences,
            (
                f"out_features must .* {ranks} ranks, got {odd}",
                f"in_features must .* {ranks} ranks, got {odd}",
                vocabulary_told,
                vocabulary_told,
                rf"dimension 1 .* shape \({B}, {ranks + 1}, {NARROW}\)",
                rf"labels must .* \({B}, {T}\) for .* \({B}, {T}, {V}\)",
                "reduction must be one of .* got 'average'",
                "embedding must be .* got .* padding_idx, max_norm",
            ),
            strict=True,
        ):
            assert re.search(words, sentence)


def test_a_part_is_a_small_copy_that_keeps_what_the_layer_was(runs) -> None:
    _, (_, _, _, kept) = runs
    for rank in kept:
        assert [name for name, holds in rank.items() if not holds] == []


def test_alone_a_divided_layer_is_the_whole_one(generator: torch.Generator) -> None:
    whole = Block(torch.float64, generator)
    x = torch.randn(B, SHORT, NARROW, generator=generator, dtype=torch.float64)
    own = divided(whole, torch.float64)
    torch.testing.assert_close(own(x), whole(x))
    assert torch.equal(gather_sequence(x), x)
    labels = torch.randint(NARROW, (B, SHORT), generator=generator)
    torch.testing.assert_close(
        vocab_parallel_cross_entropy(x, labels), F.cross_entropy(x.movedim(-1, 1), labels)
    )
