"""What is written is clean; each trap is found, and nothing beside it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from labcore.serving.tensorrt.files import wiring
from labcore.serving.tensorrt.lint import RULES, lint
from labcore.serving.tensorrt.llm import LAYOUTS, ServingSettings, write_repository
from labcore.serving.tensorrt.llmapi import RENAMED
from labcore.serving.tensorrt.repository import read_repository
from labcore.serving.tensorrt.tensors import STEPS
from labcore.serving.triton import pbtxt
from tests.serving.repositories import ENGINE, INFLIGHT, YAML, settings_in, written

BLS, POST = "tensorrt_llm_bls/config.pbtxt", "postprocessing/config.pbtxt"
PRE, WHOLE = "preprocessing/config.pbtxt", "ensemble/config.pbtxt"
Edit = Callable[[Path], object]


@pytest.fixture
def here(tmp_path: Path) -> ServingSettings:
    return settings_in(tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_is_clean(tmp_path: Path, here: ServingSettings, layout: str) -> None:
    root = written(tmp_path, here, layout)
    assert lint(root) == []
    assert lint(root, endpoint="infer") == []
    streaming = dataclasses.replace(here, decoupled_mode=True)
    write_repository(root, streaming, layout, overwrite=True)
    assert lint(root, endpoint="generate_stream") == []
    assert (root / "tensorrt_llm" / "1").is_dir()
    bare = tmp_path / "bare"
    write_repository(bare, here, layout)
    found = lint(bare)
    assert {one.file for one in found} == {f"{n}/1/model.py" for n in LAYOUTS[layout].code}
    assert all(one.refused for one in found)


def replaced(file: str, old: str, new: str) -> Edit:
    def edit(root: Path) -> None:
        text = (root / file).read_text("utf-8")
        assert old in text
        (root / file).write_text(text.replace(old, new), encoding="utf-8")

    return edit


def value_of(key: str, new: str, file: str = ENGINE) -> Edit:
    """Another string for a parameter."""

    def edit(root: Path) -> None:
        before, found, after = (root / file).read_text("utf-8").partition(f'key: "{key}"')
        assert found
        head, _, tail = after.partition("string_value: ")
        rest = tail.partition("\n")[2]
        text = f'{before}{found}{head}string_value: "{new}"\n{rest}'
        (root / file).write_text(text, encoding="utf-8")

    return edit


def nothing(root: Path) -> None:
    pass


class Trap(NamedTuple):
    """An edit of a repository, or changed settings, and the one finding that must come of it."""

    layout: str
    setting: str
    file: str
    refused: bool
    edit: Edit
    asked: dict[str, Any]
    changed: dict[str, Any]


def old(
    setting: str, file: str, edit: Edit = nothing, asked: str = "generate", **changed: Any
) -> Trap:
    """In the older layout; a setting that ends in `!` is one that the server refuses."""
    name = setting.rstrip("!")
    return Trap(INFLIGHT, name, file, name != setting, edit, {"endpoint": asked}, changed)


def new(setting: str, file: str, edit: Edit = nothing, **kept: Any) -> Trap:
    return old(setting, file, edit, **kept)._replace(layout="llmapi")


ONE_SHARE: dict[str, Any] = {"kv_cache_free_gpu_mem_fraction": None}
TWO_SETS = '\n  count: 2\n}\nparameters { key: "gpu_device_ids" value { string_value: "0,1;2,3" }'
EDGE = 'key: "TOKENS_BATCH"\n      value: "_TOKENS_BATCH"'
POLICY = 'backend: "python" model_transaction_policy { decoupled: false }'

TRAPS = (
    old("decoupled", ENGINE, decoupled_mode=True),
    old("decoupled!", ENGINE, asked="infer", decoupled_mode=True),
    old("decoupled", ENGINE, asked="generate_stream"),
    new("decoupled", YAML, decoupled_mode=True),
    new("decoupled", YAML, asked="generate_stream"),
    old("decoupled", BLS, replaced(BLS, "decoupled: false", "decoupled: true")),
    old(
        "decoupled!",
        BLS,
        replaced(BLS, "decoupled: true", "decoupled: false"),
        "generate_stream",
        decoupled_mode=True,
    ),
    old(
        "accumulate_tokens",
        BLS,
        asked="generate_stream",
        decoupled_mode=True,
        accumulate_tokens=False,
    ),
    old("bls_instance_count", BLS, bls_instance_count=6),
    old("bls_instance_count!", BLS, replaced(BLS, "count: 7", "count: ${bls_instance_count}")),
    old("triton_max_batch_size", ENGINE, triton_max_batch_size=8),
    old("triton_max_batch_size", ENGINE, triton_max_batch_size=1),
    old("", "", replaced(WHOLE, "max_batch_size: 7", "max_batch_size: 3")),
    old("triton_max_batch_size!", POST, replaced(POST, "batch_size: 7", "batch_size: 6")),
    old("", "", replaced(POST, "batch_size: 7", "batch_size: 0")),
    old("batching_strategy", ENGINE, batching_strategy="V1"),
    old("batching_strategy!", ENGINE, value_of("gpt_model_type", "inflight")),
    old("batching_strategy!", ENGINE, value_of("gpt_model_type", "${batching_strategy}")),
    old("", "", value_of("gpt_model_type", "inflight_batching")),
    old("batch_scheduler_policy", ENGINE, value_of("batch_scheduler_policy", "MAX_UTILIZATION")),
    old("", "", batch_scheduler_policy="max_utilization"),
    old("enable_kv_cache_reuse", ENGINE, value_of("enable_kv_cache_reuse", "yes")),
    old("max_tokens_in_paged_kv_cache", ENGINE, max_tokens_in_paged_kv_cache=40960),
    old("", "", max_tokens_in_paged_kv_cache=4096, **ONE_SHARE),
    old("max_tokens_in_paged_kv_cache", ENGINE, max_tokens_in_paged_kv_cache=4095, **ONE_SHARE),
    old(
        "kv_cache_free_gpu_mem_fraction!", ENGINE, value_of("kv_cache_free_gpu_mem_fraction", "90")
    ),
    old("", "", value_of("kv_cache_free_gpu_mem_fraction", "${kv_cache_free_gpu_mem_fraction}")),
    old(
        "max_queue_delay_microseconds",
        ENGINE,
        replaced(ENGINE, "microseconds: 0", "microseconds: 9"),
    ),
    old("max_queue_size", ENGINE, max_queue_size=0),
    old("tokenizer_dir!", PRE, value_of("tokenizer_dir", "", PRE)),
    old("tokenizer_dir", POST, value_of("tokenizer_dir", "a/hub-name", POST)),
    old("", "", tokenizer_dir="a/hub-name"),
    old("engine_dir!", ENGINE, value_of("gpt_model_path", "/no/such/engine")),
    old("enable_chunked_context", ENGINE, enable_chunked_context=False),
    new("enable_chunked_prefill", YAML, enable_chunked_context=False),
    old("cancellation_check_period_ms", ENGINE, cancellation_check_period_ms=60000),
    new("cancellation_check_period_ms", YAML, cancellation_check_period_ms=1001),
    old("instance_group!", ENGINE, replaced(ENGINE, "count: 1", "count: 2")),
    new("instance_group!", ENGINE, replaced(ENGINE, "count: 1", "count: 2")),
    new("", "", replaced(ENGINE, "\n  count: 1", TWO_SETS)),
    old("name!", BLS, replaced(BLS, 'name: "tensorrt_llm_bls"', 'name: "bls"')),
    old("1!", "ensemble/1", lambda root: (root / "ensemble" / "1").rmdir()),
    new(
        "model.py!",
        "tensorrt_llm/1/model.py",
        lambda root: (root / ENGINE).with_name("1").joinpath("model.py").unlink(),
    ),
    old("triton_backend!", ENGINE, replaced(ENGINE, '"tensorrtllm"', '"${triton_backend}"')),
    new("backend_name!", ENGINE, replaced(ENGINE, '"python"', '"${backend_name}"')),
    old("ensemble_scheduling!", WHOLE, replaced(WHOLE, EDGE, EDGE.replace("_TOK", "_NO_TOK"))),
    old("config.pbtxt!", BLS, replaced(BLS, "instance_group {", "instance_group {{")),
    new("model.yaml!", YAML, replaced(YAML, "max_batch_size: 7", "max_batch_size: [7")),
    new("model!", YAML, replaced(YAML, 'model: "a/checkpoint"', 'model: ""')),
    new("triton_config.max_batch_size!", YAML, replaced(YAML, "batch_size: 0", "batch_size: 64")),
    new("triton_config.decoupled!", YAML, replaced(YAML, "  decoupled: false\n", "")),
    new("max_batch_size!", ENGINE, replaced(ENGINE, '"python"', '"python" max_batch_size: 64')),
    new(
        "model_transaction_policy!",
        ENGINE,
        replaced(ENGINE, 'backend: "python"', POLICY),
        asked="generate_stream",
        decoupled_mode=True,
    ),
    new("kv_cache_config.max_tokens", YAML, max_tokens_in_paged_kv_cache=40960),
    new("kv_cache_config.max_tokens", YAML, max_tokens_in_paged_kv_cache=100, **ONE_SHARE),
    new("kv_cache_config.free_gpu_memory_fraction!", YAML, replaced(YAML, ": 0.9", ": 90")),
    new(
        "scheduler_config.capacity_scheduler_policy!",
        YAML,
        replaced(YAML, "GUARANTEED", "guaranteed"),
    ),
    new("scheduler_config.capacity_scheduler_policy", YAML, batching_strategy="V1"),
)


@pytest.mark.parametrize("trap", TRAPS, ids=lambda one: f"{one.layout}-{one.setting or 'fine'}")
def test_each_trap_is_found_and_nothing_else(
    tmp_path: Path, here: ServingSettings, trap: Trap
) -> None:
    root = written(tmp_path, dataclasses.replace(here, **trap.changed), trap.layout)
    trap.edit(root)
    found = lint(root, runtime_batch=7, **trap.asked)
    expected = [(trap.setting, trap.file, trap.refused)] * bool(trap.setting)
    assert [(one.setting, one.file, one.refused) for one in found] == expected
    for one in found:
        assert all((one.what, one.why, one.instead))
        assert str(one).startswith(f"{one.file}: {one.setting}: {one.what}; ")


def test_an_unknown_batch_is_not_guessed(tmp_path: Path, here: ServingSettings) -> None:
    """Without the engine's folder one instance of the BLS model is odd, two may be right."""
    gone = dataclasses.replace(here, engine_dir="/no/such/engine", triton_max_batch_size=5)
    for count, says in ((1, 1), (2, 0)):
        root = tmp_path / str(count)
        settings = dataclasses.replace(gone, bls_instance_count=count)
        write_repository(root, settings, INFLIGHT, upstream=tmp_path / "all_models")
        assert len(lint(root, paths=False)) == says
    told = lint(root, paths=False, runtime_batch=9)
    assert {one.setting for one in told} == {"bls_instance_count", "triton_max_batch_size"}


