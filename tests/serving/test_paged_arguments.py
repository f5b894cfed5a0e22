"""What does not fit into pages is refused before anything is changed."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from labcore.models import Llama
from labcore.serving.cache.paged import PagedCache
from tests.models.shapes import CONFIGS, model_of, tokens_of
from tests.serving.paging import FORMS, bound, poisoned, stored


@pytest.fixture
def grouped(generator: torch.Generator) -> Llama:
    return model_of(CONFIGS["grouped"], generator).double()


def test_gradients_are_refused(grouped: Llama, generator: torch.Generator) -> None:
    cache = bound(grouped, generator, page=4, rows=1, capacity=8, form="gathered")
    with pytest.raises(RuntimeError, match="keeps no gradients"):
        grouped(torch.zeros(1, 2, dtype=torch.long), cache=cache)
    with pytest.raises(RuntimeError, match="attend must follow write"):
        cache.attend(0, torch.zeros(1, 6, 1, 4), torch.ones(1, dtype=torch.int32), None)


@torch.inference_mode()
def test_full_pages_refuse_before_anything_is_written(
    grouped: Llama, generator: torch.Generator
) -> None:
    tokens = tokens_of(grouped.config, (2, 6), generator)
    for form, viewed in product(FORMS, (False, True)):
        cache = poisoned(grouped, page=4, rows=2, capacity=12, form=form)
        cache.bind([([2, 0], 0), ([1, 3], 0)])
        over = cache.first_rows(2) if viewed else cache
        grouped(tokens, counts=torch.tensor([6, 2]), cache=over)
        grouped(tokens, counts=torch.tensor([2, 6]), cache=over)  # the bound is 12, the rows hold 8
        assert cache.lengths.tolist() == [8, 8]
        before = [pages.clone() for pages in stored(cache)]
        with pytest.raises(ValueError, match="at most the 8 tokens .* got 9 in row 1"):
            grouped(tokens[:, :1], counts=torch.tensor([0, 1]), cache=over)
        assert cache.lengths.tolist() == [8, 8]
        for pages, old in zip(stored(cache), before, strict=True):
            assert torch.equal(pages.nan_to_num(7.0), old.nan_to_num(7.0))
        over.truncate(torch.tensor([7, 7]))
        grouped(tokens[:, :1], cache=over)
        assert cache.lengths.tolist() == [8, 8]


@pytest.mark.parametrize(
    ("rows", "counts", "message"),
    [
        ([([], 0)] * 4, None, "rows must be at most 3, got 4"),
        ([([0, 1, 2], 0)], None, "at most 2 blocks, got 3 in row 0"),
        ([([0], 0), ([1], 5)], None, "must hold 0 to 4 tokens, got 5 in row 1"),
        ([([0], -1)], None, "must hold 0 to 4 tokens, got -1"),
        ([([0, 6], 5)], None, r"between 0 and 5, got \[0, 6\] in row 0"),
        ([([0, -1], 3)], None, "between 0 and 5"),
        ([([0], 1)], [1, 1], "counts .* 1 rows, got 2"),
        ([([0], 1), ([3], 2)], [1, 3], "at most the 4 tokens .* got 5 in row 1"),
        ([([0], 1)], [-1], "got 0 in row 0"),
        ([([0, 1], 4), ([2, 1], 4)], [2, 1], "got block 1 in rows 0 and 1; copy it first"),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows: list, counts: list | None, message: str) -> None:
    cache = PagedCache(CONFIGS["plain"], pages=6, page=4, rows=3, max_pages=2)
    cache.bind([([5, 2], 7)], [1])
    with pytest.raises(ValueError, match=message):
        cache.bind(rows, counts)
    assert cache.lengths.tolist() == [7, 0, 0]
    assert cache.block_table.tolist() == [[5, 2], [-1, -1], [-1, -1]]


def test_rows_may_share_what_they_do_not_write() -> None:
    cache = PagedCache(CONFIGS["plain"], pages=6, page=4, rows=3, max_pages=2)
    cache.first_rows(1).bind([([0, 1], 4), ([0, 2], 4), ([0], 4)], [2, 1, 0])
    assert cache.block_table.tolist() == [[0, 1], [0, 2], [0, -1]]
    assert cache.lengths.tolist() == [4, 4, 4]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cache: cache.first_rows(0), "between 1 and 3, got 0"),
        (lambda cache: cache.first_rows(2).first_rows(3), "between 1 and 2, got 3"),
        (lambda cache: cache.copy_page(0, 6), "between 0 and 5, got 6"),
        (lambda cache: cache.copy_page(-1, 0), "between 0 and 5, got -1"),
        (lambda cache: cache.truncate(torch.zeros(2)), r"shape \(3,\), got \(2,\)"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call, message: str) -> None:
    cache = PagedCache(CONFIGS["plain"], pages=6, page=4, rows=3, max_pages=2)
    with pytest.raises(ValueError, match=message):
        call(cache)


def test_sizes_that_are_none_are_refused() -> None:
    fitting = {"pages": 6, "page": 4, "rows": 3, "max_pages": 2}
    for name in fitting:
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            PagedCache(CONFIGS["plain"], **{**fitting, name: 0})
    with pytest.raises(ValueError, match="attention must be one of .* did you mean 'paged'"):
        PagedCache(CONFIGS["plain"], **fitting, attention="pagd")  # type: ignore[arg-type]
