"""Medusa as a proposer: the right head's token in each node, and outputs as without it."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from labcore.decoding.audit import near_tie_audit
from labcore.decoding.contract import Draft, SamplingConfig, Verifier
from labcore.decoding.draws import Drawing
from labcore.decoding.generation import generate
from labcore.decoding.medusa.fused import FusedHeads
from labcore.decoding.medusa.heads import MedusaHeads
from labcore.decoding.medusa.proposer import Medusa
from labcore.decoding.medusa.trees import Tree, chain_tree, dense_tree, sparse_tree
from labcore.decoding.proposers import Adaptive
from labcore.decoding.theory.exact import (
    Context,
    Propose,
    Table,
    output_law,
    random_table,
    step_law,
    target_law,
    total_variation,
    typical_bias,
)
from labcore.decoding.verify import TypicalAcceptance, rejection_sampling, sample_and_compare
from labcore.models import Llama, LlamaConfig
from labcore.models.fused import FusedLlama
from tests.decoding.histories import on
from tests.decoding.medusa.grown import falling, random_tree
from tests.models.shapes import CONFIGS, model_of


def config_of(vocab: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=4,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
    )


class Told:
    """Heads that look their logits up: those of table[n] are for a hidden state that begins with n.

    table: [rows, K, V].
    """

    def __init__(self, table: Tensor) -> None:
        self.table, self.heads, self.config = table, table.shape[1], config_of(table.shape[2])
        self.calls: list[list[int]] = []

    def __call__(self, hidden: Tensor, count: int | None = None) -> Tensor:
        rows = hidden[:, 0].long()
        self.calls.append(rows.tolist())
        return self.table[rows].transpose(0, 1)[:count]


def told(rows: int, heads: int, vocab: int, seed: int) -> Told:
    return Told(torch.randn(rows, heads, vocab, generator=torch.Generator().manual_seed(seed)))


def drafts_of(
    medusa: Medusa, contexts: list[list[int]], most: list[int], hidden: Tensor | None
) -> list[Draft]:
    rows = len(contexts)
    samplings = [SamplingConfig(temperature=0.5 * row) for row in range(rows)]
    return medusa.propose(contexts, samplings, most, on(*range(rows)), hidden=hidden)


def test_each_node_is_its_heads_token_of_its_rank(seed: int) -> None:
    draw = random.Random(seed)
    heads = told(7, 5, 11, seed)
    order = heads.table.argsort(-1, descending=True)
    trees = [random_tree(draw, size) for size in (1, 5, 30)]
    for tree in (*trees, chain_tree(5), dense_tree([3, 2, 2]), dense_tree([11])):
        medusa = Medusa(heads, tree)
        contexts = [[draw.randrange(11)] * size for size in (2, 3, 1, 2, 9, 1, 4)]
        most = [3, 1, 5, 0, 99, 0, 2]
        hidden = torch.arange(7.0)[:, None].expand(7, 4)
        heads.calls = []
        drafts = drafts_of(medusa, contexts, most, hidden)
        # One call, and only of rows of which something was read and something is wanted.
        assert heads.calls == [[0, 1, 4, 6]]
        for row, (draft, limit) in enumerate(zip(drafts, most, strict=True)):
            cut = tree.cut(limit if len(contexts[row]) > 1 else 0)
            wanted = [
                int(order[row, level, rank])
                for level, rank in zip(cut.depths, cut.ranks, strict=True)
            ]
            assert draft.tokens.tolist() == wanted
            assert draft.parents.tolist() == list(cut.parents)
            assert draft.q is None
            assert draft.tokens.dtype == torch.int64 and draft.parents.dtype == torch.int32
            said = list(zip(cut.parents, wanted, strict=True))
            assert len(set(said)) == len(said)  # no two siblings with one token


def test_without_a_state_or_a_wish_nothing_is_drafted() -> None:
    heads = told(2, 3, 5, 0)
    hidden = torch.zeros(2, 4)
    for tree, most, given in (
        (chain_tree(3), [4, 4], None),
        (chain_tree(3), [0, 0], hidden),
        (Tree(()), [4, 4], hidden),
    ):
        medusa = Medusa(heads, tree)
        assert [len(draft) for draft in drafts_of(medusa, [[1, 2], [3, 4]], most, given)] == [0, 0]
        medusa.commit([])
    assert heads.calls == []


def test_what_does_not_fit_is_refused() -> None:
    heads = told(1, 3, 5, 0)
    with pytest.raises(ValueError, match="at most 3 levels deep for 3 heads, got 4"):
        Medusa(heads, chain_tree(4))
    with pytest.raises(ValueError, match="below 5, the vocabulary's size, got 5"):
        Medusa(heads, dense_tree([6]))
    medusa = Medusa(heads, dense_tree([5, 1, 1]))
    for hidden in (torch.zeros(2, 4), torch.zeros(4)):
        with pytest.raises(ValueError, match="B = 1 rows"):
            drafts_of(medusa, [[1, 2]], [3], hidden)
    with pytest.raises(ValueError, match="at least 0"):
        drafts_of(medusa, [[1, 2]], [-1], torch.zeros(1, 4))


def heads_of(backbone: Llama, generator: torch.Generator, spread: float = 0.3) -> MedusaHeads:
    """Heads that differ from one another and from the backbone's own; spread 0: untrained ones."""
    heads = MedusaHeads(backbone, heads=4)
    with torch.no_grad():
        for parameter in heads.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(spread * noise.to(parameter.dtype))
    return heads.eval()


