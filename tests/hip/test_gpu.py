"""The reader's command, tested up to the missing device: the emulator stands in for the GPU."""

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from labcore import records
from labcore.hip import __main__ as command
from labcore.hip import build, emulate, gpu
from labcore.hip import compile as hip
from labcore.hip.decode import decode, launches
from tests.hip.compilers import need

CPU = torch.device("cpu")
SMALL = [
    gpu.Case(dtype=torch.float16, dim=64, is_causal=mask, heads=1, q_len=33, k_len=40)
    for mask in (False, True)
]


class Emulated:
    """A step as `gpu.Step` is one."""

    def __init__(self, step: int, factor: float = 1.0) -> None:
        self.step, self.factor = step, factor
        self.dtypes = (torch.float32, torch.float16)

    def __call__(self, query, key, value, *, is_causal=False):
        found = emulate.forward(query, key, value, step=self.step, is_causal=is_causal, check=False)
        return found.out * self.factor, found.lse


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(gpu, "problem", lambda: None)
    monkeypatch.setattr(gpu, "architecture", lambda: "gfx942")
    monkeypatch.setattr(gpu, "LENGTHS", ((1, 1), (33, 40)))
    monkeypatch.setattr(gpu, "timed_cases", lambda: SMALL)
    monkeypatch.setattr(command, "default_device", lambda: CPU)
    steps = {"step1_straight": Emulated(1), "step2_lds": Emulated(2)}
    monkeypatch.setattr(gpu, "build", lambda: iter(steps.items()))
    monkeypatch.setattr(gpu, "build_decoder", lambda: decoder())
    return monkeypatch


def decoder(factor: float = 1.0):
    """A decode step as `gpu.Decoder` is one."""

    def decoded(query, key, value, lengths, *, splits):
        found = decode(query, key, value, lengths, splits=splits or 2, check=False)
        return found.out * factor, found.lse

    return decoded


