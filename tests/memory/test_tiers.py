"""What goes down comes back as it was, whatever was written meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from labcore.memory import Disk, Host


@pytest.mark.parametrize("make", [Host, Disk])
def test_what_was_written_last_comes_back(
    make: Callable[[], Host | Disk], generator: torch.Generator
) -> None:
    tier, kept = make(), {}
    for number in torch.randint(6, (40,), generator=generator).tolist():
        size = int(torch.randint(1 << 18, (), generator=generator)) if number else 0
        data = torch.randint(256, (size,), dtype=torch.uint8, generator=generator)
        tier.write((number, 1), data)
        kept[number] = data.clone()
        data.zero_()
    for number, expected in kept.items():
        came = torch.empty_like(expected)
        tier.read((number, 1), came)
        assert torch.equal(came, expected)
    tier.close()


def test_a_file_may_take_less_than_it_is_given(generator: torch.Generator) -> None:
    class Little:
        def __init__(self, file: Any) -> None:
            self.seek, self.close = file.seek, file.close
            self.write = lambda data: file.write(data[:70])
            self.readinto = lambda data: file.readinto(data[:30])

    tier = Disk()
    tier._file = Little(tier._file)
    parts = [torch.randint(256, (n,), dtype=torch.uint8, generator=generator) for n in (333, 90)]
    for number, data in enumerate(parts):
        tier.write((number, 0), data)
    for number, expected in enumerate(parts):
        came = torch.empty_like(expected)
        tier.read((number, 0), came)
        assert torch.equal(came, expected)
    tier.close()


def test_a_disk_that_loses_bytes_is_reported() -> None:
    tier = Disk()
    tier.write((0, 0), torch.arange(100, dtype=torch.uint8))
    tier._file.truncate(60)
    with pytest.raises(RuntimeError, match="must hold 100 bytes, got 40 too few"):
        tier.read((0, 0), torch.empty(100, dtype=torch.uint8))
    tier.close()


def test_a_disk_takes_nothing_of_a_gpu() -> None:
    tier = Disk()
    with pytest.raises(ValueError, match=r"Disk .* got one on meta; .* Host\(\)"):
        tier.write((0, 0), torch.empty(3, dtype=torch.uint8, device="meta"))
    tier.close()


@pytest.mark.parametrize("make", [Host, Disk])
def test_what_is_no_row_of_bytes_or_was_not_written_is_refused(
    make: Callable[[], Host | Disk],
) -> None:
    tier = make()
    data = torch.zeros(10, dtype=torch.uint8)
    for wrong in (data.float(), data.view(2, 5), data[::2]):
        with pytest.raises(ValueError, match=rf"data must be .* got {wrong.dtype} \({len(wrong)}"):
            tier.write((0, 0), wrong)
    tier.write((0, 0), data)
    tier.write((1, 0), data)
    with pytest.raises(ValueError, match=r"under \(2, 0\), where nothing was written"):
        tier.read((2, 0), data)
    for size in (9, 11):  # of a file, eleven would have a byte of the next one
        with pytest.raises(ValueError, match="where 10 bytes were written"):
            tier.read((0, 0), torch.empty(size, dtype=torch.uint8))
    tier.close()