@torch.no_grad()
def test_untrained_heads_repeat_what_the_backbone_says_next(generator: torch.Generator) -> None:
    model = model_of(CONFIGS["grouped"], generator)
    contexts = [torch.randint(37, (size,), generator=generator).tolist() for size in (2, 6, 11)]
    outputs = [model(torch.tensor([context[:-1]])) for context in contexts]
    hidden = torch.cat([output.hidden[:, -1] for output in outputs])
    medusa = Medusa(heads_of(model, generator, 0.0), dense_tree([1, 2, 1]))
    for draft, output in zip(drafts_of(medusa, contexts, [9, 9, 9], hidden), outputs, strict=True):
        first, second = output.logits[0, -1].topk(2).indices.tolist()
        assert draft.tokens.tolist() == [first, first, second, first, first]


@torch.no_grad()
def test_fused_heads_fill_the_same_tree(generator: torch.Generator) -> None:
    """Up to ties: the token of rank r has the r-th largest logit, to rounding."""
    model = model_of(CONFIGS["tied"], generator)
    heads, tree = heads_of(model, generator), dense_tree([4, 3, 2])
    hidden = torch.randn(3, 24, generator=generator)
    logits = heads(hidden)
    ranked = logits.sort(-1, descending=True).values
    for made in (heads, FusedHeads(heads)):
        for row, draft in enumerate(drafts_of(Medusa(made, tree), [[1, 2]] * 3, [9] * 3, hidden)):
            tokens = draft.tokens.tolist()
            for token, level, rank in zip(tokens, tree.depths, tree.ranks, strict=True):
                away = logits[level, row, token] - ranked[level, row, rank]
                assert abs(float(away)) < 1e-4


class Oracle:
    """Heads that know what the target says after each of its states, at ranks drawn by chance.

    model: fp64. texts: prompt and greedy output of each row. misses: chance that a head is wrong.
    ranks: a head that is right has the token at one of so many.
    """

    def __init__(
        self,
        model: Llama,
        texts: list[list[int]],
        draw: random.Random,
        misses: float = 0.15,
        ranks: int = 3,
    ) -> None:
        self.heads, self.config, vocab = 4, model.config, model.config.vocab_size
        states, logits = [], []
        for text in texts:
            states.append(model(torch.tensor([text])).hidden[0])
            for place in range(len(text)):
                rows = torch.rand(
                    4, vocab, generator=torch.Generator().manual_seed(draw.getrandbits(40))
                )
                for head, token in enumerate(text[place + 2 : place + 6]):
                    # Above all but `rank` tokens.
                    rank = vocab // 2 if draw.random() < misses else draw.randrange(ranks)
                    rows[head, token] = -1
                    others = rows[head].sort(descending=True).values
                    rows[head, token] = (others[rank] + (others[rank - 1] if rank else 2)) / 2
                logits.append(rows)
        self.states, self.logits = torch.cat(states), torch.stack(logits)

    def __call__(self, hidden: Tensor, count: int | None = None) -> Tensor:
        nearest = (hidden[:, None] - self.states).square().sum(-1).argmin(-1)
        return self.logits[nearest].transpose(0, 1)[:count]


def trees(draw: random.Random) -> dict[str, Tree]:
    return {
        "chain": chain_tree(4),
        "dense": dense_tree([3, 3, 2, 1]),
        "sparse": sparse_tree(falling(draw, 4, 6), 26),
        "grown": random_tree(draw, 20, heads=4, ranks=6),
    }


