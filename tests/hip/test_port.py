"""hipify run offline on the CUDA original: what it changes, what it leaves, and that each hurts."""

import math
import re
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from labcore.hip import compile as hip
from labcore.hip import emulate, port
from tests.hip.compilers import need

NO_CUDA_NAMES = re.compile(r"\bcuda[A-Z]\w+|\bcuda_\w+\.h|<<<")


@pytest.fixture(scope="module")
def hipified() -> str:
    return port.hipified()


def test_hipify_renames_what_has_a_name(hipified: str) -> None:
    assert NO_CUDA_NAMES.search(port.original())
    assert not NO_CUDA_NAMES.search(hipified)
    for name in ("hip/hip_runtime.h", "hip/hip_fp16.h", "hipMalloc(", "hipMemcpyHostToDevice"):
        assert name in hipified


def test_the_diff_shows_both_sides(hipified: str) -> None:
    lines = port.diff().splitlines()
    assert "-  cudaFree(q_device);" in lines and "+  hipFree(q_device);" in lines
    removed = [line[1:] for line in lines if line.startswith("-") and line[1:4] != "-- "]
    added = [line[1:] for line in lines if line.startswith("+") and line[1:4] != "++ "]
    assert set(removed) <= set(port.original().splitlines())
    assert set(added) <= set(hipified.splitlines())


def test_hipify_is_quiet_and_writes_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "hipMalloc" in port.hipified("#include <cuda_runtime.h>\nvoid f() { cudaMalloc(0, 1); }")
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_hipify_leaves_all_five_assumptions_and_mend_leaves_none(hipified: str) -> None:
    before = {finding.rule for finding in port.findings(port.original())}
    after = {finding.rule for finding in port.findings(hipified)}
    assert before == after == set(port.RULES)
    assert port.findings(port.mend(hipified)) == ()


def test_hipify_changes_no_line_of_the_kernel(hipified: str) -> None:
    def kernel(source: str) -> str:
        return source[source.index("constexpr int ROWS") : source.index("// Host memory in")]

    assert kernel(hipified) == kernel(port.original()) != kernel(port.mend(hipified))


def test_a_source_without_cuda_names_comes_back_as_it_is() -> None:
    assert port.hipified("int f() { return 1; }\n") == "int f() { return 1; }\n"


def test_a_finding_names_the_line(hipified: str) -> None:
    lines = hipified.splitlines()
    for finding in port.findings(hipified):
        text = str(finding)
        assert finding.code == " ".join(lines[finding.line - 1].split())
        assert text.startswith(f"line {finding.line}: ") and port.RULES[finding.rule].remedy in text


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("mask", "x += __shfl_down_sync(0xFFFFFFFFu, x, step);"),
        ("mask", "constexpr unsigned FULL = 0xffffffff;"),
        ("mask", "x += __shfl_down_sync(0xffffffffUL, x, step);"),
        ("vote", "uint32_t votes = __ballot(x > 0);"),
        ("vote", "int alive = __popc(votes);"),
        ("width", "const int lane = threadIdx.x & 31;"),
        ("width", "const int warp = threadIdx.x >> 5;"),
        ("width", "for (int d = lane; d < D; d += 32) f(d);"),
        ("width", "constexpr unsigned WARP = 32;"),
        ("width", "static const uint32_t lanes = 32u;"),
        ("width", "const unsigned lane = threadIdx.x % 32u;"),
        ("width", "#define WARP_SIZE 32"),
        ("width", "for (int step = 16; step > 0; step >>= 1) f(step);"),
        ("assembly", 'asm volatile("membar.gl;");'),
        ("assembly", '__asm__ __volatile__("membar.gl;");'),
        ("launch", "kernel<float, 64><<<dim3{n, 2}, 128>>>(x);"),
        ("launch", "kernel<<<up<64, 1>(n), 128>>>(x);"),
    ],
)
def test_an_idiom_is_found_by_its_rule_only(rule: str, line: str) -> None:
    found = port.findings(f"// a file\n{line}\n")
    assert [(finding.line, finding.rule) for finding in found] == [(2, rule)]
    assert port.findings(f"// {line}\n/* {line}\n{line} */\n") == ()


@pytest.mark.parametrize(
    "line",
    [
        "unsigned long long votes = __ballot(x > 0); int alive = __popcll(votes);",
        "const int lane = threadIdx.x % 64, wave = threadIdx.x / 64;",
        "for (int step = 32; step > 0; step /= 2) x += __shfl_xor(x, step);",
        "kernel<float, 64><<<grid, block, bytes, stream>>>(x, y);",
        "kernel<<<dim3(n, 2), 128>>>(x);",
        "y = exp2f(x) * 16.0f + 320;",
    ],
)
def test_what_is_right_is_left_alone(line: str) -> None:
    assert port.findings(line) == ()


