"""The reader and the writer of text format against the reader of the package with the schema."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest

from labcore.serving.triton import pbtxt
from tests.serving.repositories import a_word, schema

# Text format as others write it, with the same content in our own spelling.
SPELLINGS = (
    (
        "name: \"a\" # words\nbackend:'b'; max_batch_size: 0x10, ",
        'name: "a" backend: "b" max_batch_size: 16',
    ),
    ('name: "a" "b"\n \'c"\'', 'name: "abc\\""'),
    ("max_batch_size: 017", "max_batch_size: 15"),
    ("input < name: 'x' dims: [ -1, 3 ] dims: 7 >", 'input { name: "x" dims: [-1, 3, 7] }'),
    ("input: [ { name: 'x' }, < name: 'y' > ]", 'input { name: "x" } input { name: "y" }'),
    ("input { reshape: { shape: [ ] } }", "input { reshape { } }"),
    (r'name: "\303\251\xe6\xbc\xa2\a\'\n\101"', 'name: "é漢\\007\'\\nA"'),
    ("model_transaction_policy { decoupled: true }", "model_transaction_policy: {decoupled: true}"),
    ("parameters: { key: 'k' value: { string_value: '' } }", 'parameters { key: "k" value {} }'),
    ("instance_group [ { kind : KIND_CPU , count: 1 } ]", "instance_group {count:1 kind:KIND_CPU}"),
)


def single(fields: dict[str, list[Any]]) -> dict[str, Any]:
    """What the reader gives, as the writer takes it: a field with one value is not repeated."""
    done = {}
    for name, values in fields.items():
        values = [single(one) if isinstance(one, dict) else one for one in values]
        done[name] = values[0] if len(values) == 1 else values
    return done


@pytest.mark.parametrize(("text", "same"), SPELLINGS)
def test_the_reader_reads_what_the_server_reads(text: str, same: str) -> None:
    assert schema().parse(text) == schema().parse(same)
    again = pbtxt.dumps(single(pbtxt.loads(text)), comment="a\n\nb")
    assert schema().parse(again) == schema().parse(text)
    assert again.startswith("# a\n#\n# b\n")


def test_reader_and_writer_agree_on_any_string(seed: int) -> None:
    draw, server = random.Random(seed), schema()
    for _ in range(200):
        word = a_word(draw)
        text = pbtxt.dumps({"name": word})
        assert pbtxt.loads(text) == {"name": [word]}
        assert server.parse(text).name == word


@pytest.mark.parametrize(
    "text",
    (
        "name",
        "name:",
        'name "a"',
        "name: {",
        "input { name: 'x' ",
        "input { name: 'x' >",
        "dims: [1, ]",
        "dims: [1 2]",
        'name: "a\nb"',
        'name: "a',
        r'name: "\ud800"',
        r'name: "\xff"',
        "}",
        "name: @",
        "a: 1 ]",
        ": 1",
        "5: 1",
    ),
)
def test_the_reader_refuses_what_is_no_text_format(text: str) -> None:
    with pytest.raises(ValueError, match=r"line \d+, column \d+"):
        pbtxt.loads(text)
    with pytest.raises(schema().error):
        schema().parse(text)


def test_the_specification_goes_before_python_s_reader() -> None:
    """The server's is C++; Python's takes unknown escapes and no space after a minus."""
    assert pbtxt.loads("max_batch_size: - 3") == {"max_batch_size": [-3]}
    assert pbtxt.loads(r'name: "\u00e9\U0001F600\?"') == {"name": ["é😀?"]}
    with pytest.raises(ValueError, match=r"line 1, column 7"):
        pbtxt.loads(r'name: "\q"')


def test_an_error_names_its_place() -> None:
    with pytest.raises(ValueError, match=r"line 3, column 7"):
        pbtxt.loads('name: "a"\n# one\n  x: [}')
    with pytest.raises(TypeError, match="NoneType"):
        pbtxt.dumps({"name": None})


def test_the_schema_check_says_what_is_wrong(monkeypatch: Any) -> None:
    schema()
    assert "max_batch" in pbtxt.schema_error("max_batch: 1")
    assert pbtxt.schema_error("input { data_type: TYPE_INT31 }")
    assert pbtxt.schema_error("max_batch_size: ${triton_max_batch_size}")
    monkeypatch.setitem(sys.modules, "tritonclient.grpc.model_config_pb2", None)
    with pytest.raises(RuntimeError, match=r"labcore\[server\]"):
        pbtxt.schema_error("")