def ending_inside(model: Llama, draw: random.Random, size: int) -> list[int]:
    """A prompt, and an EOS for the model that ends its output behind 6 to 15 tokens."""
    for _ in range(200):
        prompt = draw.sample(range(37), size)
        said = generate(model, [prompt], SamplingConfig(max_tokens=16)).tokens[0]
        fresh = [token for place, token in enumerate(said) if token not in said[:place]][6:]
        if fresh:
            model.config = replace(model.config, eos_token_ids=(draw.choice(fresh),))
            return prompt
    raise AssertionError("every output repeats itself within six tokens")


@pytest.mark.parametrize("name", ["chain", "dense", "sparse", "grown"])
@pytest.mark.parametrize("batch", [1, 4])
@torch.no_grad()
def test_greedy_with_medusa_is_greedy(name: str, batch: int, seed: int) -> None:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    tree = trees(draw)[name]
    model = model_of(CONFIGS["grouped"], generator).double()
    prompts = [ending_inside(model, draw, 5)]
    prompts += [[draw.randrange(37) for _ in range(size)] for size in (1, 2, 8)[: batch - 1]]
    samplings = [SamplingConfig(max_tokens=most) for most in (20, 17, 1, 6)[:batch]]
    alone = [generate(model, [p], s) for p, s in zip(prompts, samplings, strict=True)]
    texts = [p + a.tokens[0] for p, a in zip(prompts, alone, strict=True)]
    oracle, sure = Oracle(model, texts, draw), Oracle(model, texts, draw, ranks=1, misses=0.0)
    for heads in (heads_of(model, generator), heads_of(model, generator, 0.0), oracle, sure):
        medusa = Medusa(heads, tree)
        for proposer in (medusa, Adaptive(medusa, start=2)):
            found = generate(model, prompts, samplings, proposer=proposer, trace=True)
            assert found.tokens == [plain.tokens[0] for plain in alone]
            assert found.finish == [plain.finish[0] for plain in alone]
            for row, prompt in enumerate(prompts):
                length = len(prompt) + len(found.tokens[row]) - 1
                assert found.trace is not None
                assert found.trace.row(row)[-1].target_length == length
        if heads is sure and name != "grown":
            assert found.statistics.accepted > 0
    assert alone[0].finish[0] == "eos"


