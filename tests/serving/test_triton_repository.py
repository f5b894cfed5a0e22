"""The model repository, which needs no server: what the server would read."""

from __future__ import annotations

from pathlib import Path

import pytest

from labcore.serving.triton.repository import INPUTS, OUTPUTS, config_text, write_repository
from tests.serving.triton import need_client


def test_the_configuration_is_the_servers_own_format(tmp_path: Path) -> None:
    need_client()
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    odd = '/tmp/a "quoted" \\ path'
    parsed = text_format.Parse(config_text("lm", odd), model_config_pb2.ModelConfig())
    assert parsed.model_transaction_policy.decoupled and parsed.backend == "python"
    assert parsed.parameters["socket"].string_value == odd
    names = model_config_pb2.DataType.Name
    assert {
        one.name: (names(one.data_type), one.dims[0], one.optional) for one in parsed.input
    } == INPUTS
    assert {one.name: (names(one.data_type), one.dims[0]) for one in parsed.output} == OUTPUTS
    assert parsed.max_batch_size == 0 and parsed.instance_group[0].count == 1
    for bad in ("", "../up", "a/b", ".hidden", 'x"y'):
        with pytest.raises(ValueError, match="model's name"):
            config_text(bad, "/s")
    write_repository(tmp_path, name="other", socket="/s")
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()) == [
        "other/1/model.py",
        "other/config.pbtxt",
    ]
