"""What is compiled ahead computes the same for any lengths, and refuses what it would misread."""

from __future__ import annotations

import pytest
import torch

from labcore.compiling import ahead
from tests.optim.lists import needs_compiler


def scaled(x: torch.Tensor, to: torch.Tensor) -> None:
    to.copy_(2 * x + 1)


def test_one_compilation_serves_any_length(seed: int) -> None:
    needs_compiler()
    zeros = torch.zeros
    run = ahead(scaled, (zeros(5, 6), zeros(5, 6)), (zeros(11, 12), zeros(11, 12)))
    assert run is not None
    draw = torch.Generator().manual_seed(seed)
    for shape in ((2, 3), (3, 2), (70, 1_001)):
        x, to = torch.randn(shape, generator=draw), torch.empty(shape)
        run(x, to)
        torch.testing.assert_close(to, 2 * x + 1, rtol=1e-6, atol=1e-6)


def test_a_tensor_that_is_there_twice_is_refused() -> None:
    one, other = torch.zeros(5), torch.zeros(7)
    with pytest.raises(ValueError, match="no tensor may be there twice"):
        ahead(scaled, (one, torch.zeros(5)), (other, other))


def test_what_cannot_be_compiled_is_said_once_and_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler\nmore lines")

    monkeypatch.setattr(torch, "compile", broken)
    arguments = (torch.zeros(5), torch.zeros(5))
    with pytest.warns(RuntimeWarning, match="runs as fused=False without one: RuntimeError: no c"):
        assert ahead(scaled, arguments, (torch.zeros(7), torch.zeros(7))) is None
