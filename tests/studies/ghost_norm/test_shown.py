"""The tokens that are normalized by hand, and what the chapter reads of the sweep."""

import pytest
import torch
from torch import nn

from labcore.norm import GhostBatchNorm1d
from labcore.studies.ghost_norm import shown, sweeps


def test_tokens_are_normalized_as_the_layers_do(generator: torch.Generator) -> None:
    table = torch.randn(7, 3, generator=generator)
    layers = {"batch": nn.BatchNorm1d(3), "layer": nn.LayerNorm(3), "RMS": nn.RMSNorm(3, eps=1e-5)}
    for norm, layer in layers.items():
        torch.testing.assert_close(shown.normalized(table, norm), layer(table))
    ghosts = GhostBatchNorm1d(3, ghost_size=4)
    torch.testing.assert_close(shown.normalized(table[:4], "ghosts", ghost=4), ghosts(table[:4]))
    parts = [shown.normalized(part, "batch") for part in table[:6].split(3)]
    assert torch.equal(shown.normalized(table[:6], "ghosts", ghost=3), torch.cat(parts))
    with pytest.raises(ValueError, match="norm must be one of"):
        shown.normalized(table, "group")


def test_the_table_has_a_row_for_every_name() -> None:
    assert len(shown.TABLE) == len(shown.ROWS) == 6
    assert all(len(row) == 3 for row in shown.TABLE)


def test_the_chapter_reads_every_batch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "sweep", lambda kind, batch: {0.1: {"from": (kind, batch)}})
    found = shown.by_norm()
    assert list(found) == list(shown.NORMS)
    assert found["ghosts of 32"][32] == {0.1: {"from": ("batch norm", 32)}}
    assert found["ghosts of 32"][512] == {0.1: {"from": ("ghosts of 32", 512)}}
    paths = shown.paths()
    assert list(paths[32]) == ["batch norm"]
    assert "layer norm" not in paths[512] and len(paths[512]) == 4


def test_costs_are_rows_and_time_of_the_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        shown, "costs_by_batch", lambda norm, loss: {b: [32 * loss / b] * 2 for b in sweeps.BATCHES}
    )
    found = shown.costs([1.0, 2.0, 4.0, 8.0])
    assert list(found) == list(shown.NORMS) and list(found["layer norm"]) == [
        f"{loss:g}" for loss in sweeps.LOSSES
    ]
    ratios = found["batch norm"]["0.5"]
    assert ratios["updates"][1] == pytest.approx([1 / 8, 1 / 8])
    assert all(ratio == pytest.approx(0.5) for row in ratios["rows"] for ratio in row)
    assert ratios["time"][3] == pytest.approx([8 / 128] * 2)
    assert "time" not in found["layer norm"]["0.5"]