def test_without_a_gpu_a_sentence_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "gpu_visible", lambda: False)
    assert command.main([]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith("labcore.hip: no GPU: ")
    assert "labcore.hip.emulate" in said.err


@pytest.mark.parametrize(
    ("version", "arch", "sentence"),
    [
        ("7.0", "gfx1100", "wavefronts of 64 lanes.* this GPU is gfx1100"),
        ("7.0", "gfx942", "gfx942 needs hipcc.*PATH; install ROCm"),
        (None, "sm_90", "sm_90 needs nvcc.*PATH; install the CUDA toolkit"),
    ],
)
def test_each_lack_has_its_sentence(
    version: str | None, arch: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "gpu_visible", lambda: True)
    monkeypatch.setattr(gpu, "architecture", lambda: arch)
    monkeypatch.setattr(torch.version, "hip", version)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(gpu.problem())


def test_every_step_is_checked_and_timed_and_a_record_is_written(
    pretended_gpu: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--save", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for name in ("step1_straight", "step2_lds", "step5_decode"):
        assert f"{name}: agrees with torch" in said
    (file,) = tmp_path.glob("*.jsonl")
    found = records.read(file)
    assert [record.quantity for record in found] == [
        "float16-d64-causal/step2_lds",
        "float16-d64-full/step2_lds",
    ]
    for record in found:
        assert (record.slug, record.case, record.unit, record.n) == ("hip", "gpu/steps", "ms", 20)
        assert set(record.peers) == {"step1_straight", "torch"}
        assert record.details["arch"] == "gfx942" and record.details["queries"] == 33
        assert not records.is_stale(record)


def test_a_wrong_step_is_named_and_writes_no_record(
    pretended_gpu: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretended_gpu.setattr(gpu, "build", lambda: iter([("step2_lds", Emulated(2, 1.1))]))
    assert command.main(["--save", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "step2_lds: WRONG" in said
    assert re.search("float32-d64-full .*33 .*40 .*: out must be within 2e-05", said)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_decode_step_is_named_and_writes_no_record(
    pretended_gpu: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretended_gpu.setattr(gpu, "build", lambda: iter(()))
    pretended_gpu.setattr(gpu, "build_decoder", lambda: decoder(1.1))
    assert command.main(["--save", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "step5_decode: WRONG" in said
    assert re.search("bfloat16-d128 with 8 heads per key head: out must be within 0.032", said)
    assert "lse must" not in said and list(tmp_path.iterdir()) == []


def test_a_compiler_that_fails_is_one_sentence(
    pretended_gpu: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails():
        raise RuntimeError("step1_straight does not compile for gfx942: no space left")

    pretended_gpu.setattr(gpu, "build", fails)
    assert command.main([]) == 2
    assert capsys.readouterr().err.startswith("labcore.hip: step1_straight does not compile")


@pytest.mark.long
def test_hipcc_builds_libraries_that_only_the_device_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    need("gfx90a")
    monkeypatch.setattr(gpu, "STEPS", {3: "step3_mfma"})
    ((name, step),) = gpu.build("gfx90a")
    assert name == "step3_mfma"
    program = emulate.load(hip.SOURCE / "step3_mfma.hip", check=True)
    for dtype in emulate.DTYPES:
        for dim in emulate.HEAD_DIMS:
            assert step.block(dtype, dim) == program.attention_block(dtype, dim)
    assert step.dtypes == tuple(emulate.DTYPES)
    values = [*[torch.empty(0)] * 5, 1, 1, 1, 1.0]
    with pytest.raises(RuntimeError, match="launch, got its error [1-9]"):
        step.launch("attention_forward_f16_d64_full", grid=(1, 1), threads=256, values=values)
    with pytest.raises(ValueError, match="query must be .*on the GPU, .* got .* on cpu"):
        step(*SMALL[0].inputs(CPU))


@pytest.mark.long
def test_hipcc_builds_the_decode_step(monkeypatch: pytest.MonkeyPatch) -> None:
    need("gfx90a")
    built = gpu.build_decoder("gfx90a")
    assert built is not None and gpu.build_decoder("sm_90") is None
    program = emulate.load(hip.SOURCE / "step5_decode.hip")
    tensors = [torch.zeros(2, 6, 64), torch.zeros(2, 2, 9, 64), torch.zeros(2, 2, 9, 64)]
    query, key, value = (x.half() for x in tensors)
    lengths = torch.zeros(2, dtype=torch.int32)
    for dim in emulate.HEAD_DIMS:
        block = built.block(torch.bfloat16, dim)
        assert block == program.attention_block(torch.bfloat16, dim)
    _, _, planned = launches(query, key, value, lengths, splits=3, scale=None, block=block)
    for launch in planned:
        with pytest.raises(RuntimeError, match="launch, got its error [1-9]"):
            built.launch(
                launch.name,
                grid=launch.grid,
                threads=launch.threads,
                values=launch.arguments.values(),
            )
    with pytest.raises(ValueError, match="query must be on the GPU, got cpu"):
        built(query, key, value, lengths)


class OnEmulator:
    """A library whose launches go to the emulator, arguments in the order in which they come."""

    dtypes = tuple(emulate.DTYPES)

    def __init__(self, source: Path) -> None:
        self.program, self.grids = emulate.load(source), []

    def block(self, dtype, dim):
        return self.program.attention_block(dtype, dim)

    def launch(self, name, *, grid, threads, values, stream):
        assert stream == 7
        self.grids.append(grid)
        arguments = {f"argument {place}": value for place, value in enumerate(values)}
        self.program.launch(name, grid=grid, block=threads, arguments=arguments)


@pytest.fixture
def cpu_as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    stream, unit = SimpleNamespace(cuda_stream=7), SimpleNamespace(multi_processor_count=152)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: unit)


@pytest.mark.usefixtures("cpu_as_gpu")
@pytest.mark.parametrize("number", [1, 4])
def test_a_step_launches_what_the_emulator_does(number: int) -> None:
    class Here(OnEmulator, gpu.Step): ...

    case = gpu.Case(dtype=torch.float16, dim=64, is_causal=True, heads=6, group=3, q_len=9, k_len=5)
    out, lse = Here(build.step_source(number))(*case.inputs(CPU), is_causal=True)
    wanted = emulate.forward(*case.inputs(CPU), step=number, is_causal=True)
    assert torch.equal(out, wanted.out) and torch.equal(lse, wanted.lse)


@pytest.mark.usefixtures("cpu_as_gpu")
@pytest.mark.parametrize(
    ("batch", "k_len", "splits"), [(1, 4096, 16), (1, 90000, 101), (4, 600, 2), (1, 9, 1)]
)
def test_the_decoders_pieces_fill_the_gpu_or_have_256_keys(batch, k_len, splits, generator) -> None:
    """152 compute units take two blocks each: for three key heads, 101 pieces."""

    class Here(OnEmulator, gpu.Decoder): ...

    lengths = torch.full((batch,), min(k_len, 700), dtype=torch.int32)
    query = torch.randn(batch, 6, 64, generator=generator).half()
    key = torch.randn(batch, 3, k_len, 64, generator=generator).half()
    decoder = Here(build.DECODE)
    out, lse = decoder(query, key, key, lengths)
    assert decoder.grids == [(splits, 3 * batch, 1), (6 * batch, 1, 1)]
    wanted = decode(query, key, key, lengths, splits=splits)
    assert torch.equal(out, wanted.out) and torch.equal(lse, wanted.lse)


@pytest.mark.parametrize("shape", [(1, 2, 3, 64), (1, 1, 3, 128), (1, 3, 64), (2, 1, 3, 64)])
def test_a_step_refuses_keys_that_are_not_the_queries(shape: tuple[int, ...]) -> None:
    step, query, other = object.__new__(gpu.Step), torch.zeros(1, 1, 3, 64), torch.zeros(shape)
    for tensors in ((query, other, other), (query, query, other), (query[0], query, query)):
        with pytest.raises(ValueError, match=r"query must be \[B, H, T, D\], key and value \[B"):
            step(*tensors)


@pytest.mark.long
def test_a_step_that_hipcc_refuses_is_named(tmp_path: Path, monkeypatch) -> None:
    need("gfx90a")
    (tmp_path / "broken.hip").write_text("int f() { return nothing; }\n")
    monkeypatch.setattr(gpu, "STEPS", {1: "broken"})
    monkeypatch.setattr(gpu, "step_source", lambda step: tmp_path / "broken.hip")
    with pytest.raises(RuntimeError, match=r"broken does not compile for gfx90a: .*nothing"):
        list(gpu.build("gfx90a"))


def test_two_hip_runtimes_in_one_process_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    two = {"/system/lib/libamdhip64.so.6", "/torch/lib/libamdhip64.so.7"}
    monkeypatch.setattr(gpu, "_hip_runtimes", lambda: two)
    monkeypatch.setattr(gpu, "Step", lambda path: path)
    monkeypatch.setattr(
        gpu, "call", lambda command: ctypes.Structure and type("Done", (), {"returncode": 0})()
    )
    with pytest.raises(RuntimeError, match="same HIP runtime, got /system.* /torch.*install"):
        list(gpu.build("gfx942"))


def test_matrix_core_steps_are_not_built_for_nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []
    monkeypatch.setattr(gpu, "Step", lambda path: path)
    monkeypatch.setattr(
        gpu, "call", lambda command: commands.append(command) or type("D", (), {"returncode": 0})()
    )
    assert [name for name, _ in gpu.build("sm_90")] == ["step1_straight", "step2_lds"]
    assert all(command[0] == "nvcc" and "-arch=sm_90" in command for command in commands)
