"""What this machine is: the only place that reads the environment and asks for a GPU."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from dataclasses import dataclass
from typing import Literal

import torch

from labcore.checks import one_of

__all__ = [
    "Hardware",
    "badge",
    "building_book",
    "choose_backend",
    "default_device",
    "gpu_visible",
    "hardware",
    "interpreting",
    "kernels_compile_for",
    "prepare_interpreter",
    "seed_from_environment",
    "strict_claims",
    "triton_problem",
    "versions",
]

Backend = Literal["auto", "triton", "torch"]

INTERPRET = "TRITON_INTERPRET"
_CDNA = ("gfx908", "gfx90a", "gfx94", "gfx95")


@functools.cache
def gpu_visible() -> bool:
    """Whether torch sees a CUDA or ROCm device in this process."""
    return torch.cuda.is_available()


def default_device() -> torch.device:
    """The first GPU where there is one, else the CPU."""
    return torch.device("cuda", 0) if gpu_visible() else torch.device("cpu")


def prepare_interpreter() -> None:
    """Let Triton interpret kernels on a machine without a GPU. `import labcore` calls it.

    Triton reads the flag when it is first imported and when a kernel is decorated, so it must
    stand before both. A value that a person has set, "0" included, is left alone.
    """
    if INTERPRET not in os.environ and "triton" not in sys.modules and not gpu_visible():
        os.environ[INTERPRET] = "1"


def triton_problem() -> str | None:
    """None where Triton can be imported, else one sentence that says what is missing."""
    if importlib.util.find_spec("triton") is not None:
        return None
    if sys.platform != "linux":
        return (
            f"Triton has no build for {platform.system()}: its kernels run on Linux, "
            "and the torch form runs here"
        )
    return "Triton is not installed: run pip install 'triton>=3.6,<3.8'"


def interpreting() -> bool:
    """Whether this process runs Triton kernels through the interpreter."""
    if triton_problem() is not None or os.environ.get(INTERPRET) != "1":
        return False
    import triton.language as tl

    # Triton's own library functions were bound when it was imported: they tell which mode it was.
    return type(tl.standard.zeros_like).__name__ == "InterpretedFunction"


def kernels_compile_for(device: torch.device) -> bool:
    """Whether labcore's kernels are built for `device`: NVIDIA from sm_80 on, AMD CDNA."""
    if device.type != "cuda" or triton_problem() is not None:
        return False
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.startswith(_CDNA)
    return torch.cuda.get_device_capability(device) >= (8, 0)


def choose_backend(backend: str, tensor: torch.Tensor, *, op: str) -> Literal["triton", "torch"]:
    """The form of `op` to run on `tensor`: "triton" or "torch".

    backend: "auto" is Triton on a GPU that the kernels compile for and torch everywhere else;
    "triton" on a CPU tensor means the interpreter, which a process has only when it started
    without a visible GPU or with TRITON_INTERPRET=1.
    Raises ValueError for an unknown name or for "triton" where no kernel can run.
    """
    one_of("backend", backend, ("auto", "triton", "torch"))
    if backend == "torch":
        return "torch"
    if backend == "auto":
        return "triton" if kernels_compile_for(tensor.device) and not interpreting() else "torch"
    problem = triton_problem()
    if problem is not None:
        raise ValueError(f"{op}: backend='triton' cannot run: {problem}; use backend='torch'")
    if tensor.device.type == "cuda":
        if kernels_compile_for(tensor.device):
            return "triton"
        name = torch.cuda.get_device_name(tensor.device)
        raise ValueError(
            f"{op}: the kernels need an NVIDIA GPU from sm_80 on or AMD CDNA, got {name}; "
            "use backend='torch'"
        )
    if interpreting():
        return "triton"
    if gpu_visible():
        raise ValueError(
            f"{op}: backend='triton' got a CPU tensor in a process that sees a GPU; move the "
            f"tensor there, use backend='torch', or start Python with {INTERPRET}=1"
        )
    raise ValueError(
        f"{op}: triton was imported before labcore, without its interpreter; import labcore "
        f"first, or start Python with {INTERPRET}=1"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One machine: `kind` names the records' file ("cpu", "nvidia-h200"), the rest describes it."""

    kind: str
    name: str
    cores: int
    memory_gib: float


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


@functools.cache
def hardware() -> Hardware:
    """The GPU of this process, else its CPU. memory_gib is that of the device named."""
    cores = os.cpu_count() or 1
    if gpu_visible():
        properties = torch.cuda.get_device_properties(0)
        kind = re.sub(r"[^a-z0-9]+", "-", properties.name.lower()).strip("-")
        return Hardware(
            kind=kind,
            name=properties.name,
            cores=cores,
            memory_gib=round(properties.total_memory / 2**30, 1),
        )
    return Hardware(
        kind="cpu", name=_cpu_name(), cores=cores, memory_gib=round(_memory_bytes() / 2**30, 1)
    )


def versions() -> dict[str, str]:
    """Versions of Python, labcore and the libraries that decide a number; absent ones left out."""
    # torch's own word names its build ("+cpu", "+cu130"), which its package metadata may not.
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("labcore", "triton", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.version.hip:
        found["hip"] = torch.version.hip
    return found


def badge() -> str:
    """One line for the top of a chapter: the device, and how Triton kernels run on it."""
    machine = hardware()
    if triton_problem() is not None:
        kernels = "no Triton here: kernels are shown, their torch form runs"
    elif interpreting():
        kernels = "Triton kernels run in the interpreter (right, not fast)"
    elif kernels_compile_for(default_device()):
        kernels = "Triton kernels run on the GPU"
    else:
        kernels = "kernels run in their torch form"
    which = "GPU" if gpu_visible() else "CPU"
    return (
        f"{which}: {machine.name} ({machine.memory_gib:g} GiB, {machine.cores} cores) · {kernels}"
        f" · torch {torch.__version__}"
    )


def building_book() -> bool:
    """Whether the static book runs this notebook (LABCORE_BOOK=1): twins instead of widgets."""
    return os.environ.get("LABCORE_BOOK") == "1"


def strict_claims() -> bool:
    """Whether a live result that contradicts its claim's record raises (LABCORE_STRICT_CLAIMS)."""
    return os.environ.get("LABCORE_STRICT_CLAIMS") == "1"


def seed_from_environment() -> int | None:
    """The seed that a person asked for by LABCORE_SEED, else None."""
    text = os.environ.get("LABCORE_SEED")
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"LABCORE_SEED must be a whole number, got {text!r}") from None
