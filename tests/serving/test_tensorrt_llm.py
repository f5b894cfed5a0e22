"""Both layouts say what the settings say, in files that the server's own schema reads."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from labcore.serving.tensorrt.lint import lint
from labcore.serving.tensorrt.llm import (
    LAYOUTS,
    ServingSettings,
    build_command,
    configurations,
    write_repository,
)
from labcore.serving.triton import pbtxt
from tests.serving.repositories import (
    ENGINE,
    INFLIGHT,
    YAML,
    a_word,
    schema,
    settings_in,
    written,
)


@pytest.fixture
def here(tmp_path: Path) -> ServingSettings:
    return settings_in(tmp_path)


def some_settings(draw: random.Random) -> ServingSettings:
    choices = {
        "triton_backend": ("tensorrtllm", "python"),
        "batching_strategy": ("inflight_fused_batching", "V1"),
        "batch_scheduler_policy": ("guaranteed_no_evict", "max_utilization"),
        "logits_datatype": ("TYPE_FP32", "TYPE_FP16", "TYPE_BF16"),
        "kv_cache_free_gpu_mem_fraction": (None, 1, 1.0, 1e-5, 0.35, draw.random() or 0.5),
    }
    kinds: dict[str, Callable[[], object]] = {
        "str": lambda: a_word(draw),
        "bool": lambda: draw.random() < 0.5,
        "int": lambda: draw.randrange(1, 10**6),
        "int | None": lambda: draw.choice((None, draw.randrange(1, 10**6))),
    }
    fields = dataclasses.fields(ServingSettings)
    values = {
        one.name: draw.choice(choices[one.name]) if one.name in choices else kinds[str(one.type)]()
        for one in fields
    }
    return ServingSettings(**values)  # type: ignore[arg-type]


def the_parameters(fields: dict[str, Any]) -> dict[str, str]:
    return {key: one.get("string_value", "") for key, one in fields.get("parameters", {}).items()}


def test_the_older_layout_says_what_the_settings_say(seed: int) -> None:
    draw, server = random.Random(seed), schema()
    for _ in range(12):
        settings = some_settings(draw)
        files = configurations(settings, INFLIGHT)
        assert set(files) == {f"{name}/config.pbtxt" for name in LAYOUTS[INFLIGHT].models}
        assert [pbtxt.schema_error(text) for text in files.values()] == [""] * 5
        read = {path.split("/")[0]: server.fields(text) for path, text in files.items()}
        for name, fields in read.items():
            assert fields["name"] == name
            assert fields["max_batch_size"] == settings.triton_max_batch_size
        engine = read["tensorrt_llm"]
        told = the_parameters(engine)
        assert engine["backend"] == settings.triton_backend
        policy = engine["model_transaction_policy"].get("decoupled", False)
        assert policy is settings.decoupled_mode
        assert told["gpt_model_path"] == settings.engine_dir
        assert told["gpt_model_type"] == settings.batching_strategy
        assert told["batch_scheduler_policy"] == settings.batch_scheduler_policy
        assert told["enable_chunked_context"] == str(settings.enable_chunked_context).lower()
        share, tokens = "kv_cache_free_gpu_mem_fraction", "max_tokens_in_paged_kv_cache"
        for name, kind in ((share, float), (tokens, int)):
            value = getattr(settings, name)
            assert (name in told) is (value is not None)
            assert value is None or kind(told[name]) == value
        # The C++ backend looks these up unprotected; a missing one stops it.
        assert {"tokenizer_dir", "guided_decoding_backend", "xgrammar_tokenizer_info_path"} <= set(
            told
        )
        assert the_parameters(read["preprocessing"])["tokenizer_dir"] == settings.tokenizer_dir
        assert "multimodal_model_path" in the_parameters(read["preprocessing"])
        count = settings.bls_instance_count or settings.max_batch_size
        assert read["tensorrt_llm_bls"]["instance_group"] == [{"count": count, "kind": "KIND_CPU"}]
        queue = engine["dynamic_batching"]
        assert queue["default_queue_policy"] == {"max_queue_size": settings.max_queue_size}
        waited = int(queue["max_queue_delay_microseconds"])
        assert waited == settings.max_queue_delay_microseconds
        logits = {one["name"]: one["data_type"] for one in read["ensemble"]["output"]}
        assert logits["generation_logits"] == settings.logits_datatype


def test_the_current_layout_says_what_the_settings_say(seed: int) -> None:
    draw, server = random.Random(seed), schema()
    for _ in range(40):
        settings = some_settings(draw)
        files = configurations(settings)
        assert set(files) == {ENGINE, YAML}
        fields = server.fields(files[ENGINE])
        assert (fields["name"], fields["backend"]) == ("tensorrt_llm", "python")
        assert "max_batch_size" not in fields and "model_transaction_policy" not in fields
        told = yaml.safe_load(files[YAML])
        assert (told["model"], told["tokenizer"]) == (settings.model, settings.tokenizer_dir)
        for name in ("max_batch_size", "max_num_tokens", "max_seq_len", "tensor_parallel_size"):
            assert told[name] == getattr(settings, name)
        assert told["enable_chunked_prefill"] is settings.enable_chunked_context
        cache = told["kv_cache_config"]
        assert cache.get("max_tokens") == settings.max_tokens_in_paged_kv_cache
        assert cache.get("free_gpu_memory_fraction") == settings.kv_cache_free_gpu_mem_fraction
        policy = told["scheduler_config"]["capacity_scheduler_policy"]
        if settings.batching_strategy == "V1":
            assert policy == "STATIC_BATCH"
        else:
            assert policy.lower() == settings.batch_scheduler_policy
        assert told["triton_config"] == {
            "max_batch_size": 0,
            "decoupled": settings.decoupled_mode,
            "cancellation_check_period_ms": settings.cancellation_check_period_ms,
        }


def test_each_file_says_its_age_and_that_it_never_ran(here: ServingSettings) -> None:
    assert {one.age for one in LAYOUTS.values()} == {"current", "removed"}
    for layout in LAYOUTS.values():
        for text in configurations(here, layout.name).values():
            assert text.startswith(f"# {layout.status}\n# Schema-checked, never run")
            assert ("1.3.0rc20" in text) is ("removed" in text) is (layout.age == "removed")


def test_files_are_kept_unless_told(tmp_path: Path, here: ServingSettings) -> None:
    root = tmp_path / "repository"
    first = write_repository(root, here)
    assert first == sorted(root / name for name in configurations(here))
    (root / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"overwrite=True"):
        write_repository(root, dataclasses.replace(here, model="other"))
    assert "other" not in (root / YAML).read_text("utf-8")
    write_repository(root, dataclasses.replace(here, model="other"), overwrite=True)
    assert "other" in (root / YAML).read_text("utf-8")
    assert (root / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("backend", ("tensorrtllm", "python"))
def test_upstream_code_is_copied_whole(tmp_path: Path, here: ServingSettings, backend: str) -> None:
    settings = dataclasses.replace(here, triton_backend=backend)
    root = written(tmp_path, settings, INFLIGHT)
    code = {*LAYOUTS[INFLIGHT].code, *(["tensorrt_llm"] if backend == "python" else [])}
    assert {path.parts[-3] for path in root.glob("*/1/model.py")} == code
    for name in code:
        assert (root / name / "1" / "model.py").read_text() == f"# {INFLIGHT}/{name}\n"
        assert (root / name / "1" / "lib" / "decode.py").is_file()
    (tmp_path / "all_models" / INFLIGHT / "postprocessing" / "1" / "model.py").unlink()
    with pytest.raises(ValueError, match=r"postprocessing/1/model\.py"):
        write_repository(tmp_path / "other", settings, INFLIGHT, upstream=tmp_path / "all_models")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    (
        ({"model": Path("x")}, TypeError, "model must be a str"),
        ({"max_batch_size": 0}, ValueError, "max_batch_size"),
        ({"max_batch_size": 2.0}, TypeError, "max_batch_size"),
        ({"bls_instance_count": 0}, ValueError, "bls_instance_count"),
        ({"max_queue_size": -1}, ValueError, "max_queue_size"),
        ({"max_queue_size": True}, TypeError, "max_queue_size"),
        ({"decoupled_mode": 1}, TypeError, "decoupled_mode"),
        ({"kv_cache_free_gpu_mem_fraction": 90}, ValueError, "nine tenths"),
        ({"kv_cache_free_gpu_mem_fraction": "0.9"}, TypeError, "kv_cache_free"),
        ({"batching_strategy": "v1"}, ValueError, "V1"),
        ({"batch_scheduler_policy": "MAX_UTILIZATION"}, ValueError, "max_utilization"),
        ({"logits_datatype": "FP32"}, ValueError, "TYPE_FP32"),
        ({"triton_backend": "tensorrt_llm"}, ValueError, "tensorrtllm"),
        ({"decoupled": True}, TypeError, "decoupled"),
    ),
)
def test_settings_refuse(changed: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        ServingSettings(**changed)


def test_what_a_layout_needs_is_said(tmp_path: Path, here: ServingSettings) -> None:
    with pytest.raises(ValueError, match="must have model"):
        configurations(dataclasses.replace(here, model=""))
    for name in ("tokenizer_dir", "engine_dir"):
        with pytest.raises(ValueError, match=f"must have {name}"):
            lacking: dict[str, Any] = {name: ""}
            configurations(dataclasses.replace(here, **lacking), INFLIGHT)
    with pytest.raises(ValueError, match="inflight_batcher_llm"):
        configurations(here, "inflight_batcher")
    with pytest.raises(ValueError, match=r"tensorrt_llm/config\.pbtxt"):
        lint(tmp_path)
    with pytest.raises(ValueError, match="endpoint"):
        lint(tmp_path, endpoint="chat")
    with pytest.raises(ValueError, match="engine_dir"):
        build_command(ServingSettings(), "checkpoint")


def test_the_engine_is_built_with_the_runtime_batch(here: ServingSettings) -> None:
    command = build_command(dataclasses.replace(here, max_num_tokens=513), "checkpoint")
    assert command[0] == "trtllm-build"
    told = dict(zip(command[1::2], command[2::2], strict=True))
    assert told["--max_batch_size"] == "7" and told["--max_num_tokens"] == "513"
    assert told["--output_dir"] == here.engine_dir
    assert told["--use_paged_context_fmha"] == "enable"
