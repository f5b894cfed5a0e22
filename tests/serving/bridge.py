"""What the server's python backend gives a model, as far as triton/files/model.py uses it: for
tests of that file without the server. Like the real one, most of it appears only after the file's
import.
"""

from __future__ import annotations

import importlib.util
import json
import queue
import re
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy

from labcore.serving.triton.server import FILES

FINAL = 1
OUTPUTS = {"text_output", "token_ids", "finish_reason", "reason"}


class TritonError(Exception):
    INVALID_ARG, UNAVAILABLE, CANCELLED, INTERNAL = (
        "invalid",
        "unavailable",
        "cancelled",
        "internal",
    )

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class Tensor:
    def __init__(self, name: str, array: numpy.ndarray[Any, Any]) -> None:
        self.name, self.array = name, array

    def as_numpy(self) -> numpy.ndarray[Any, Any]:
        return self.array


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor], error: TritonError | None = None) -> None:
        self.outputs = {tensor.name: tensor.array for tensor in output_tensors}
        self.error = error


class MetricFamily:
    GAUGE = "gauge"
    values: dict[str, float] = {}  # noqa: RUF012

    def __init__(self, name: str, description: str, kind: str) -> None:
        self.name = name

    def Metric(self, labels: dict[str, str]) -> Any:
        return types.SimpleNamespace(
            set=lambda value: self.values.__setitem__(labels["value"], value)
        )


class Sender:
    """Keeps what the model sends; raises where it sends behind the end, as the server does."""

    def __init__(self) -> None:
        self.sent: queue.SimpleQueue[tuple[InferenceResponse, int]] = queue.SimpleQueue()
        self.ended = False
        self.client_left = False
        self.refuses = False  # every word of the model's, as where its memory is full

    def send(self, response: InferenceResponse, flags: int = 0) -> None:
        if self.ended:
            raise RuntimeError("a response was sent behind the final one")
        if self.refuses:
            raise RuntimeError("planted: the server takes no response")
        self.ended = flags == FINAL
        self.sent.put((response, flags))

    def is_cancelled(self) -> bool:
        if self.ended:
            raise RuntimeError("asked about a request that has ended")
        if self.refuses:
            raise RuntimeError("planted: the server knows no such request")
        return self.client_left

    def all(self, timeout: float = 120.0) -> tuple[list[int], str, Any]:
        """(token ids, text, the last response), of a request up to its end."""
        tokens: list[int] = []
        text = ""
        while True:
            response, flags = self.sent.get(timeout=timeout)
            if not response.error:
                assert set(response.outputs) == OUTPUTS
                tokens += response.outputs["token_ids"].tolist()
                text += response.outputs["text_output"][0].decode()
            if flags == FINAL:
                return tokens, text, response


class Request:
    def __init__(self, sender: Sender, *, parameters: str = "", **inputs: Any) -> None:
        self.sender = sender
        self.told = parameters
        self.inputs = {
            name: value if isinstance(value, numpy.ndarray) else numpy.array([value], dtype=object)
            for name, value in inputs.items()
        }

    def parameters(self) -> str:
        return self.told

    def get_response_sender(self) -> Sender:
        return self.sender


def get_input_tensor_by_name(request: Request, name: str) -> Tensor | None:
    array = request.inputs.get(name)
    return None if array is None else Tensor(name, array)


@contextmanager
def loaded(socket: Path) -> Iterator[Any]:
    """The model of serving/triton/files/model.py, initialized on a socket; finalized at the end."""
    utils = types.ModuleType("triton_python_backend_utils")
    utils.np = numpy  # type: ignore[attr-defined]
    source = FILES / "model.py"
    spec = importlib.util.spec_from_file_location("model_under_test", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["triton_python_backend_utils"] = utils
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["triton_python_backend_utils"]
    for one in (TritonError, Tensor, InferenceResponse, MetricFamily, get_input_tensor_by_name):
        setattr(utils, one.__name__, one)
    utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL  # type: ignore[attr-defined]
    model = module.TritonPythonModel()
    given = (FILES / "config.pbtxt").read_text("utf-8").partition("output [")[0]
    inputs = [{"name": name} for name in re.findall(r'{ name: "(\w+)"', given)]
    parameters = {"socket": {"string_value": str(socket)}}
    model.initialize({"model_config": json.dumps({"parameters": parameters, "input": inputs})})
    try:
        yield model
    finally:
        model.finalize()
