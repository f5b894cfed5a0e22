"""`python -m benchmarks --gpu` on a stand-in: a CPU that says it is a GPU, with small sizes."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import attention, lion, runner
from labcore import device, records
from labcore.optim import adamw8bit_optimizer, fused
from tests.optim.lists import use_triton


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The GPU cases of attention and lion run small, on the CPU, as on a GPU of this name."""
    told = replace(device.hardware(), kind="stand-in", name="Stand-in")
    for module in (command, runner):
        monkeypatch.setattr(module, "hardware", lambda: told)
    monkeypatch.setattr(runner.Case, "runs_here", lambda case: case.needs != "cpu")
    monkeypatch.setattr(runner, "slugs", lambda: ["attention", "lion"])
    for module in (attention, lion):
        monkeypatch.setattr(module, "default_device", lambda: torch.device("cpu"))
    for case in runner.cases_of("attention"):
        if case.name.startswith(("forward", "backward", "parity")):
            monkeypatch.setattr(case.function, "__defaults__", (attention.SMALL,))
    small = dict.fromkeys(attention.DECODE, attention.SMALL.cpu_decode)
    monkeypatch.setattr(attention, "DECODE", small)
    steps = lion.gpu_steps
    monkeypatch.setattr(lion, "gpu_steps", lambda elements: steps(min(elements, 8_192)))
    (optimizers,) = (one for one in runner.cases_of("lion") if one.name == "parity/optimizers")
    monkeypatch.setattr(optimizers.function, "__defaults__", (20_003,))
    use_triton(monkeypatch)
    with torch.compiler.set_stance("force_eager"):  # torchao would compile its step, for minutes
        yield


@pytest.mark.long
@pytest.mark.skipif(not device.interpreting(), reason="needs Triton's interpreter")
def test_parity_comes_first_and_a_second_run_resumes(
    stand_in, monkeypatch, tmp_path, capsys
) -> None:
    seconds = itertools.count()  # a clock that no slow machine moves
    clock = SimpleNamespace(perf_counter=lambda: next(seconds))
    monkeypatch.setattr(command, "time", clock)
    assert command.main(["--gpu", "--minutes", "1", "--save", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "lion/parity/optimizers\n" in said
    assert "attention/parity/attention and what follows: left for another run" in said
    first = {record.case for record in records.load(folder=tmp_path)}
    assert first == {"parity/optimizers", "parity/decode"}
    assert command.main(["--gpu", "--minutes", "60", "--save", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "parity/optimizers" not in said and "left for another run" not in said
    order = ["parity/", "forward/", "backward/", "decode/", "fused/"]
    places = [said.index(f"/{kind}") for kind in order]
    assert places == sorted(places)
    found = records.load(folder=tmp_path)
    wanted = {
        (case.slug, case.name)
        for slug in ("attention", "lion")
        for case in runner.cases_of(slug)
        if case.needs == "gpu"
    }
    assert {(record.slug, record.case) for record in found} == wanted
    assert all(record.hardware["kind"] == "stand-in" for record in found)
    barred = next(record for record in found if "bar" in record.details)
    assert f"{barred.case}: {barred.quantity}" in said
    command.main(["--gpu", "--save", str(tmp_path)])
    assert "every case that runs here has a record" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["flash_attention", "paged_attention"])
def test_nothing_is_timed_after_a_parity_that_fails(stand_in, monkeypatch, tmp_path, capsys, name):
    right = getattr(attention, name)
    off = lambda *x, backend="auto", **y: right(*x, **y) + 0.1 * (backend == "auto")  # noqa: E731
    monkeypatch.setattr(attention, name, off)
    assert command.main(["attention", "--gpu", "--save", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert "must be at most twice" in told.err and "what errs is not timed" in told.err
    assert "forward/" not in told.out
    assert all(record.case.startswith("parity/") for record in records.load(folder=tmp_path))


@pytest.mark.skipif(not device.interpreting(), reason="needs Triton's interpreter")
def test_fused_steps_err_no_more_than_unfused_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lion, "default_device", lambda: torch.device("cpu"))
    use_triton(monkeypatch)
    found = lion.parity(elements=20_000)
    assert [item.quantity.split()[0] for item in found] == ["Lion", "AdamW", "AdamW8bit"]
    assert all(item.samples[0] <= 2 for item in found)


@pytest.mark.skipif(not device.interpreting(), reason="needs Triton's interpreter")
@pytest.mark.parametrize(
    ("kind", "module", "name"),
    [("Lion", fused, "lion_step"), ("AdamW8bit", adamw8bit_optimizer, "adamw8bit_step")],
)
def test_a_fused_step_that_errs_is_refused(kind, module, name, monkeypatch) -> None:
    monkeypatch.setattr(lion, "default_device", lambda: torch.device("cpu"))
    use_triton(monkeypatch)
    step = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *x, lr, **y: step(*x, lr=1.01 * lr, **y))
    with pytest.raises(RuntimeError, match=f"^{kind}'s fused error must be at most twice"):
        lion.parity(elements=20_000)
