"""Compilers for AMD GPUs: a test that needs one skips without it on a user's machine, not in CI."""

import os

import pytest

from labcore.hip import compile as hip


def need(target: str) -> None:
    """Go on only where `target` can be compiled for; fail where CI=true and it cannot."""
    lacking = hip.missing(target)
    if lacking is None:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI must compile for every gated target: {lacking}")
    pytest.skip(lacking)
