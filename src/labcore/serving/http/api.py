"""What a client of `/v1/completions` may ask, and the form of what it gets.

Source: OpenAI's API reference, "Completions". What this server can't do is refused by name.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labcore.decoding import SamplingConfig

__all__ = ["Asked", "Refused", "completion", "parse"]

# Fields with one supported value, which may also be null.
FIXED: dict[str, Any] = {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "logit_bias": {},
    "logprobs": None,
    "n": 1,
    "presence_penalty": 0,
    "suffix": "",
}
# Numbers: whether whole, the least, the most, and the API's default.
NUMBERS: dict[str, tuple[bool, float, float, float]] = {
    "max_tokens": (True, 1, math.inf, 16),
    "temperature": (False, 0, 2, 1),
    "top_p": (False, 0, 1, 1),
    "seed": (True, -(2**63), 2**63 - 1, 0),
}
OTHERS = {"model", "prompt", "stop", "stream", "stream_options", "user"}
REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


class Refused(Exception):
    """A request that gets an error. status: of HTTP. param: the field at fault, or None."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The error in the API's form."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        told = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": told}


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A valid request. prompt: a text or tokens. usage: whether a stream ends with the counts."""

    prompt: str | tuple[int, ...]
    sampling: SamplingConfig
    stream: bool
    usage: bool


def parse(body: Any, *, model: str) -> Asked:
    """Check the fields of a request. Raises Refused that names the one at fault."""
    if not isinstance(body, dict):
        raise Refused(f"the body must be a JSON object, got {type(body).__name__}")
    for field, value in body.items():
        if field not in FIXED.keys() | NUMBERS.keys() | OTHERS:
            raise Refused(f"{field} is not a field of a completion; leave it out", param=field)
        if field in FIXED and value is not None and value != FIXED[field]:
            only, came = json.dumps(FIXED[field]), json.dumps(value)
            message = f"{field} must be {only} here, got {came}; leave it out"
            raise Refused(message, param=field)
    if body.get("model") != model:
        message = f"model must be {model!r}, got {body.get('model')!r}"
        raise Refused(message, status=404, param="model", code="model_not_found")
    numbers = {field: _number(field, body.get(field)) for field in NUMBERS}
    if body.get("seed") is None:
        numbers["seed"] = time.time_ns() % 2**63
    stream, options = _flag(body, "stream"), body.get("stream_options")
    if options is not None and not (stream and isinstance(options, dict)):
        raise Refused(
            f'stream_options must be an object, with "stream": true, got {options!r}',
            param="stream_options",
        )
    try:
        sampling = SamplingConfig(stop=_stops(body.get("stop")), **numbers)
    except (TypeError, ValueError) as problem:
        raise Refused(str(problem), param=str(problem).split(" ", 1)[0]) from None
    return Asked(
        prompt=_prompt(body.get("prompt")),
        sampling=sampling,
        stream=stream,
        usage=_flag(options or {}, "include_usage"),
    )


def _prompt(given: Any) -> str | tuple[int, ...]:
    one = given[0] if isinstance(given, list) and len(given) == 1 else given
    if isinstance(one, int) and not isinstance(one, bool) and one is not given:
        one = [one]
    if isinstance(one, str) and one and not re.search("[\ud800-\udfff]", one):
        return one
    if isinstance(one, list) and one and all(type(token) is int for token in one):
        return tuple(one)
    came = f"a list of {len(given)}" if isinstance(given, list) else repr(given)[:60]
    raise Refused(
        f"prompt must be one nonempty string or list of tokens, got {came}", param="prompt"
    )


def _number(field: str, value: Any) -> Any:
    whole, least, most, default = NUMBERS[field]
    if value is None:
        return default
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        kind = "a whole number" if whole else "a number"
        limits = f"from {least} to {most}" if most < math.inf else f"of at least {least}"
        raise Refused(f"{field} must be {kind} {limits}, got {value!r}", param=field)
    return value


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or len(stops) > 4 or not all(type(one) is str for one in stops):
        raise Refused(f"stop must be a string or a list of up to four, got {value!r}", param="stop")
    return tuple(one for one in stops if one)


def _flag(told: Mapping[str, Any], name: str) -> bool:
    value = told.get(name)
    if value is not None and not isinstance(value, bool):
        raise Refused(f"{name} must be true or false, got {value!r}", param=name)
    return bool(value)


def completion(
    given: Mapping[str, Any],
    text: str | None,
    finish: str = "",
    *,
    guessed: bool | None = None,
    usage: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Return a completion, or a chunk of a stream, in the API's form.

    given: id, model and created. text: None for a chunk without a choice. guessed: whether a draft
    had guessed the text, which is our addition to the API. usage: tokens of prompt and output.
    """
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": REASONS.get(finish)}
    if guessed is not None:
        choice["guessed"] = guessed
    told = {**given, "object": "text_completion", "choices": [] if text is None else [choice]}
    if usage is not None:
        prompt, output = usage
        told["usage"] = {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
        }
    return told
