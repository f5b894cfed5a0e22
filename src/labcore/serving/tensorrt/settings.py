"""What a deployment of TensorRT-LLM behind the Triton Inference Server wants, and its two layouts.

Names after https://github.com/NVIDIA/TensorRT-LLM, triton_backend, and
https://github.com/triton-inference-server/tensorrtllm_backend, docs/model_config.md. What became
of the older layout: https://nvidia.github.io/TensorRT-LLM/legacy/tensorrt-backend-removal.html, the
release notes of 1.3.0rc20, and pull request 15907 of TensorRT-LLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from labcore.checks import non_negative, one_of, positive_int

__all__ = [
    "BATCHING",
    "CAPACITY_POLICIES",
    "LAYOUTS",
    "NEVER_RUN",
    "Layout",
    "ServingSettings",
    "build_command",
]

BATCHING = ("inflight_fused_batching", "V1")
CAPACITY_POLICIES = ("guaranteed_no_evict", "max_utilization")
_FROM_ZERO = frozenset(
    {"kv_cache_host_memory_bytes", "max_queue_delay_microseconds", "max_queue_size"}
)
NEVER_RUN = "Schema-checked, never run: no TensorRT-LLM has read this file before you."


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A model repository's form. models: its folders; code: those that need a model's own code.

    age: "current" or "removed"; status: the same in a sentence.
    """

    name: str
    age: str
    status: str
    models: tuple[str, ...]
    code: tuple[str, ...]


LAYOUTS: Mapping[str, Layout] = {
    "llmapi": Layout(
        name="llmapi",
        age="current",
        status="The current layout: one Python model, whose model.yaml has the arguments of LLM().",
        models=("tensorrt_llm",),
        code=("tensorrt_llm",),
    ),
    "inflight_batcher_llm": Layout(
        name="inflight_batcher_llm",
        age="removed",
        status="The older layout, an engine of trtllm-build behind five models: TensorRT-LLM 1.2 "
        "has it; after 1.3.0rc20 of June 2026 it was removed.",
        models=(
            "preprocessing",
            "tensorrt_llm",
            "postprocessing",
            "ensemble",
            "tensorrt_llm_bls",
        ),
        code=("preprocessing", "postprocessing", "tensorrt_llm_bls"),
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingSettings:
    """What one deployment wants, in TensorRT-LLM's words; both layouts are written from it.

    model: a Hugging Face name or folder, for `llmapi`. tokenizer_dir: the tokenizer's folder or
    name; engine_dir: the folder of the built engine; both for `inflight_batcher_llm`.
    triton_backend: "tensorrtllm" (C++) or "python".

    max_batch_size: most requests in one step of the engine, the runtime batch; max_num_tokens:
    most tokens in one step; max_seq_len: most tokens of a request, prompt and output. In the
    older layout these three are the engine's, fixed when it is built (`build_command`).
    triton_max_batch_size: most prompts in one request to Triton; not the runtime batch.
    bls_instance_count: requests that the BLS model handles at once; None is max_batch_size.

    decoupled_mode: several answers to one request, which streaming needs.
    batching_strategy: "inflight_fused_batching" or "V1" (static batches).
    batch_scheduler_policy: "guaranteed_no_evict" or "max_utilization".
    kv_cache_free_gpu_mem_fraction: of the memory that is free beside the weights;
    max_tokens_in_paged_kv_cache: tokens; of the two, where both are set, the smaller wins.
    kv_cache_host_memory_bytes: blocks that leave the GPU stay here, 0 for none.
    max_queue_delay_microseconds, max_queue_size (requests; 0 is no limit): Triton's queue before
    the engine, in the older layout only. cancellation_check_period_ms: between two looks.
    accumulate_tokens: the BLS model turns all tokens so far into text and not the newest alone.
    Raises TypeError or ValueError that names the field.
    """

    model: str = ""
    tokenizer_dir: str = ""
    engine_dir: str = ""
    triton_backend: str = "tensorrtllm"
    max_batch_size: int = 64
    max_num_tokens: int = 8192
    max_seq_len: int = 4096
    max_beam_width: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    triton_max_batch_size: int = 64
    preprocessing_instance_count: int = 4
    postprocessing_instance_count: int = 4
    bls_instance_count: int | None = None
    decoupled_mode: bool = False
    batching_strategy: str = "inflight_fused_batching"
    batch_scheduler_policy: str = "guaranteed_no_evict"
    kv_cache_free_gpu_mem_fraction: float | None = 0.9
    max_tokens_in_paged_kv_cache: int | None = None
    kv_cache_host_memory_bytes: int = 0
    enable_kv_cache_reuse: bool = True
    enable_chunked_context: bool = True
    max_queue_delay_microseconds: int = 0
    max_queue_size: int = 1024
    cancellation_check_period_ms: int = 100
    exclude_input_in_output: bool = True
    accumulate_tokens: bool = True
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    logits_datatype: str = "TYPE_FP32"

    def __post_init__(self) -> None:
        for name, kind in type(self).__annotations__.items():
            _check(name, kind, getattr(self, name))
        one_of("triton_backend", self.triton_backend, ("tensorrtllm", "python"))
        one_of("batching_strategy", self.batching_strategy, BATCHING)
        one_of("batch_scheduler_policy", self.batch_scheduler_policy, CAPACITY_POLICIES)
        one_of("logits_datatype", self.logits_datatype, ("TYPE_FP32", "TYPE_FP16", "TYPE_BF16"))
        part = self.kv_cache_free_gpu_mem_fraction
        if part is not None and not 0 < part <= 1:
            raise ValueError(
                f"kv_cache_free_gpu_mem_fraction must be above 0 and at most 1, got {part}; "
                f"0.9 is nine tenths of the free memory"
            )


def _check(name: str, kind: str, value: object) -> None:
    """One field by its annotation; a number may be 0 only where 0 has a meaning of its own."""
    if value is None and kind.endswith("| None"):
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "str" and not isinstance(value, str):
        came = type(value).__name__
        raise TypeError(f"{name} must be a str, got {came}; convert a path with str()")
    if kind == "bool" and not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    if kind.startswith("float") and not number:
        raise TypeError(f"{name} must be a number, got {value!r}")
    if kind.startswith("int"):
        if not number or isinstance(value, float):
            raise TypeError(f"{name} must be a whole number, got {value!r}")
        if name in _FROM_ZERO:
            non_negative(name, value)
        else:
            positive_int(name, value)  # type: ignore[arg-type]


def build_command(settings: ServingSettings, checkpoint_dir: str) -> list[str]:
    """The command that builds the older layout's engine, where its runtime batch is decided.

    Never run here, and part of TensorRT-LLM up to 1.3.0rc20 only. checkpoint_dir: the folder that
    its convert_checkpoint.py wrote; it carries the tensor and pipeline parallel sizes. Raises
    ValueError without an engine_dir.
    """
    if not settings.engine_dir:
        raise ValueError("trtllm-build must know where to write, got engine_dir ''; set it")
    values = {
        "checkpoint_dir": checkpoint_dir,
        "output_dir": settings.engine_dir,
        "max_batch_size": settings.max_batch_size,
        "max_num_tokens": settings.max_num_tokens,
        "max_seq_len": settings.max_seq_len,
        "max_beam_width": settings.max_beam_width,
        "kv_cache_type": "paged",
        # Chunks of a prompt read the cache of the chunks before them.
        "use_paged_context_fmha": "enable" if settings.enable_chunked_context else "disable",
    }
    flags = (part for key, value in values.items() for part in (f"--{key}", str(value)))
    return ["trtllm-build", *flags]