@pytest.mark.parametrize(
    "launch", ["<<<dim3{n, 2u}, 128>>>", "<<<up<64, 1>(n), 128>>>"], ids=["braces", "template"]
)
def test_hipify_cuts_a_launch_at_the_wrong_comma(launch: str) -> None:
    text = port.hipified(f"void f(unsigned n) {{\n  kernel{launch}(x);\n}}\n")
    assert re.search(r"dim3\((?:dim3\{n|up<64)\), dim3\((?:2u\}|1>\(n\))\)", text)
    assert [finding.rule for finding in port.findings(text)] == ["launch"]
    plain = port.hipified("void f() {\n  kernel<<<grid, 128>>>(x);\n}\n")
    assert "hipLaunchKernelGGL(( kernel), dim3(grid), dim3(128), 0, 0, x);" in plain


def gap(source: str, *, wave: int, is_causal: bool, seed: int) -> float:
    """Largest difference to fp64 of a hipified source that runs on emulated wavefronts."""
    generator = torch.Generator().manual_seed(seed)
    q_len, k_len, dim, heads = 70, 100, 64, 2
    query, key, value = (
        torch.randn(1, heads, n, dim, generator=generator) for n in (q_len, k_len, k_len)
    )
    out, lse = torch.empty_like(query), torch.empty(1, heads, q_len)
    # One form is enough, and the others take as long to compile.
    source = re.sub(
        r"^HOST\((?!attention_f32_d64).*\n", "", port.on_cpu(source), flags=re.MULTILINE
    )
    emulate.load(source, check=False, wave=wave).call(
        f"attention_f32_d64_{'causal' if is_causal else 'full'}",
        *(query, key, value, out, lse, heads, q_len, k_len, dim**-0.5),
    )
    right = scaled_dot_product_attention(
        query.double(), key.double(), value.double(), is_causal=is_causal
    )
    difference = float((out - right).abs().max())
    return math.inf if math.isnan(difference) else difference


COMPILES = ("assembly", "launch")  # without these two mends no compiler takes the file


@pytest.mark.parametrize("is_causal", [False, True])
def test_original_is_right_on_warps_and_refused_by_wavefronts(
    hipified: str, is_causal: bool, seed: int
) -> None:
    source = port.mend(hipified, COMPILES)
    assert gap(source, wave=32, is_causal=is_causal, seed=seed) < 5e-6
    with pytest.raises(emulate.EmulationError, match="lane 32 .*0xffffffff leaves it out"):
        gap(source, wave=64, is_causal=is_causal, seed=seed)


def test_the_mended_file_is_right_on_wavefronts(hipified: str, seed: int) -> None:
    source = port.mend(hipified)
    for is_causal in (False, True):
        assert gap(source, wave=64, is_causal=is_causal, seed=seed) < 5e-6


@pytest.mark.parametrize("left", ["vote", "width"])
def test_each_assumption_left_silently_gives_wrong_numbers(
    hipified: str, left: str, seed: int
) -> None:
    source = port.mend(hipified, [rule for rule in port.RULES if rule != left])
    assert gap(source, wave=64, is_causal=True, seed=seed) > 0.01


@pytest.mark.long
@pytest.mark.parametrize(
    ("left", "says"),
    [
        (None, None),
        ("assembly", "invalid output constraint '=f' in asm"),
        ("mask", "use of undeclared identifier '__shfl_xor_sync'|__shfl_xor_sync|64-bit"),
        ("launch", "expected|unexpected|dim3"),
    ],
)
def test_hipcc_refuses_what_is_left_and_takes_the_mended_file(
    hipified: str, left: str | None, says: str | None, tmp_path: Path
) -> None:
    need("gfx90a")
    source = tmp_path / "ported.hip"
    source.write_text(port.mend(hipified, [rule for rule in port.RULES if rule != left]))
    wanted = hip.TARGETS["gfx90a"]
    # The host's half too: a launch stands there.
    options = [option for option in wanted.arguments if option not in ("--cuda-device-only", "-S")]
    done = hip.call([wanted.program, *options, "-c", source, "-o", tmp_path / "ported.o"])
    errors = "\n".join(line for line in done.stderr.splitlines() if "error" in line)
    if says is None:
        assert done.returncode == 0, errors
    else:
        assert done.returncode != 0 and re.search(says, errors), errors
