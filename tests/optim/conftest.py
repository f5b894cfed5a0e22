"""Every test here checks its kernels' addresses, and chooses what `fused` runs on a CPU."""

import pytest

from labcore.optim import compiled
from tests.optim.lists import COMPILED, TRITON, needs_compiler, use_triton
from tests.sanitizer import in_bounds


@pytest.fixture(autouse=True)
def addresses_in_bounds():
    """See `tests.sanitizer`."""
    with in_bounds():
        yield


@pytest.fixture(autouse=True)
def what_fused_runs(request, monkeypatch) -> None:
    """Run the kernels where a parameter of the test is TRITON, and compile for two tensors."""
    monkeypatch.setattr(compiled, "GROUP", 2)  # eight take it some seconds
    chosen = getattr(request.node, "callspec", None)
    values = chosen.params.values() if chosen is not None else ()
    if any(value is TRITON for value in values):
        use_triton(monkeypatch)
    if any(value is COMPILED for value in values):
        needs_compiler()
