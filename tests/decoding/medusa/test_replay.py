"""A replay counts the steps that generation takes."""

from __future__ import annotations

import pytest
import torch

from labcore.decoding import SamplingConfig, generate, medusa
from labcore.decoding.medusa import MedusaHeads, replay_text
from labcore.decoding.medusa.proposer import Medusa
from labcore.decoding.medusa.training import output_ranks
from labcore.decoding.medusa.trees import Tree, chain_tree, dense_tree
from tests.decoding.medusa.test_heads import backbone_of, shaken

TREES = [
    chain_tree(3),
    dense_tree([3, 2]),
    Tree(((0,), (1,), (0, 0), (2,), (0, 1), (0, 0, 1), (1, 0))),
]


@pytest.mark.parametrize("tree", TREES, ids=["chain", "dense", "sparse"])
def test_a_replay_takes_the_steps_of_generation(tree, generator) -> None:
    """Greedy: of each step the tokens that were accepted, until the output ends."""
    backbone = backbone_of(generator, vocab_size=9)
    heads = shaken(MedusaHeads(backbone, heads=3, projection="full"), generator, 0.05).eval()
    prompt = torch.randint(9, (6,), generator=generator).tolist()
    asked = SamplingConfig(max_tokens=50)
    told = generate(backbone, [prompt], asked, proposer=Medusa(heads, tree), trace=True)
    # Its last token is read by the first step: the first state is that before it.
    first, said = prompt[:-1], [prompt[-1], *told.tokens[0]]
    steps = replay_text(tree, output_ranks(heads, backbone, first, said, top=9))
    wanted = [step.path for step in told.trace.row(0)]
    whole = min(len(steps), len(wanted)) - 1  # the last one may be cut at the end
    assert whole > 5
    assert [*map(tuple, wanted[:whole])] == steps[:whole]


def test_every_token_is_counted_once(seed: int) -> None:
    ranks = torch.randint(3, (200, 3), generator=torch.Generator().manual_seed(seed))
    for tree in TREES:
        steps = replay_text(tree, ranks)
        assert 200 <= sum(len(path) + 1 for path in steps) <= 200 + tree.depth
        parents = tree.parents
        for path in steps:
            assert all(parents[b] == a for a, b in zip((-1, *path), path, strict=False))


def test_too_few_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="3 heads, got 2"):
        replay_text(chain_tree(3), [[0, 0]])
    assert medusa.replay_text is replay_text


def test_a_short_output_is_refused(generator) -> None:
    backbone = backbone_of(generator)
    heads = MedusaHeads(backbone, heads=3)
    with pytest.raises(ValueError, match="at least 4, got 2 and 3"):
        output_ranks(heads, backbone, [1, 2], [3, 4, 5])
