"""Model repositories for TensorRT-LLM behind the Triton Inference Server, in both its layouts.

`inflight_batcher_llm` is the older one: an engine built ahead of time by `trtllm-build`, five
models and five config.pbtxt; TensorRT-LLM up to 1.3.0rc20 has it, later versions removed it.
`llmapi` is the current one: one model and a model.yaml with the arguments of `LLM()`. Both are
written from one `ServingSettings`. Schema-checked here, never run here: the files parse with the
server's own schema, and no TensorRT-LLM has read them. Only configuration is written; the code of
the Python models is TensorRT-LLM's and is copied from a checkout of it where one is given.

Names after https://github.com/NVIDIA/TensorRT-LLM, triton_backend, and
https://github.com/triton-inference-server/tensorrtllm_backend, docs/model_config.md.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from labcore.checks import one_of
from labcore.serving.tensorrt import tensors as tables
from labcore.serving.tensorrt.settings import (
    LAYOUTS,
    NEVER_RUN,
    Layout,
    ServingSettings,
    build_command,
)
from labcore.serving.triton.pbtxt import Word, dumps

__all__ = [
    "LAYOUTS",
    "Layout",
    "ServingSettings",
    "build_command",
    "configurations",
    "write_repository",
]


def _text(value: object) -> str:
    """A parameter's string: the C++ backend reads true and false, and nothing else, as bools."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _parameters(values: Mapping[str, object]) -> list[dict[str, Any]]:
    return [
        {"key": key, "value": {"string_value": _text(value)}}
        for key, value in values.items()
        if value is not None
    ]


def _on_cpu(count: int) -> list[dict[str, Any]]:
    """Instances of a model; KIND_CPU also where the model finds its GPUs by itself."""
    return [{"count": count, "kind": Word("KIND_CPU")}]


def _queue(settings: ServingSettings) -> dict[str, Any]:
    return {
        "preferred_batch_size": [settings.triton_max_batch_size],
        "max_queue_delay_microseconds": settings.max_queue_delay_microseconds,
        "default_queue_policy": {"max_queue_size": settings.max_queue_size},
    }


def _engine(settings: ServingSettings) -> dict[str, Any]:
    return {
        "model_transaction_policy": {"decoupled": settings.decoupled_mode},
        "dynamic_batching": _queue(settings),
        "instance_group": _on_cpu(1),
        "parameters": _parameters(
            {
                "gpt_model_type": settings.batching_strategy,
                "gpt_model_path": settings.engine_dir,
                "batch_scheduler_policy": settings.batch_scheduler_policy,
                "kv_cache_free_gpu_mem_fraction": settings.kv_cache_free_gpu_mem_fraction,
                "max_tokens_in_paged_kv_cache": settings.max_tokens_in_paged_kv_cache,
                "kv_cache_host_memory_bytes": settings.kv_cache_host_memory_bytes,
                "enable_kv_cache_reuse": settings.enable_kv_cache_reuse,
                "enable_chunked_context": settings.enable_chunked_context,
                "max_beam_width": settings.max_beam_width,
                "exclude_input_in_output": settings.exclude_input_in_output,
                "cancellation_check_period_ms": settings.cancellation_check_period_ms,
                "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
                # The C++ backend asks for these three also where nothing is guided.
                "tokenizer_dir": settings.tokenizer_dir,
                "guided_decoding_backend": "",
                "xgrammar_tokenizer_info_path": "",
            }
        ),
    }


def _steps() -> list[dict[str, Any]]:
    def pairs(table: str) -> list[dict[str, str]]:
        split = (one.partition("=") for one in table.split())
        return [{"key": key, "value": value or key} for key, _, value in split]

    return [
        {
            "model_name": name,
            "model_version": -1,
            "input_map": pairs(given),
            "output_map": pairs(made),
        }
        for name, (given, made) in tables.STEPS.items()
    ]


