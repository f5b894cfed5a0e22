"""The tables of tiles: whole, chosen by what a device has, and what the gates compile."""

from types import SimpleNamespace

import pytest
import torch

from labcore import compile_only
from labcore.attention import configs
from labcore.attention.configs import FORWARD, KEYS, QUERIES, Config, choose, kind_for, kind_of

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("table", [FORWARD, KEYS, QUERIES])
def test_every_head_dimension_has_a_tile_for_every_kind(table) -> None:
    targets = compile_only.TARGETS.values()
    kinds = {kind_for(t.backend, t.major, t.shared_limit) for t in targets}
    assert kinds == {"blackwell", "hopper", "ampere", "ada", "cdna"}
    for head_dim in range(1, 257):
        for kind in kinds:
            for dtype in (torch.float16, torch.bfloat16, torch.float32):
                for tree in (False, True):
                    config = choose(table, kind, head_dim, dtype, tree=tree)
                    # Products take 16 rows at least, and ranges in a kernel powers of two.
                    assert all(n >= 16 and n & (n - 1) == 0 for n in (config.m, config.n))
                    assert config.warps in (4, 8) and config.stages in (1, 2, 3)


def test_columns_are_padded_to_the_next_power_of_two() -> None:
    wide = {n: configs.padded(n) for n in (1, 16, 17, 64, 80, 128, 129, 256)}
    assert wide == {1: 16, 16: 16, 17: 32, 64: 64, 80: 128, 128: 128, 129: 256, 256: 256}


@pytest.mark.parametrize(
    ("kib", "kind"),
    [(99, "ada"), (100, "ada"), (163, "ampere"), (227, "hopper"), (228, "hopper"), (None, "ada")],
)
def test_shared_memory_decides_the_kind(kib, kind: str, monkeypatch) -> None:
    properties = SimpleNamespace(major=9)  # without the number, the smallest tiles are safe
    if kib is not None:
        properties.shared_memory_per_block_optin = kib * 1024
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.version, "hip", None)
    assert kind_of(CUDA) == kind
    properties.major = 10
    assert kind_of(CUDA) == ("blackwell" if kind == "hopper" else kind)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert kind_of(CUDA) == "cdna"


def test_a_cpu_interprets() -> None:
    assert kind_of(torch.device("cpu")) == "interpreter"
    assert choose(FORWARD, "interpreter", 64, torch.float32) == Config(m=64, n=64)
