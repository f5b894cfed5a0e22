import json

import numpy as np
import plotly.graph_objects as go
import pytest

from labcore.ui.compact import dumps, plain, pool


def restored(value, parts):
    """What the page's script does with references."""
    if isinstance(value, list):
        return [restored(item, parts) for item in value]
    if not isinstance(value, dict):
        return value
    if "$" in value:
        return restored(parts[value["$"]], parts)
    return {key: restored(item, parts) for key, item in value.items()}


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (2, 3, 4)])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 3e7])
def test_numbers_keep_four_digits_in_their_shape(shape, scale, seed):
    values = np.random.default_rng(seed).normal(size=shape) * scale
    small = np.asarray(plain(values), float)
    assert small.shape == shape
    # Half a unit in the fourth digit is at most 5e-4 of a value.
    assert np.allclose(small, values, rtol=5.01e-4, atol=0)


def test_a_narrow_range_far_from_zero_stays_visible():
    values = np.linspace(1000, 1001, 11)
    assert np.allclose(plain(values), values, atol=1e-4)
    assert plain([2.30121, 2.30189]) == [2.30121, 2.30189]


def test_a_log_range_keeps_its_small_values():
    assert plain(np.asarray([1.23456e-9, 1.0, 98765.4321])) == [1.235e-9, 1, 98770]


def test_non_numbers_become_null_and_whole_numbers_stay_exact():
    assert plain(np.asarray([1.0, np.nan, np.inf, -0.123456])) == [1, None, None, -0.1235]
    assert plain([123456, 7]) == [123456, 7]
    assert plain(np.asarray([2**40 + 1])) == [2**40 + 1]
    assert plain({"a": (True, None, "x", np.float32(0.5))}) == {"a": [True, None, "x", 0.5]}
    assert plain(np.asarray([])) == []


def test_plotly_packed_arrays_are_read(seed):
    z = np.random.default_rng(seed).normal(size=(3, 4))
    figure = go.Figure([go.Heatmap(z=z), go.Scatter(y=np.arange(5, dtype=np.int16))])
    packed = json.loads(figure.to_json())
    assert "bdata" in dumps(packed)
    heat, line = plain(packed["data"])
    assert np.allclose(heat["z"], z, atol=1e-3)
    assert line["y"] == [0, 1, 2, 3, 4]


def test_what_repeats_is_stored_once_and_comes_back(seed):
    rng = np.random.default_rng(seed)
    x, z = rng.normal(size=200).tolist(), rng.normal(size=(20, 20)).tolist()
    style = {"line": {"color": "#0072B2", "width": 2.5, "dash": "solid"}, "x": x}
    frames = [{"data": [{**style, "y": rng.normal(size=9).tolist()}, {"z": z}]} for _ in range(12)]
    short, parts = pool(frames)
    assert restored(short, parts) == frames
    assert len(dumps([short, parts])) < 0.2 * len(dumps(frames))
    assert dumps([short, parts]).count(dumps(x)) == 1


def test_parts_refer_only_to_parts_before_them():
    inner = list(range(50))
    short, parts = pool([{"a": inner, "b": 1}, {"a": inner, "b": 1}, {"c": inner}])
    for number, part in enumerate(parts):
        text = dumps(part)
        assert all(f'{{"$":{later}}}' not in text for later in range(number, len(parts)))
    assert restored(short, parts)[2] == {"c": inner}