def _inflight(settings: ServingSettings) -> dict[str, dict[str, Any]]:
    bls = settings.bls_instance_count or settings.max_batch_size
    own: dict[str, tuple[str, tuple[str, str], dict[str, Any]]] = {
        "preprocessing": (
            "python",
            tables.PREPROCESSING,
            {
                "dynamic_batching": _queue(settings),
                "instance_group": _on_cpu(settings.preprocessing_instance_count),
                "parameters": _parameters(
                    {
                        "tokenizer_dir": settings.tokenizer_dir,
                        "add_special_tokens": settings.add_special_tokens,
                        "multimodal_model_path": "",
                        "gpt_model_path": settings.engine_dir,
                    }
                ),
            },
        ),
        "tensorrt_llm": (settings.triton_backend, tables.ENGINE, _engine(settings)),
        "postprocessing": (
            "python",
            tables.POSTPROCESSING,
            {
                "dynamic_batching": {},
                "instance_group": _on_cpu(settings.postprocessing_instance_count),
                "parameters": _parameters(
                    {
                        "tokenizer_dir": settings.tokenizer_dir,
                        "skip_special_tokens": settings.skip_special_tokens,
                    }
                ),
            },
        ),
        "ensemble": ("", tables.ENSEMBLE, {"ensemble_scheduling": {"step": _steps()}}),
        "tensorrt_llm_bls": (
            "python",
            tables.BLS,
            {
                "model_transaction_policy": {"decoupled": settings.decoupled_mode},
                "instance_group": _on_cpu(bls),
                "parameters": _parameters(
                    {
                        "accumulate_tokens": settings.accumulate_tokens,
                        "tensorrt_llm_model_name": "tensorrt_llm",
                    }
                ),
            },
        ),
    }
    return {
        name: {
            "name": name,
            **({"backend": backend} if backend else {"platform": "ensemble"}),
            "max_batch_size": settings.triton_max_batch_size,
            "input": tables.tensors(given, settings.logits_datatype),
            "output": tables.tensors(made, settings.logits_datatype),
            **rest,
        }
        for name, (backend, (given, made), rest) in own.items()
    }


def _llm_arguments(settings: ServingSettings) -> dict[str, Any]:
    """The content of model.yaml: arguments of LLM(), and `triton_config` for the server's side."""
    policy = settings.batch_scheduler_policy.upper()
    cache = {
        "free_gpu_memory_fraction": settings.kv_cache_free_gpu_mem_fraction,
        "max_tokens": settings.max_tokens_in_paged_kv_cache,
        "enable_block_reuse": settings.enable_kv_cache_reuse,
        "host_cache_size": settings.kv_cache_host_memory_bytes or None,
    }
    return {
        "model": settings.model,
        **({"tokenizer": settings.tokenizer_dir} if settings.tokenizer_dir else {}),
        "backend": "pytorch",
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "max_batch_size": settings.max_batch_size,
        "max_num_tokens": settings.max_num_tokens,
        "max_seq_len": settings.max_seq_len,
        "max_beam_width": settings.max_beam_width,
        "enable_chunked_prefill": settings.enable_chunked_context,
        "kv_cache_config": {key: value for key, value in cache.items() if value is not None},
        "scheduler_config": {
            "capacity_scheduler_policy": "STATIC_BATCH"
            if settings.batching_strategy == "V1"
            else policy
        },
        "triton_config": {
            "max_batch_size": 0,
            "decoupled": settings.decoupled_mode,
            "cancellation_check_period_ms": settings.cancellation_check_period_ms,
        },
    }


def _yaml_scalar(value: object) -> str:
    """A scalar as PyYAML reads it back: JSON, but for what JSON may leave bare."""
    if isinstance(value, float):
        digits, _, power = repr(value).partition("e")
        return repr(value) if not power or "." in digits else f"{digits}.0e{power}"
    text = json.dumps(value, ensure_ascii=False)
    return re.sub(
        "[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]", lambda one: f"\\u{ord(one[0]):04x}", text
    )


