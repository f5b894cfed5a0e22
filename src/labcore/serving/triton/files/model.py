"""The model that the Triton Inference Server's python backend loads: a bridge to one engine.

This file runs in the server's own environment, with the standard library and what the backend
provides. The model is decoupled: `execute` hands each request to a thread and returns at once. The
thread sends it to the engine over a Unix socket, and sends the client a response for each line that
the engine answers, the last one with the final flag. When the engine dies, the requests that it had
end with an error; those that come while it's away are sent once it's back.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from contextlib import closing, suppress
from typing import Any

# Only the server provides this module, which also provides numpy.
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

LIMIT = 1 << 20  # the engine's limit on the bytes of a line
# Seconds between checks for a client that left, attempts to connect, and questions for statistics.
LOOK_S = 0.1


class TritonPythonModel:
    """The class that the backend calls: its first three methods. The others run in one thread."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start the thread."""
        config = json.loads(args["model_config"])
        self.path = config["parameters"]["socket"]["string_value"]
        self.inputs = [one["name"] for one in config["input"]]
        gauge = pb_utils.MetricFamily.GAUGE
        self.family = pb_utils.MetricFamily("labcore_engine", "The engine's statistics", gauge)
        self.closing = False
        self.loop = asyncio.new_event_loop()
        work = self.loop.run_until_complete
        self.thread = threading.Thread(target=work, args=[self.work()], daemon=True)
        self.thread.start()

    def execute(self, requests: list[Any]) -> None:
        """Hand each request to the thread, which sends the responses later."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                message = read(request, self.inputs)
            except Exception as error:  # one request's fault must not affect the others
                fail(sender, "INVALID_ARG", str(error))
            else:
                asyncio.run_coroutine_threadsafe(self.serve(sender, message), self.loop)

    def finalize(self) -> None:
        """End every request: the server unloads the model."""
        self.closing = True
        self.thread.join()
        self.loop.close()

    async def work(self) -> None:
        """Show the engine's statistics as gauges, 0 while it's away, until no request is left."""
        gauges: dict[str, Any] = {}
        server = os.getppid()
        while not self.closing or len(asyncio.all_tasks()) > 1:
            if os.getppid() == server:
                signal.alarm(15)  # ends this process, even in a call that waits for a dead server
            numbers = dict.fromkeys(gauges, 0)
            with suppress(Exception):  # the engine is away
                lines, engine = await asyncio.open_unix_connection(self.path)
                with closing(engine):
                    engine.write(b'{"type": "stats"}\n')
                    numbers = json.loads(await asyncio.wait_for(lines.readline(), 5))
            with suppress(Exception):  # the server takes no gauge now
                for name, number in numbers.items():
                    if name not in gauges:
                        gauges[name] = self.family.Metric(labels={"value": name})
                    gauges[name].set(float(number))
            await asyncio.sleep(LOOK_S)
        signal.alarm(0)

    async def serve(self, sender: Any, message: dict[str, Any]) -> None:
        """Answer a request as long as its client is there."""
        talk = asyncio.ensure_future(self.talk(sender, message))
        try:
            while not (await asyncio.wait([talk], timeout=LOOK_S))[0]:
                if self.closing or sender.is_cancelled():
                    return fail(sender, "CANCELLED", "the client left, or the model is unloaded")
            talk.result()
        except Exception as error:  # such as a response that the server refuses
            fail(sender, "INTERNAL", repr(error))
        finally:
            talk.cancel()

    async def talk(self, sender: Any, message: dict[str, Any]) -> None:
        """Send the engine a request, and the client a response for each line of the answer."""
        stream, tokens, text = message.pop("stream", True), list[int](), ""
        while True:
            try:
                lines, engine = await asyncio.open_unix_connection(self.path)
                break
            except OSError:  # the engine is away
                if time.monotonic() > message["since"] + message.get("timeout", 1e9):
                    return send(sender, tokens, text, "deadline", "the engine was away")
                await asyncio.sleep(LOOK_S)
        with suppress(OSError, json.JSONDecodeError), closing(engine):  # half a line may come last
            engine.write(json.dumps(message).encode("ascii") + b"\n")
            async for line in lines:
                news = json.loads(line)
                if news["finish"] == "error":
                    return fail(sender, news.get("code", "INTERNAL"), news["reason"])
                tokens, text = tokens + news["tokens"], text + news["text"]
                if stream or news["finish"]:
                    send(sender, tokens, text, news["finish"], news["reason"])
                    tokens, text = [], ""
                if news["finish"]:
                    return
        fail(sender, "UNAVAILABLE", "the engine is gone; send the request again")


def read(request: Any, inputs: list[str]) -> dict[str, Any]:
    """Return the engine's submit message, and "stream". Raises ValueError for an unknown input."""
    # /generate passes inputs that the configuration doesn't list as parameters.
    for name in json.loads(request.parameters() or "{}"):
        if name != "id" and not name.startswith("triton_"):
            raise ValueError(f"unknown input {name!r}; the inputs are {', '.join(inputs)}")
    message: dict[str, Any] = {"type": "submit", "since": time.monotonic()}
    for name in inputs:
        if tensor := pb_utils.get_input_tensor_by_name(request, name):
            values = tensor.as_numpy().reshape(-1).tolist()
            try:
                values = [v.decode("utf-8") if isinstance(v, bytes) else v for v in values]
            except UnicodeDecodeError as error:
                raise ValueError(f"{name} must be UTF-8, got {error}") from None
            message[name] = values if name == "stop" else values[0]
    message["prompt"] = message.pop("text_input")
    if (size := len(json.dumps(message))) > LIMIT:
        raise ValueError(f"a request must have at most {LIMIT} bytes, got {size}")
    return message


def send(sender: Any, tokens: list[int], text: str, finish: str, reason: str) -> None:
    """Send a response with the model's four outputs, the final one if `finish` isn't empty."""
    np, final = pb_utils.np, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
    outputs = [pb_utils.Tensor("token_ids", np.array(tokens, dtype=np.int32))]
    for name, value in ("text_output", text), ("finish_reason", finish), ("reason", reason):
        outputs.append(pb_utils.Tensor(name, np.array([value.encode()], dtype=np.object_)))
    sender.send(pb_utils.InferenceResponse(output_tensors=outputs), flags=final if finish else 0)


def fail(sender: Any, code: str, reason: str) -> None:
    """End a request with an error; code: of pb_utils.TritonError."""
    error = pb_utils.TritonError(reason, getattr(pb_utils.TritonError, code))
    response = pb_utils.InferenceResponse(output_tensors=[], error=error)
    for sent in ([response], []):  # without a final flag, the client would wait forever
        with suppress(Exception):
            return sender.send(*sent, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
