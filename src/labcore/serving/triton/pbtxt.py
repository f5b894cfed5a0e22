"""Protocol buffers' text format, the format of config.pbtxt: reader, writer, schema check.

The reader needs no schema: it returns each field as the list of its values, in order. It accepts
what Google's own reader accepts in a model configuration, and also `${name}`, the unfilled
placeholders of TensorRT-LLM's templates. Source: the Text Format Language Specification,
https://protobuf.dev/reference/protobuf/textformat-spec/
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["Placeholder", "Word", "dumps", "every", "first", "loads", "parameters", "schema_error"]

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n\v\f]+|\#[^\n]*)
      | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<place>\$\{\w+\})
      | (?P<number>-?[ ]?(?:0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?[fF]?))
      | (?P<word>-?[A-Za-z_][A-Za-z0-9_]*)
      | (?P<sign>[{}<>\[\]:,;])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(
    r"\\(?:(?P<hex>[xX][0-9a-fA-F]{1,2})|(?P<octal>[0-7]{1,3})|(?P<short>u[0-9a-fA-F]{4})"
    r"|(?P<long>U[0-9a-fA-F]{8})|(?P<plain>[abfnrtv\\'\"?])|(?P<bad>.))"
)
_PLAIN = dict(zip("abfnrtv\\'\"?", "\a\b\f\n\r\t\v\\'\"?", strict=True))
_CONTROL = re.compile(r'[\x00-\x1f\x7f"\\]')
_CLOSING = {"{": "}", "<": ">"}


class Word(str):
    """A bare word: the name of an enum value (`TYPE_INT32`), or `inf` or `nan`."""

    __slots__ = ()


class Placeholder(str):
    """`${name}` outside a string, which no server can read. The str holds the whole `${name}`."""

    __slots__ = ()


def _place(text: str, at: int) -> str:
    line = text.count("\n", 0, at) + 1
    return f"line {line}, column {at - (text.rfind(chr(10), 0, at) + 1) + 1}"


def _unescape(text: str, at: int, body: str) -> bytes:
    """Return the bytes of a string's body; several byte escapes may form one character."""
    out, done = bytearray(), 0
    for found in _ESCAPE.finditer(body):
        out += body[done : found.start()].encode()
        done = found.end()
        if found["bad"] is not None:
            raise ValueError(
                f"an escape in a string must be valid in the text format, got \\{found['bad']} "
                f"at {_place(text, at)}; write \\\\ for a backslash"
            )
        if found["hex"]:
            out.append(int(found["hex"][1:], 16))
        elif found["octal"]:
            out.append(int(found["octal"], 8) & 0xFF)
        elif found["plain"]:
            out += _PLAIN[found["plain"]].encode()
        else:
            code = int((found["short"] or found["long"])[1:], 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise ValueError(
                    f"an escape in a string must name a character, got {found[0]} "
                    f"at {_place(text, at)}"
                )
            out += chr(code).encode()
    return bytes(out) + body[done:].encode()


def _tokens(text: str) -> Iterator[tuple[str, str, int]]:
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise ValueError(
                f"the text format consists of names, numbers, strings and brackets, got "
                f"{text[at : at + 10]!r} at {_place(text, at)}"
            )
        if found.lastgroup != "space":
            yield str(found.lastgroup), found[0], at
        at = found.end()
    yield "end", "", len(text)


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(_tokens(text))
        self.index = 0

    def peek(self) -> str:
        kind, token, _ = self.tokens[self.index]
        return token if kind == "sign" else kind

    def take(self, *wanted: str) -> tuple[str, int]:
        _, token, at = self.tokens[self.index]
        if wanted and self.peek() not in wanted:
            raise ValueError(
                f"text format needs {' or '.join(wanted)} at {_place(self.text, at)}, "
                f"got {token or 'the end'!r}"
            )
        self.index += 1
        return token, at

    def message(self, closing: str) -> dict[str, list[Any]]:
        fields: dict[str, list[Any]] = {}
        while self.peek() != closing:
            name, _ = self.take("word", closing)
            values = fields.setdefault(name, [])
            colon = self.peek() == ":"
            if colon:
                self.take(":")
            if self.peek() == "[":
                values += self.listed()
            elif self.peek() in _CLOSING:
                values.append(self.block())
            else:
                values.append(self.scalar() if colon else self.take(":", "{")[0])
            if self.peek() in (",", ";"):
                self.take()
        self.take(closing)
        return fields

    def block(self) -> dict[str, list[Any]]:
        opening, _ = self.take("{", "<")
        return self.message(_CLOSING[opening])

    def listed(self) -> list[Any]:
        self.take("[")
        values: list[Any] = []
        while self.peek() != "]":
            values.append(self.block() if self.peek() in _CLOSING else self.scalar())
            if self.peek() != "]":
                self.take(",", "]")
                if self.peek() == "]":
                    self.take("word", "number", "string")
        self.take("]")
        return values

    def scalar(self) -> Any:
        kind = self.peek()
        token, at = self.take("string", "number", "word", "place")
        if kind == "place":
            return Placeholder(token)
        if kind == "word":
            return {"true": True, "false": False}.get(token, Word(token))
        if kind == "number":
            return _number(token)
        raw = _unescape(self.text, at, token[1:-1])
        while self.peek() == "string":
            token, at = self.take()
            raw += _unescape(self.text, at, token[1:-1])
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise ValueError(
                f"a string must be UTF-8, got {raw!r} at {_place(self.text, at)}"
            ) from None


def _number(token: str) -> int | float:
    token = token.replace(" ", "")
    digits = token.lstrip("-").lower()
    sign = -1 if token.startswith("-") else 1
    if digits.startswith("0x"):
        return sign * int(digits, 16)
    if digits.isdigit():
        octal = len(digits) > 1 and digits.startswith("0")
        return sign * int(digits, 8 if octal else 10)
    return sign * float(digits.rstrip("f"))


def loads(text: str) -> dict[str, list[Any]]:
    """Parse `text` into a dict from field names to lists of values, in the file's order.

    A value is a str, int, float, bool, `Word` (an enum value), `Placeholder`, or the dict of a
    message. Raises ValueError with line and column if the text is invalid.
    """
    return _Reader(text).message("end")


def _escaped(found: re.Match[str]) -> str:
    return "\\" + (found[0] if found[0] in '"\\' else f"{ord(found[0]):03o}")


def _scalar(value: object) -> str:
    if isinstance(value, Word | Placeholder):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + _CONTROL.sub(_escaped, value) + '"'
    if isinstance(value, int | float):
        return repr(value)
    raise TypeError(
        f"a value in the text format must be a str, number, bool, Word, mapping or sequence, "
        f"got {type(value).__name__}"
    )


def _lines(fields: Mapping[str, object], margin: str) -> Iterator[str]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield f"{margin}{name} {{"
            yield from _lines(value, margin + "  ")
            yield f"{margin}}}"
        elif isinstance(value, Sequence) and not isinstance(value, str):
            if all(isinstance(one, Mapping) for one in value) and value:
                for one in value:
                    yield from _lines({name: one}, margin)
            else:
                inside = ", ".join(_scalar(one) for one in value)
                yield f"{margin}{name}: [ {inside} ]" if inside else f"{margin}{name}: []"
        else:
            yield f"{margin}{name}: {_scalar(value)}"


def dumps(fields: Mapping[str, object], *, comment: str = "") -> str:
    """Write `fields` in the text format, below the lines of `comment`, each marked with `#`.

    A value is a str, number, bool, `Word`, a mapping (a message), or a sequence of these (a
    repeated field). Raises TypeError for anything else.
    """
    head = [f"# {line}".rstrip() for line in comment.splitlines()]
    return "\n".join([*head, *_lines(fields, ""), ""])


def every(fields: Mapping[str, list[Any]], *path: str) -> list[Any]:
    """Return all values at the end of `path`, through every message on the way; [] if none."""
    at: list[Any] = [fields]
    for name in path:
        at = [v for one in at if isinstance(one, Mapping) for v in one.get(name, [])]
    return at


def first(fields: Mapping[str, list[Any]], *path: str, default: Any = None) -> Any:
    """Return the first value at the end of `path`, or `default`."""
    return next(iter(every(fields, *path)), default)


def parameters(fields: Mapping[str, list[Any]]) -> dict[str, str]:
    """Return the `parameters` of a model configuration as a dict from key to string_value."""
    return {
        str(first(one, "key", default="")): str(first(one, "value", "string_value", default=""))
        for one in every(fields, "parameters")
    }


def schema_error(text: str) -> str:
    """Check `text` against the server's own schema, `inference.ModelConfig`.

    Returns the error, or "". Raises RuntimeError if the package with the schema isn't installed.
    """
    try:
        text_format = importlib.import_module("google.protobuf.text_format")
        schema = importlib.import_module("tritonclient.grpc.model_config_pb2")
    except ImportError as error:
        raise RuntimeError(
            "the schema of config.pbtxt comes with tritonclient, which is not installed; "
            "install labcore[server]"
        ) from error
    try:
        text_format.Parse(text, schema.ModelConfig())
    except text_format.ParseError as error:
        return str(error)
    return ""
