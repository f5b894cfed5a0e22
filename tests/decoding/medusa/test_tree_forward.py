"""One forward over a tree is a forward for each path, which catches a gallery of wrong trees."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from labcore.decoding.decoders import as_decoder
from labcore.decoding.medusa.trees import Tree, chain_tree, dense_tree
from labcore.models import Llama, pad_rows, tree_mask
from labcore.models.fused import FusedLlama
from tests.decoding.medusa.grown import random_tree, siblings_differ
from tests.models.shapes import CONFIGS, model_of


def by_path(model: Llama, prefix: list[int], tokens: list[int], tree: Tree) -> Tensor:
    """Logits [N, V]: behind each node, of a plain forward over the prefix and its path alone."""
    token = dict(zip(tree.choices, tokens, strict=True))
    rows = []
    for choice in tree.choices:
        said = [token[choice[: end + 1]] for end in range(len(choice))]
        rows.append(model(torch.tensor([[*prefix, *said]])).logits[0, -1])
    return torch.stack(rows)


def far(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, in parts of the largest logit."""
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max() / wanted.abs().max())


def by_mask(
    model: Llama, prefix: list[int], tokens: list[int], seen: Tensor, depths: Tensor
) -> Tensor:
    """Logits [N, V] of one forward without a cache in which node i sees the nodes of seen[i]."""
    before, nodes = len(prefix), len(tokens)
    mask = torch.ones(before + nodes, before + nodes).tril().bool()
    mask[before:, before:] = seen

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    reader = Llama(model.config, attention=attention).to(model.norm.weight.dtype)
    reader.load_state_dict(model.state_dict())
    positions = torch.cat((torch.arange(before), before + depths))[None]
    return reader(torch.tensor([[*prefix, *tokens]]), positions=positions).logits[0, before:]


def mask_of(parents: list[int]) -> Tensor:
    return tree_mask(torch.tensor([parents]))[0]


def level_above(tree: Tree) -> list[int]:
    """For each node the last node of the level above that stands before it."""
    levels = tree.depths
    return [
        max((other for other in range(node) if levels[other] == levels[node] - 1), default=-1)
        for node in range(tree.size)
    ]


def same_parent(tree: Tree) -> Tensor:
    parents = torch.tensor(tree.parents)
    return parents[:, None] == parents


def parent_alone(tree: Tree) -> Tensor:
    nodes = torch.arange(tree.size)
    return (nodes[:, None] == nodes) | (torch.tensor(tree.parents)[:, None] == nodes)


def counting(tree: Tree) -> Tensor:
    return torch.arange(tree.size)


FAULTS: dict[str, Callable[[Tree, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "siblings see each other": lambda tree, seen, depths: (seen | same_parent(tree), depths),
    "a level sees itself": lambda tree, seen, depths: (seen | (depths[:, None] == depths), depths),
    "everything before is seen": lambda tree, seen, depths: (torch.ones_like(seen).tril(), depths),
    "grandparents are not seen": lambda tree, seen, depths: (parent_alone(tree), depths),
    "descendants instead of ancestors": lambda tree, seen, depths: (seen.T, depths),
    "a node does not see itself": lambda tree, seen, depths: (
        seen & ~torch.eye(len(seen)).bool() | (depths == 0).diag(),
        depths,
    ),
    "positions count up": lambda tree, seen, depths: (seen, counting(tree)),
    "positions start one late": lambda tree, seen, depths: (seen, depths + 1),
    "all nodes at one position": lambda tree, seen, depths: (seen, torch.zeros_like(depths)),
    "the parent is the node before": lambda tree, seen, depths: (
        mask_of([node - 1 for node in range(tree.size)]),
        depths,
    ),
    "the parent is the node with the rank's number": lambda tree, seen, depths: (
        mask_of([-1 if len(c) == 1 else min(c[-2], i - 1) for i, c in enumerate(tree.choices)]),
        depths,
    ),
    "the parent is the last of the level above": lambda tree, seen, depths: (
        mask_of(level_above(tree)),
        depths,
    ),
}
"""What is planted: of a tree, its true mask and depths, the wrong ones."""

BUSHY = Tree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (2,), (0, 1, 0), (1, 0, 0), (1, 0, 1)))


