"""With a cache the model computes what it computes without: steps, ragged rows, trees."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from labcore.models import DenseCache, KVCache, Llama, tree_mask
from tests.models.shapes import CONFIGS, model_of, tokens_of

# In double precision: what is left is rounding, and a slot too many shows.
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
# Two trees; a chain is one too. The second is padded.
PARENTS = torch.tensor(
    [[-1, 0, 0, -1, 1, 3, 1], [-1, 0, 1, 2, -2, -2, -2], [-1, -1, -1, 2, 3, 2, -2]],
    dtype=torch.int32,
)


def cache_of(model: Llama, *, batch: int, capacity: int) -> DenseCache:
    dtype = model.norm.weight.dtype
    return DenseCache(model.config, batch=batch, capacity=capacity, dtype=dtype)


def ancestors(parents: list[int], node: int) -> list[int]:
    """The path from the root to a node."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


@pytest.fixture(params=["plain", "grouped", "scaled", "qwen2"])
def model(request, generator: torch.Generator) -> Llama:
    return model_of(CONFIGS[request.param], generator).double()


@torch.inference_mode()
def test_pieces_equal_the_whole(model: Llama, generator: torch.Generator) -> None:
    tokens = tokens_of(model.config, (2, 23), generator)
    whole = model(tokens).logits
    for pieces in ([1] * 23, [7, 1, 15], [23]):
        cache = cache_of(model, batch=2, capacity=23)
        parts = [model(part, cache=cache).logits for part in tokens.split(pieces, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, **CLOSE)
        assert cache.lengths.tolist() == [23, 23]
        assert isinstance(cache, KVCache)


@torch.inference_mode()
def test_ragged_rows_equal_each_row_alone(model: Llama, generator: torch.Generator) -> None:
    cache = cache_of(model, batch=4, capacity=30)
    rows: list[list[int]] = [[], [], [], []]
    for counts in ([5, 1, 9, 3], [2, 6, 0, 1], [1, 1, 1, 1], [0, 4, 8, 2]):
        tokens = tokens_of(model.config, (4, max(counts)), generator)
        logits = model(tokens, counts=torch.tensor(counts), cache=cache).logits
        for row, count in enumerate(counts):
            rows[row] += tokens[row, :count].tolist()
            alone = model(torch.tensor([rows[row]])).logits[0]
            torch.testing.assert_close(
                logits[row, :count], alone[len(rows[row]) - count :], **CLOSE
            )
    assert cache.lengths.tolist() == [8, 12, 18, 7]


@torch.inference_mode()
def test_padding_without_a_cache_changes_no_valid_token(
    model: Llama, generator: torch.Generator
) -> None:
    tokens = tokens_of(model.config, (2, 9), generator)
    logits = model(tokens, counts=torch.tensor([4, 9])).logits
    torch.testing.assert_close(logits[0, :4], model(tokens[:1, :4]).logits[0], **CLOSE)


@torch.inference_mode()
def test_a_tree_equals_the_forwards_of_its_paths(model: Llama, generator: torch.Generator) -> None:
    prefixes = [tokens_of(model.config, (1, n), generator)[0] for n in (6, 1, 11)]
    nodes = tokens_of(model.config, (3, 7), generator)
    prompt = torch.nn.utils.rnn.pad_sequence(prefixes, batch_first=True)
    cache = cache_of(model, batch=3, capacity=40)
    model(prompt, counts=torch.tensor([6, 1, 11]), cache=cache)
    logits = model(nodes, cache=cache, tree=PARENTS).logits
    checked = 0
    for row, parents in enumerate(PARENTS.tolist()):
        for node in range(7):
            if parents[node] == -2:
                continue
            path = nodes[row, ancestors(parents, node)]
            alone = model(torch.cat((prefixes[row], path))[None]).logits[0, -1]
            torch.testing.assert_close(logits[row, node], alone, **CLOSE)
            checked += 1
    assert checked == 17
    assert cache.lengths.tolist() == [13, 5, 17]


@torch.inference_mode()
def test_kept_paths_go_on_as_if_they_were_read_alone(
    model: Llama, generator: torch.Generator
) -> None:
    prompt = tokens_of(model.config, (3, 5), generator)
    nodes = tokens_of(model.config, (3, 7), generator)
    after = tokens_of(model.config, (3, 2), generator)
    cache = cache_of(model, batch=3, capacity=14)
    model(prompt, cache=cache)
    model(nodes, cache=cache, tree=PARENTS)
    paths = [[3, 5], [], [2, 3, 4]]
    for row, path in enumerate(paths):
        cache.keep(row, torch.tensor(path, dtype=torch.int32) if path else path)
    assert cache.lengths.tolist() == [7, 5, 8]
    logits = model(after, cache=cache).logits
    for row, path in enumerate(paths):
        read = torch.cat((prompt[row], nodes[row, path], after[row]))
        torch.testing.assert_close(logits[row], model(read[None]).logits[0, -2:], **CLOSE)


@torch.inference_mode()
def test_truncated_rows_forget(model: Llama, generator: torch.Generator) -> None:
    tokens = tokens_of(model.config, (3, 10), generator)
    after = tokens_of(model.config, (3, 4), generator)
    cache = cache_of(model, batch=3, capacity=14)
    model(tokens, cache=cache)
    cache.truncate(torch.tensor([3, 0, 99]))
    assert cache.lengths.tolist() == [3, 0, 10]
    logits = model(after, cache=cache).logits
    for row, kept in enumerate([3, 0, 10]):
        read = torch.cat((tokens[row, :kept], after[row]))
        torch.testing.assert_close(logits[row], model(read[None]).logits[0, kept:], **CLOSE)


@torch.inference_mode()
def test_lengths_that_a_caller_fills_are_obeyed(generator: torch.Generator) -> None:
    model = model_of(CONFIGS["grouped"], generator).double()
    tokens = tokens_of(model.config, (1, 12), generator)
    cache = cache_of(model, batch=1, capacity=12)
    model(tokens[:, :11], cache=cache)
    cache.truncate(torch.tensor([2]))
    cache.buffers()["lengths"].fill_(11)
    logits = model(tokens[:, 11:], cache=cache).logits
    torch.testing.assert_close(logits[0], model(tokens).logits[0, 11:], **CLOSE)
    cache = cache_of(model, batch=1, capacity=12)
    model(tokens[:, :2], cache=cache)  # as far as the host knows, ten more fit
    cache.buffers()["lengths"].fill_(12)
    with pytest.raises(ValueError, match="at most 12 tokens, got 13"):
        model(tokens[:, 11:], cache=cache)


@torch.inference_mode()
def test_a_full_cache_refuses_and_a_truncated_one_goes_on(generator: torch.Generator) -> None:
    model = model_of(CONFIGS["grouped"], generator).double()
    cache = cache_of(model, batch=2, capacity=8)
    tokens = tokens_of(model.config, (2, 6), generator)
    model(tokens, counts=torch.tensor([6, 2]), cache=cache)
    model(tokens, counts=torch.tensor([2, 6]), cache=cache)  # the bound is 12, the rows hold 8
    assert cache.lengths.tolist() == [8, 8]
    with pytest.raises(ValueError, match="at most 8 tokens, got 9"):
        model(tokens[:, :1], cache=cache)
    assert cache.lengths.tolist() == [8, 8]
    cache.truncate(torch.tensor([7, 7]))
    model(tokens[:, :1], cache=cache)
    assert cache.lengths.tolist() == [8, 8]


def test_tree_mask_is_the_set_of_ancestors(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for size in (1, 2, 3, 8, 9, 33):
        parents = [int(torch.randint(-1, i, (1,), generator=generator)) if i else -1
                   for i in range(size)]  # fmt: skip
        chain = list(range(-1, size - 1))
        seen = tree_mask(torch.tensor([parents, chain], dtype=torch.int32))
        for row, tree in enumerate((parents, chain)):
            for node in range(size):
                assert seen[row, node].nonzero().flatten().tolist() == ancestors(tree, node)


class NoWaiting(TorchDispatchMode):
    """Raises when a value is read on the host, which on a GPU waits for the device."""

    READS = ("_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "equal")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.__name__.split(".")[0] in self.READS:
            raise RuntimeError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def test_a_forward_reads_nothing_back_to_the_host(generator: torch.Generator) -> None:
    model = model_of(CONFIGS["scaled"], generator)
    cache = cache_of(model, batch=3, capacity=30)
    tokens = tokens_of(model.config, (3, 7), generator)
    slots = torch.tensor([0, 1])
    with NoWaiting():
        model(tokens, counts=torch.tensor([5, 1, 7]), cache=cache)
        model(tokens, cache=cache, tree=PARENTS)
        cache.keep(1, slots)
        cache.truncate(torch.tensor([9, 2, 9]))
        with pytest.raises(RuntimeError, match="waits for the device"):
            int(cache.lengths.max())
    assert cache.lengths.tolist() == [9, 2, 9]


def test_a_forward_needs_no_values_at_all() -> None:
    model = Llama(CONFIGS["grouped"], device="meta")
    cache = DenseCache(model.config, batch=3, capacity=20, device="meta")
    with torch.no_grad():
        out = model(torch.zeros(3, 7, dtype=torch.long, device="meta"), cache=cache,
                    tree=PARENTS.to("meta"))  # fmt: skip
    assert out.logits.shape == (3, 7, 37)


def test_gradients_through_a_cache_are_refused(generator: torch.Generator) -> None:
    model = model_of(CONFIGS["grouped"], generator).double()
    cache = cache_of(model, batch=1, capacity=4)
    with pytest.raises(RuntimeError, match="keeps no gradients"):
        model(torch.zeros(1, 2, dtype=torch.long), cache=cache)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"counts": torch.ones(3, dtype=torch.int32)}, r"counts must have shape \(2,\)"),
        ({"counts": torch.ones(2)}, "counts must hold integers"),
        ({"positions": torch.zeros(1, 4, dtype=torch.int32)}, r"positions must have shape"),
        ({"tree": torch.zeros(2, 4, dtype=torch.int32)}, "a tree needs a cache"),
        ({"cache": DenseCache(CONFIGS["plain"], batch=3, capacity=4)}, "each of the 2 rows"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(options: dict, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Llama(CONFIGS["plain"])(torch.zeros(2, 4, dtype=torch.long), **options)


@torch.inference_mode()
def test_positions_and_the_attention_function_are_the_callers(generator: torch.Generator) -> None:
    config = CONFIGS["grouped"]
    calls = []

    def attention(q, k, v):
        calls.append((tuple(q.shape), tuple(k.shape)))
        return torch.zeros_like(q)

    tokens = tokens_of(config, (2, 5), generator)
    Llama(config, attention=attention)(tokens)
    assert calls == [((2, 6, 5, 4), (2, 2, 5, 4))] * 3
    model = model_of(config, generator)
    shifted = model(tokens, positions=torch.arange(5).expand(2, 5) + 40).logits
    torch.testing.assert_close(shifted, model(tokens).logits, rtol=1e-4, atol=1e-4)
    stretched = model(tokens, positions=torch.arange(5).expand(2, 5) * 3).logits
    assert (stretched - shifted).abs().max() > 1e-2