def _yaml(values: Mapping[str, Any], margin: str = "") -> Iterator[str]:
    """YAML of nested mappings, a line at a time."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield f"{margin}{key}:"
            yield from _yaml(value, margin + "  ")
        else:
            yield f"{margin}{key}: {_yaml_scalar(value)}"


def configurations(settings: ServingSettings, layout: str = "llmapi") -> dict[str, str]:
    """The text of every file of a repository, by its path below it with `/`.

    Schema-checked here, never run here. Raises ValueError for an unknown layout, and where
    `settings` lack what the layout cannot do without: `model` for "llmapi", `tokenizer_dir` and
    `engine_dir` for "inflight_batcher_llm".
    """
    form = LAYOUTS[one_of("layout", layout, LAYOUTS)]
    needed = ("model",) if layout == "llmapi" else ("tokenizer_dir", "engine_dir")
    for name in needed:
        if not getattr(settings, name):
            raise ValueError(f"the layout {layout} must have {name}, got ''; set it in settings")
    comment = f"{form.status}\n{NEVER_RUN}"
    if layout == "inflight_batcher_llm":
        return {
            f"{name}/config.pbtxt": dumps(fields, comment=comment)
            for name, fields in _inflight(settings).items()
        }
    given, made = tables.LLMAPI
    fields = {
        "name": "tensorrt_llm",
        "backend": "python",
        "input": tables.tensors(given),
        "output": tables.tensors(made),
        "instance_group": _on_cpu(1),
    }
    note = "\nmax_batch_size and decoupled stand in 1/model.yaml; here they would collide."
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    return {
        "tensorrt_llm/config.pbtxt": dumps(fields, comment=comment + note),
        "tensorrt_llm/1/model.yaml": head + "\n".join(_yaml(_llm_arguments(settings))) + "\n",
    }


def write_repository(
    folder: str | Path,
    settings: ServingSettings,
    layout: str = "llmapi",
    *,
    upstream: str | Path | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Writes a model repository into `folder` and returns the files that it wrote, sorted.

    upstream: the folder `triton_backend/all_models` of a checkout of TensorRT-LLM, from which the
    code of the Python models is copied; without it `lint` names what is missing. The older layout
    needs a checkout that still has it, such as release 1.2. overwrite:
    whether files that exist may be replaced; nothing else in `folder` is touched.
    Schema-checked here, never run here. Raises ValueError as `configurations` does, where
    `upstream` has no such code, and where a file exists.
    """
    texts = configurations(settings, layout)
    root, code = Path(folder), {}
    if upstream is not None:
        for name in _coded(settings, layout):
            source = Path(upstream) / layout / name / "1"
            if not (source / "model.py").is_file():
                raise ValueError(
                    f"upstream must hold {layout}/{name}/1/model.py, got {upstream}; give "
                    f"triton_backend/all_models of a checkout of TensorRT-LLM"
                    f"{' 1.2' if layout == 'inflight_batcher_llm' else ''}"
                )
            for path in sorted(source.rglob("*.py")):
                code[f"{name}/1/{path.relative_to(source).as_posix()}"] = path
    there = sorted(name for name in (*texts, *code) if (root / name).exists())
    if there and not overwrite:
        raise ValueError(
            f"the folder must not hold the files to be written, got {root / there[0]}; choose "
            f"another folder or overwrite=True"
        )
    for name in LAYOUTS[layout].models:
        (root / name / "1").mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (root / name).write_text(text, encoding="utf-8")
    for name, path in code.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, root / name)
    return sorted(root / name for name in (*texts, *code))


def _coded(settings: ServingSettings, layout: str) -> tuple[str, ...]:
    names = LAYOUTS[layout].code
    own_engine = layout == "inflight_batcher_llm" and settings.triton_backend == "python"
    return (*names, "tensorrt_llm") if own_engine else names
