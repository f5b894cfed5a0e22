import pytest
import torch

from labcore import data
from labcore.data import python


@pytest.mark.parametrize("share", [0.5, 0.8, 0.93])
def test_digits_are_split_once_and_whole(seed, share):
    d = data.digits(train_share=share, seed=seed)
    assert len(d.train_x) == len(d.train_y) == round(share * 1797)
    assert len(d.train_x) + len(d.test_x) == 1797
    both = torch.cat([d.train_x, d.test_x])
    assert both.min() == 0
    assert both.max() == 1
    unsplit = data.digits(train_share=share, seed=seed + 1)
    other = torch.cat([unsplit.train_x, unsplit.test_x])
    # The same images in another order: equal as multisets of their pixel sums.
    assert torch.equal(both.sum(1).sort().values, other.sum(1).sort().values)
    assert not torch.equal(both, other)


def test_digits_repeat_and_do_not_share_memory(seed):
    first, second = data.digits(seed=seed), data.digits(seed=seed)
    assert torch.equal(first.train_x, second.train_x)
    first.train_x.zero_()
    assert second.train_x.abs().sum() > 0
    assert "scikit-learn" in first.version


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_digits_take_a_dtype(dtype):
    d = data.digits(dtype=dtype)
    assert d.train_x.dtype == d.test_x.dtype == dtype
    assert d.train_y.dtype == torch.int64
    # Sixteenths are exact in every dtype offered.
    assert torch.equal(d.train_x.double(), data.digits(dtype=torch.float64).train_x)


def test_bad_arguments_say_what_to_do():
    with pytest.raises(ValueError, match="train_share must be between 0 and 1, got 1"):
        data.digits(train_share=1)
    with pytest.raises(ValueError, match="dtype must be one of"):
        data.digits(dtype=torch.int8)
    with pytest.raises(ValueError, match="data set must be one of .*did you mean 'digits'"):
        data.load("digit")
    with pytest.raises(ValueError, match="part must be one of 'train', 'held_out'"):
        data.python_text("test")


@pytest.mark.parametrize("read", [data.python_sources, data.python_text])
def test_the_two_parts_share_no_file(read):
    train, held_out = read("train", max_bytes=400_000), read("held_out", max_bytes=100_000)
    assert not set(train.files) & set(held_out.files)
    assert train.files
    assert held_out.files
    assert len(train.text.encode()) <= 400_000 + len(train.files)
    assert train.version.startswith("Python 3.")
    assert not any("test" in name.split("/")[:-1] for name in train.files)


def test_a_limit_keeps_whole_files_from_the_front():
    small = data.python_sources(max_bytes=50_000)
    large = data.python_sources(max_bytes=200_000)
    assert large.files[: len(small.files)] == small.files
    assert large.text.startswith(small.text)
    assert len(data.python_sources(max_bytes=1).files) == 1


def test_about_a_tenth_is_held_out():
    names = [f"package/module_{k}.py" for k in range(4000)]
    share = sum(python._part_of(name, 10) == "held_out" for name in names) / len(names)
    assert 0.08 < share < 0.12


def test_docstrings_are_read_from_modules_classes_and_functions():
    source = '"""M."""\nclass A:\n    """C."""\n    def f(self):\n        """F."""\nx = "no"\n'
    assert python._docstrings(source).split() == ["M.", "C.", "F."]
    assert python._docstrings("def broken(:") == ""


def test_a_python_without_sources_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(python, "_library", lambda: tmp_path)
    with pytest.raises(FileNotFoundError, match="no Python sources under"):
        data.python_sources()


def test_load_by_name_is_the_same_function():
    assert torch.equal(data.load("digits", seed=3).train_x, data.digits(seed=3).train_x)
