import math

import pytest
import torch

from labcore import checks


@pytest.mark.parametrize("value", [1e-300, 3, 2.5, torch.tensor(0.1), torch.tensor([7.0])])
def test_positive_returns_what_it_was_given(value):
    assert checks.positive("lr", value) is value


@pytest.mark.parametrize("value", [0, -1e-9, math.inf, math.nan, torch.tensor(-1.0)])
def test_positive_refuses_and_says_the_rule_and_what_came(value):
    with pytest.raises(ValueError, match=f"lr must be .*above 0, got {float(value)}; use 1e-3"):
        checks.positive("lr", value, "use 1e-3")


@pytest.mark.parametrize("value", ["0.1", None, True])
def test_a_number_of_the_wrong_type_is_a_type_error(value):
    with pytest.raises(TypeError, match="lr must be a number"):
        checks.non_negative("lr", value)


def test_a_tensor_of_many_numbers_is_refused():
    with pytest.raises(ValueError, match=r"one number, got a tensor of shape \(3,\)"):
        checks.positive("lr", torch.ones(3))


def test_non_negative_takes_zero_and_refuses_below():
    assert checks.non_negative("lr", 0) == 0
    with pytest.raises(ValueError, match="at least 0, got -0.1"):
        checks.non_negative("lr", -0.1)


@pytest.mark.parametrize("value", [-0.01, 1, 1.5, math.nan])
def test_fraction_refuses_what_is_no_decay_rate(value):
    with pytest.raises(ValueError, match="beta must be at least 0 and below 1"):
        checks.fraction("beta", value)


def test_fraction_takes_both_ends_that_make_sense():
    assert checks.fraction("beta", 0) == 0
    assert checks.fraction("beta", 0.999) == 0.999


def test_positive_int_refuses_floats_and_zero():
    assert checks.positive_int("repeats", 1) == 1
    with pytest.raises(TypeError, match=r"whole number, got 2\.0"):
        checks.positive_int("repeats", 2.0)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        checks.positive_int("repeats", 0)


def test_one_of_names_the_nearest():
    with pytest.raises(ValueError, match="'auto', 'torch', got 'tirch'; .*'torch'"):
        checks.one_of("backend", "tirch", ("auto", "torch"))
    assert checks.one_of("backend", "auto", ("auto", "torch")) == "auto"


def test_floating_says_how_to_convert():
    with pytest.raises(TypeError, match=r"got torch\.int64; convert it with grad\.float\(\)"):
        checks.floating("grad", torch.arange(3))
    with pytest.raises(TypeError, match="got list"):
        checks.floating("grad", [1.0])
    half = torch.ones(2, dtype=torch.bfloat16)
    assert checks.floating("grad", half) is half


def test_finite_counts_the_bad_elements():
    x = torch.tensor([1.0, math.nan, math.inf, -math.inf])
    with pytest.raises(ValueError, match="got 3 of 4 elements"):
        checks.finite("grad", x)
    assert checks.finite("grad", x[:1]) is not None


def test_same_shape_lists_the_shapes():
    with pytest.raises(ValueError, match=r"p \(2,\), g \(3,\)"):
        checks.same_shape(["p", "g"], [torch.ones(2), torch.ones(3)])
    checks.same_shape(["p", "g"], [torch.ones(2), torch.zeros(2)])
