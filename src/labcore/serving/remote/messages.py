"""The protocol between a client and an engine: one JSON object per line, in UTF-8.

To the engine: `hello` (name, pid), `submit` (id, prompt, the fields of SamplingConfig, priority,
timeout), `cancel` (id), `health` (id), `stats` (id).
From the engine: `tokens` (id, tokens, text), `finish` (id, finish, reason), `error` (id or null,
code, reason), `health` and `stats` (id, values).
The engine answers a readable `submit` with any number of `tokens` and one `finish` or `error`.
Error codes: malformed, too_long, duplicate, invalid, overloaded, internal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from labcore.checks import one_of, positive_int
from labcore.decoding import SamplingConfig

__all__ = [
    "LIMIT",
    "LineBuffer",
    "MessageError",
    "Submit",
    "encode",
    "parse",
    "parse_answer",
    "parse_submit",
]

LIMIT = 1 << 20  # bytes per line
TYPES = ("hello", "submit", "cancel", "health", "stats")
LONGEST_ID = 256
# The type of a submit field: its description, and a check of the value.
WHOLE = ("a whole number", lambda v: isinstance(v, int) and not isinstance(v, bool))
NUMBER = ("a number", lambda v: isinstance(v, int | float) and not isinstance(v, bool))
TEXTS = ("a list of strings", lambda v: isinstance(v, list) and all(isinstance(s, str) for s in v))
SAMPLING: dict[str, tuple[str, Any]] = {
    "max_tokens": WHOLE,
    "temperature": NUMBER,
    "top_k": WHOLE,
    "top_p": NUMBER,
    "repetition_penalty": NUMBER,
    "stop": TEXTS,
    "seed": WHOLE,
}
FIELDS = ("type", "id", "prompt", "priority", "timeout", *SAMPLING)


class MessageError(ValueError):
    """A line that can't be accepted.

    code: "malformed", "too_long", "duplicate" or "invalid". id: the id of the request in the line,
    or None if it is unknown.
    """

    def __init__(self, reason: str, *, code: str = "malformed", id: str | None = None) -> None:
        super().__init__(reason)
        self.code = code
        self.id = id


@dataclass(frozen=True, kw_only=True, slots=True)
class Submit:
    """One request as received: a text or token ids, and how to sample.

    timeout: seconds from now after which the request ends with finish "deadline"; None means never.
    """

    id: str
    prompt: str | tuple[int, ...]
    sampling: SamplingConfig
    priority: int = 0
    timeout: float | None = None


def encode(message: Mapping[str, Any]) -> bytes:
    """Encode a message as a line, with its newline. Raises ValueError for NaN and infinities."""
    text = json.dumps(message, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.encode("ascii") + b"\n"


def parse(line: bytes) -> dict[str, Any]:
    """Parse the message on a line. Raises only MessageError, with a readable reason."""
    try:
        told = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise MessageError(f"a line must be UTF-8, got an invalid byte at {error.start}") from None
    except RecursionError:
        raise MessageError("a line must not be nested this deeply") from None
    except ValueError as error:
        raise MessageError(f"a line must be one JSON object, got {_short(error)}") from None
    if not isinstance(told, dict):
        raise MessageError(f"a line must be one JSON object, got a {type(told).__name__}")
    if told.get("type") == "submit" or "id" in told:
        _check_id(told)
    try:
        one_of("type", told.get("type"), TYPES)
    except ValueError as error:
        raise MessageError(_short(error), id=told.get("id")) from None
    return told


def parse_submit(message: Mapping[str, Any]) -> Submit:
    """Return the request in a submit message. Raises a MessageError that names the bad field."""
    name = message["id"]
    try:
        for field in message:
            one_of("field of submit", field, FIELDS)
        prompt = _prompt(message.get("prompt"))
        wanted = {field: message[field] for field in SAMPLING if message.get(field) is not None}
        for field, value in wanted.items():
            _must_be(field, value, SAMPLING[field])
        if "stop" in wanted:
            wanted["stop"] = tuple(wanted["stop"])
        if not -(2**63) <= wanted.get("seed", 0) < 2**63:
            raise ValueError("seed must fit into 64 bits")
        priority = message.get("priority", 0)
        _must_be("priority", priority, WHOLE)
        timeout = message.get("timeout")
        if timeout is not None:
            _must_be("timeout", timeout, NUMBER)
            if not (timeout > 0 and math.isfinite(timeout)):
                raise ValueError(f"timeout must be above 0 seconds, got {timeout}")
        sampling = SamplingConfig(**wanted)
    except (TypeError, ValueError, OverflowError) as error:
        raise MessageError(_short(error), code="invalid", id=name) from None
    return Submit(id=name, prompt=prompt, sampling=sampling, priority=priority, timeout=timeout)


def parse_answer(line: bytes) -> dict[str, Any]:
    """Parse a line from the engine, which is trusted. Raises ValueError if it isn't JSON."""
    told: dict[str, Any] = json.loads(line)
    return told


class LineBuffer:
    """Split a stream of bytes into whole lines.

    A line longer than `limit` bytes is dropped up to its newline; later lines are read normally.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = positive_int("limit", limit)
        self._rest = bytearray()
        self._dropping = False

    def feed(self, data: bytes) -> Iterator[bytes | None]:
        """Yield the lines that are now complete, without newlines; None for each overlong line."""
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            self._rest += data[start:end]
            start = end + 1
            line, too_long = bytes(self._rest), len(self._rest) > self.limit
            self._rest.clear()
            if self._dropping:
                self._dropping = False
            elif too_long:
                yield None
            elif line.strip():
                yield line
        if not self._dropping:
            self._rest += data[start:]
            if len(self._rest) > self.limit:
                # Report it now: the newline may never come.
                self._dropping = True
                self._rest.clear()
                yield None


def _prompt(told: object) -> str | tuple[int, ...]:
    if isinstance(told, str):
        try:
            told.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("prompt must be valid Unicode, got half of a surrogate pair") from None
        if not told:
            raise ValueError("prompt must not be empty: there is nothing to continue")
        return told
    if isinstance(told, list) and told and all(WHOLE[1](token) and token >= 0 for token in told):
        return tuple(told)
    raise TypeError(f"prompt must be a string or a list of token ids, got {_short(repr(told))}")


def _must_be(field: str, value: object, kind: tuple[str, Any]) -> None:
    if not kind[1](value):
        raise TypeError(f"{field} must be {kind[0]}, got {_short(repr(value))}")


def _check_id(told: Mapping[str, Any]) -> None:
    name = told.get("id")
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_ID:
        raise MessageError(
            f"id must be a string of 1 to {LONGEST_ID} characters, got {_short(repr(name))}"
        )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name}, which is not valid JSON")


def _short(text: object) -> str:
    words = str(text)
    return words if len(words) <= 300 else words[:297] + "..."