@torch.no_grad()
def test_a_block_is_cut_at_an_eos_and_at_the_last_token(seed: int) -> None:
    """Heads that are always right: every output ends inside a block of five for some length."""
    draw = random.Random(seed)
    model = model_of(CONFIGS["grouped"], torch.Generator().manual_seed(seed)).double()
    prompt = ending_inside(model, draw, 3)
    plain = generate(model, [prompt], SamplingConfig(max_tokens=20)).tokens[0]
    endless = copy.deepcopy(model)
    endless.config = replace(model.config, eos_token_ids=())
    beyond = generate(endless, [prompt], SamplingConfig(max_tokens=30)).tokens[0]
    text = prompt + beyond
    medusa = Medusa(Oracle(model, [text], draw, misses=0.0), dense_tree([3, 3, 3, 3]))
    ends = set()
    for most in range(1, 21):
        sampling = SamplingConfig(max_tokens=most)
        found = generate(model, [prompt], sampling, proposer=medusa, trace=True, capacity=200)
        assert found.tokens == [plain[:most]]
        ended = most >= len(plain)
        assert found.finish == ["eos" if ended else "length"]
        assert found.statistics.steps == -(-min(most, len(plain)) // 5)
        assert found.trace is not None
        last = found.trace.steps[-1]
        ends.add((found.finish[0], len(last.tokens) < len(last.path) + 1))
    assert len(plain) % 5 == 0 or ("eos", True) in ends
    # At the last token it is the tree that is cut, and nothing is read in vain.
    assert ("length", False) in ends and ("length", True) not in ends


@pytest.mark.parametrize("name", ["chain", "sparse"])
@torch.no_grad()
def test_fused_model_and_heads_pass_the_near_tie_audit(name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = model_of(CONFIGS["scaled"], generator)
    exact = copy.deepcopy(model).double()
    prompts = [torch.randint(37, (size,), generator=generator).tolist() for size in (1, 7, 3)]
    tree = trees(random.Random(seed))[name]
    medusa = Medusa(FusedHeads(heads_of(model, generator)), tree)
    sampling = SamplingConfig(max_tokens=15)
    found = generate(FusedLlama(model), prompts, sampling, proposer=medusa)
    plain = generate(exact, prompts, sampling).tokens
    for row, prompt in enumerate(prompts):
        tokens = found.tokens[row]
        audit = near_tie_audit(exact, prompt, tokens, gap=1e-4)
        assert audit.passed and audit.tokens == len(tokens)
        assert tokens == plain[row] or audit.differences
        assert found.finish[row] == ("eos" if tokens[-1] in (3, 5) else "length")


@torch.no_grad()
def test_compared_draws_are_the_plain_ones(seed: int) -> None:
    """`sample_and_compare` draws once a token, so that the same seed gives the same output."""
    generator = torch.Generator().manual_seed(seed)
    model = model_of(CONFIGS["plain"], generator).double()
    prompts = [torch.randint(37, (size,), generator=generator).tolist() for size in (1, 4, 9)]
    samplings = [
        SamplingConfig(temperature=0.4 + 0.3 * row, max_tokens=9 + row, seed=seed + row)
        for row in range(3)
    ]
    plain = generate(model, prompts, samplings).tokens
    for tree in trees(random.Random(seed)).values():
        medusa = Medusa(heads_of(model, generator), tree)
        found = generate(model, prompts, samplings, proposer=medusa, verifier="sample_and_compare")
        assert found.tokens == plain


# The exact law, by enumeration.


def proposal_of(tree: Tree, vocab: int, seed: int, length: int | None = None) -> Propose:
    """Medusa itself as the proposal: heads that are functions of the context.

    length: tokens of the output, to which the tree is cut as generation cuts it.
    """
    tables = [random_table(vocab, seed + head) for head in range(tree.depth)]

    class Heads:
        heads, config = tree.depth, config_of(vocab)

        def __call__(self, hidden: Tensor, count: int | None = None) -> Tensor:
            context = tuple(hidden[0].long().tolist())
            return torch.stack([table(context) for table in tables[:count]])[:, None]

    medusa = Medusa(Heads(), tree)

    def propose(context: Context, draws: Drawing) -> Draft:
        most = 99 if length is None else length - (len(context) - 2) - 1
        sampling = SamplingConfig(temperature=1.0)
        seen = torch.tensor([context[:-1]])
        return medusa.propose([context], [sampling], [most], on(0), hidden=seen)[0]

    return propose


SMALL = {
    "chain": chain_tree(3),
    "siblings": dense_tree([3]),
    "dense": dense_tree([2, 2]),
    "uneven": Tree(((0,), (1,), (0, 0), (0, 0, 0), (1, 1))),
    "gaps": Tree(((1,), (1, 0), (2,), (2, 2), (1, 2), (3,))),
    "sparse": sparse_tree([[0.5, 0.2, 0.1], [0.4, 0.3, 0.1], [0.6, 0.2, 0.0]], 6),
}
START = (1, 0)
"""Two tokens: the target has read the first."""


def tables_of(vocab: int, seed: int) -> list[Table]:
    return [
        random_table(vocab, seed + 100),
        random_table(vocab, seed + 100, support=range(1, vocab - 1)),
        random_table(vocab, seed + 100, one_hot=True),
    ]


@pytest.mark.parametrize("verify", [rejection_sampling, sample_and_compare])
@pytest.mark.parametrize("name", list(SMALL))
@pytest.mark.parametrize("vocab", [4, 6])
def test_lossless_verifiers_keep_the_law_over_medusa_trees(
    verify: Verifier, name: str, vocab: int, seed: int
) -> None:
    tree = SMALL[name]
    for p in tables_of(vocab, seed):
        length = tree.depth + 1
        law = step_law(verify, p, proposal_of(tree, vocab, seed), length, START)
        assert total_variation(law, target_law(p, length, START)) < 1e-12


@pytest.mark.parametrize("verify", [rejection_sampling, sample_and_compare])
@pytest.mark.parametrize("name", ["dense", "gaps", "sparse"])
def test_so_they_do_over_several_steps_with_trees_cut_at_the_end(
    verify: Verifier, name: str, seed: int
) -> None:
    for p in tables_of(4, seed):
        law = output_law(verify, p, proposal_of(SMALL[name], 4, seed, length=4), 4, START)
        assert total_variation(law, target_law(p, 4, START)) < 1e-12


@pytest.mark.parametrize("name", list(SMALL))
def test_typical_acceptance_changes_the_law_and_greedy_stays(name: str, seed: int) -> None:
    biases = [
        typical_bias(TypicalAcceptance(), p, proposal_of(SMALL[name], 5, value), 3, START)
        for value in range(seed, seed + 4)
        for p in tables_of(5, value)[:1]
    ]
    assert max(biases) > 0.01
    one_hot = tables_of(5, seed)[2]
    propose = proposal_of(SMALL[name], 5, seed)
    assert typical_bias(TypicalAcceptance(), one_hot, propose, 3, START) < 1e-12