def bushy_case(seed: int) -> tuple[Llama, list[int], list[int], Tensor]:
    draw = random.Random(seed)
    model = model_of(CONFIGS["grouped"], torch.Generator().manual_seed(seed)).double()
    prefix = [draw.randrange(37) for _ in range(6)]
    tokens = siblings_differ(BUSHY, 37, draw)
    return model, prefix, tokens, by_path(model, prefix, tokens, BUSHY)


@torch.no_grad()
def test_the_true_mask_reads_every_path(seed: int) -> None:
    model, prefix, tokens, wanted = bushy_case(seed)
    found = by_mask(model, prefix, tokens, BUSHY.mask(), torch.tensor(BUSHY.depths))
    assert far(found, wanted) < 1e-12


@pytest.mark.parametrize("name", list(FAULTS))
@torch.no_grad()
def test_the_law_catches_the_planted_fault(name: str, seed: int) -> None:
    model, prefix, tokens, wanted = bushy_case(seed)
    seen, depths = FAULTS[name](BUSHY, BUSHY.mask(), torch.tensor(BUSHY.depths))
    found = by_mask(model, prefix, tokens, seen, depths)
    assert far(found, wanted) > 1e-4


@pytest.mark.parametrize("family", ["grouped", "scaled", "qwen2"])
@pytest.mark.parametrize("fused", [False, True])
@torch.no_grad()
def test_one_forward_is_every_path_and_a_kept_path_is_plain_text(
    family: str, fused: bool, seed: int
) -> None:
    """Rows of other lengths with other trees, twice over one cache, as generation does it."""
    draw = random.Random(seed)
    model = model_of(CONFIGS[family], torch.Generator().manual_seed(seed))
    exact = copy.deepcopy(model).double()
    decoder = FusedLlama(model) if fused else as_decoder(exact)
    forest = [BUSHY, random_tree(draw, 13), chain_tree(3), Tree(()), dense_tree([3, 2, 2])]
    texts = [[draw.randrange(37) for _ in range(size)] for size in (5, 1, 9, 2, 17)]
    cache = decoder.new_cache(len(texts), 64)
    tokens, counts = pad_rows([text[:-1] for text in texts])
    decoder(tokens, counts=counts, cache=cache)
    for _ in range(2):
        drafted = [siblings_differ(tree, 37, draw) for tree in forest]
        # The last token of the text is the root of what is read.
        rows = [[text[-1], *said] for text, said in zip(texts, drafted, strict=True)]
        tokens, counts = pad_rows(rows)
        parents = [[-1, *(parent + 1 for parent in tree.parents)] for tree in forest]
        padded = [row + [-2] * (tokens.shape[1] - len(row)) for row in parents]
        tree = torch.tensor(padded, dtype=torch.int32)
        logits = decoder(tokens, counts=counts, cache=cache, tree=tree).logits
        for row, (text, said) in enumerate(zip(texts, drafted, strict=True)):
            wanted = exact(torch.tensor([text])).logits[0, -1:]
            if said:
                wanted = torch.cat((wanted, by_path(exact, text, said, forest[row])))
            found = logits[row, : len(said) + 1]
            assert far(found, wanted) < (1e-5 if fused else 1e-12)
            way = draw.choice(forest[row].paths()) if said else ()
            way = way[: draw.randrange(len(way) + 1)]
            cache.keep(row, [0, *(node + 1 for node in way)])
            text += [said[node] for node in way]
            assert int(cache.lengths[row]) == len(text)
            text.append(draw.randrange(37))
        draw.shuffle(forest)
    last = torch.tensor([text[-1:] for text in texts])
    counts = torch.ones(len(texts), dtype=torch.int32)
    logits = decoder(last, counts=counts, cache=cache).logits[:, 0]
    wanted = torch.stack([exact(torch.tensor([text])).logits[0, -1] for text in texts])
    assert far(logits, wanted) < (1e-5 if fused else 1e-12)
