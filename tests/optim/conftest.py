"""Every kernel that these tests launch is checked for addresses outside its tensors."""

import pytest

from tests.sanitizer import in_bounds


@pytest.fixture(autouse=True)
def addresses_in_bounds():
    """See `tests.sanitizer`."""
    with in_bounds():
        yield
