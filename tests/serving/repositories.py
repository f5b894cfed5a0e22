"""Model repositories for the tests, and the server's own schema to check them with."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from labcore.serving.tensorrt.llm import LAYOUTS, ServingSettings, write_repository

INFLIGHT = "inflight_batcher_llm"
ENGINE, YAML = "tensorrt_llm/config.pbtxt", "tensorrt_llm/1/model.yaml"


def schema() -> Any:
    """`inference.ModelConfig` and the reader of the package that brings it."""
    try:
        from google.protobuf import json_format, text_format
        from tritonclient.grpc import model_config_pb2
    except ImportError:
        if os.environ.get("CI") == "true":
            pytest.fail("tritonclient, which carries the server's schema, must be here under CI")
        pytest.skip("tritonclient, which carries the server's schema, is not installed")

    class Schema:
        error = text_format.ParseError

        @staticmethod
        def parse(text: str) -> Any:
            return text_format.Parse(text, model_config_pb2.ModelConfig())

        @staticmethod
        def fields(text: str) -> dict[str, Any]:
            parsed = text_format.Parse(text, model_config_pb2.ModelConfig())
            return json_format.MessageToDict(parsed, preserving_proto_field_name=True)

    return Schema


def settings_in(tmp_path: Path) -> ServingSettings:
    """Settings whose folders exist, with an engine that says what it was built for."""
    settings = ServingSettings(
        model="a/checkpoint",
        tokenizer_dir=str(tmp_path / "tokenizer"),
        engine_dir=str(tmp_path / "engine"),
        max_batch_size=7,
        triton_max_batch_size=7,
    )
    Path(settings.tokenizer_dir).mkdir()
    Path(settings.engine_dir).mkdir()
    built = {"max_batch_size": 7, "max_num_tokens": 8192, "max_seq_len": 4096}
    (Path(settings.engine_dir) / "config.json").write_text(json.dumps({"build_config": built}))
    for layout in LAYOUTS.values():
        for name in {*layout.code, "tensorrt_llm"}:
            code = tmp_path / "all_models" / layout.name / name / "1"
            (code / "lib").mkdir(parents=True)
            (code / "model.py").write_text(f"# {layout.name}/{name}\n")
            (code / "lib" / "decode.py").write_text("# beside it\n")
    return settings


def written(tmp_path: Path, settings: ServingSettings, layout: str) -> Path:
    root = tmp_path / "repository"
    write_repository(root, settings, layout, upstream=tmp_path / "all_models")
    return root


def a_word(draw: random.Random) -> str:
    """A path with whatever a file system allows, and what YAML and text format have to quote."""
    letters = "abc/ .:#'\"\\{}[]<>,;&*!|>%@`~-$\n\t\x00\x1b\x7f\x85é\u2028\ufeff\uffff漢😀01eE+no"
    return "".join(draw.choice(letters) for _ in range(draw.randrange(1, 20)))