@pytest.mark.parametrize("name", sorted(RENAMED))
def test_an_older_name_among_the_arguments_is_translated(
    tmp_path: Path, here: ServingSettings, name: str
) -> None:
    root = written(tmp_path, here, "llmapi")
    with (root / YAML).open("a", encoding="utf-8") as file:
        file.write(f"{name}: 1\n")
    (one,) = lint(root)
    assert (one.setting, one.refused) == (name, True) and RENAMED[name] in one.instead


def test_a_broken_graph_is_seen_at_every_edge(
    tmp_path: Path, here: ServingSettings, seed: int
) -> None:
    draw = random.Random(seed)
    root = written(tmp_path, here, INFLIGHT)
    repository = read_repository(root)
    assert list(wiring(repository)) == []
    text = (root / "ensemble" / "config.pbtxt").read_text("utf-8")
    edges = [pair for maps in STEPS.values() for table in maps for pair in table.split()]
    for pair in edges:
        key, _, value = pair.partition("=")
        tried = f'    key: "{key}"\n      value: "{value or key}"\n'
        assert tried in text
        wrong = draw.choice(
            (
                tried.replace(f'key: "{key}"', 'key: "nothing"'),
                tried.replace('value: "', 'value: "no_'),
            )
        )
        repository.models["ensemble"] = pbtxt.loads(text.replace(tried, wrong, 1))
        assert list(wiring(repository)), pair
    kinds = pbtxt.loads(text)
    for side in ("input", "output"):
        for one in kinds[side]:
            before, one["data_type"] = one["data_type"], [pbtxt.Word("TYPE_INT8")]
            repository.models["ensemble"] = kinds
            assert any("another type" in bad.what for bad in wiring(repository)), one
            one["data_type"] = before
    needed = {"QUERY", "REQUEST_OUTPUT_LEN", "input_lengths", "request_output_len"}
    needed |= {"TOKENS_BATCH", "SEQUENCE_LENGTH"}
    for step in kinds["ensemble_scheduling"][0]["step"]:
        for pair in list(step["input_map"]):
            step["input_map"].remove(pair)
            (key,) = pair["key"]
            says = [one.what.rpartition(" ")[2] for one in wiring(repository)]
            assert says == [key] * (key in needed)
            step["input_map"].append(pair)


def test_a_step_without_a_folder_is_seen(tmp_path: Path, here: ServingSettings) -> None:
    root = written(tmp_path, here, INFLIGHT)
    (root / "postprocessing" / "config.pbtxt").unlink()
    found = lint(root)
    assert any("postprocessing has no folder" in one.what for one in found)
    assert all(one.refused for one in found)


def test_every_rule_is_in_use() -> None:
    for rules in RULES.values():
        assert len(set(rules)) == len(rules) and all(rule.__doc__ for rule in rules)
