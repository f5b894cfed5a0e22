"""A model repository for the Triton Inference Server: one streaming language model.

The server defines the layout, `<name>/config.pbtxt` and `<name>/1/model.py`, and the fields of the
model configuration, which is in protobuf text format.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["INPUTS", "OUTPUTS", "config_text", "write_repository"]

# name: (data type, dims, whether it is optional). max_batch_size is 0: the engine batches.
INPUTS: dict[str, tuple[str, int, bool]] = {
    "text_input": ("TYPE_STRING", 1, False),
    "max_tokens": ("TYPE_INT32", 1, True),
    "temperature": ("TYPE_FP32", 1, True),
    "top_k": ("TYPE_INT32", 1, True),
    "top_p": ("TYPE_FP32", 1, True),
    "repetition_penalty": ("TYPE_FP32", 1, True),
    "stop": ("TYPE_STRING", -1, True),
    "seed": ("TYPE_INT64", 1, True),
    "priority": ("TYPE_INT32", 1, True),
    "timeout": ("TYPE_FP32", 1, True),
    "stream": ("TYPE_BOOL", 1, True),
}
OUTPUTS: dict[str, tuple[str, int]] = {
    "text_output": ("TYPE_STRING", 1),
    "token_ids": ("TYPE_INT32", -1),
    "finish_reason": ("TYPE_STRING", 1),
    "reason": ("TYPE_STRING", 1),
}
NAME = re.compile(r"[A-Za-z0-9_.-]+")


def config_text(name: str, socket: str | Path) -> str:
    """Return the config.pbtxt of the model `name`, which talks to the engine on `socket`.

    The model is decoupled, because a request gets many responses, and has one instance, because
    the engine does the batching. The server itself queues nothing. Raises ValueError if the name
    can't be a folder name.
    """
    if not NAME.fullmatch(name) or name.startswith("."):
        raise ValueError(
            f"a model's name must consist of letters, digits, _ . and -, and not begin with a "
            f"dot, got {name!r}"
        )
    inputs = [
        _field(field, kind, dims, " optional: true" if optional else "")
        for field, (kind, dims, optional) in INPUTS.items()
    ]
    outputs = [_field(field, kind, dims) for field, (kind, dims) in OUTPUTS.items()]
    return "\n".join(
        [
            f'name: "{name}"',
            'backend: "python"',
            "max_batch_size: 0",
            "model_transaction_policy { decoupled: true }",
            "input [\n" + ",\n".join(inputs) + "\n]",
            "output [\n" + ",\n".join(outputs) + "\n]",
            "instance_group [ { kind: KIND_CPU count: 1 } ]",
            f'parameters {{ key: "socket" value {{ string_value: "{_quoted(str(socket))}" }} }}',
            "",
        ]
    )


def write_repository(folder: Path, *, name: str = "lm", socket: str | Path) -> Path:
    """Write the repository into `folder` and return `folder`; other files there stay."""
    model = folder / name / "1"
    text = config_text(name, socket)
    model.mkdir(parents=True, exist_ok=True)
    (model.parent / "config.pbtxt").write_text(text, "utf-8")
    source = Path(__file__).parent / "files" / "model.py"
    (model / "model.py").write_text(source.read_text("utf-8"), "utf-8")
    return folder


def _field(name: str, kind: str, dims: int, more: str = "") -> str:
    return f'  {{ name: "{name}" data_type: {kind} dims: [ {dims} ]{more} }}'


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
