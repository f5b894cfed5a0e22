"""The sanitizer finds an access outside a kernel's tensors, and only that."""

import pytest
import torch

from labcore import device
from tests.sanitizer import in_bounds

triton = pytest.importorskip("triton", reason=device.triton_problem() or "Triton")
if not device.interpreting():
    pytest.skip("needs Triton's interpreter", allow_module_level=True)
tl = triton.language


@triton.jit
def copy_kernel(x_ptr, y_ptr, n, m, BLOCK: tl.constexpr, ADD: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n)
    if ADD:
        tl.atomic_add(y_ptr + offs, x, mask=offs < m)
    else:
        tl.store(y_ptr + offs, x, mask=offs < m)


@pytest.mark.parametrize("add", [False, True])
def test_an_address_past_a_tensor_is_an_error(add: bool) -> None:
    x, y = torch.randn(60), torch.zeros(50)
    with in_bounds():
        copy_kernel[(1,)](x, y, 60, 50, 64, add)
        assert torch.equal(y, x[:50])
        with pytest.raises(Exception, match="create_masked_load: 1 addresses are out of bounds"):
            copy_kernel[(1,)](x, y, 61, 50, 64, add)
        with pytest.raises(Exception, match="create_.*: 2 addresses are out of bounds"):
            copy_kernel[(1,)](x, y, 60, 52, 64, add)
        with pytest.raises(Exception, match="out of bounds"):
            copy_kernel[(1,)](x[10:].flip(0), y.half(), 60, 1, 64, False)
