"""What answers a request: who may ask, the page, the model's card, and completions."""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import resources
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tornado import web
from tornado.httpserver import HTTPServer
from tornado.iostream import StreamClosedError

from labcore.decoding.stops import TextDecoder
from labcore.serving.engine.outputs import Detokenizer, Output
from labcore.serving.engine.scheduler import QueueFull
from labcore.serving.engine.service import Service, Stream
from labcore.serving.http.api import Asked, Refused, completion, parse

if TYPE_CHECKING:
    from labcore.serving.http.server import Server

__all__ = ["Marks"]

HOSTS = {"127.0.0.1", "localhost"}
LARGEST = 1 << 20  # bytes of a body; tornado refuses what is 16 times larger in its own words


def listen(server: Server, service: Service, at: socket.socket, *, most: int) -> HTTPServer:
    """Answer the connections of a listening socket; most: requests under way."""
    routes = [
        ("/", _Page),
        ("/v1/models", _Models),
        ("/v1/completions", _Completions),
        (".*", _Nowhere),
    ]
    application = web.Application(
        routes,
        server=server,
        service=service,
        tokenizer=server.engine.tokenizer,
        slots=asyncio.Semaphore(most),
        most=most,
        log_function=lambda _: None,
    )
    http = HTTPServer(application, max_body_size=16 * LARGEST)
    http.add_sockets([at])
    return http


class Marks:
    """Splits an output's text where the tokens that a draft had guessed begin and end.

    A character of several tokens counts as the first one's.
    """

    def __init__(self, tokenizer: TextDecoder) -> None:
        self._text, self._tokens = Detokenizer(tokenizer), list[int]()
        self._marks, self._told = list[bool](), 0  # of the characters of all tokens so far

    def split(self, output: Output) -> list[tuple[str, bool]]:
        """Return what is new in the text in pieces, each with whether a draft had guessed it."""
        for token, guessed in zip(output.tokens, output.guessed, strict=True):
            self._tokens.append(token)
            length = len(self._text.decode(self._tokens))
            self._marks += [guessed] * (length - len(self._marks))
        marks = self._marks[self._told :][: len(output.text)]
        self._told += len(output.text)
        pieces, begin = [], 0
        for guessed, run in groupby(marks):
            end = begin + len(list(run))
            pieces.append((output.text[begin:end], guessed))
            begin = end
        return pieces


class _Handler(web.RequestHandler):
    """Checks whether a page of another site asks, and writes errors in the API's form."""

    @property
    def server(self) -> Server:
        found: Server = self.settings["server"]
        return found

    def prepare(self) -> None:
        # Another site may send requests here under a name of its own, or from its page.
        if self.request.host_name not in HOSTS:
            raise Refused(
                f"host must be 127.0.0.1 or localhost, got {self.request.host_name!r}", status=403
            )
        own = f"http://{self.request.host}"
        if (origin := self.request.headers.get("Origin", own)) != own:
            raise Refused(f"origin must be {own}, got {origin!r}", status=403)

    def log_exception(self, *about: Any) -> None:
        if not isinstance(about[1], Refused | web.HTTPError):
            super().log_exception(*about)

    def write_error(self, status_code: int, **about: Any) -> None:
        problem = about.get("exc_info", (None, None))[1]
        if not isinstance(problem, Refused):
            problem = Refused(self._reason, status=status_code)
        self.set_status(problem.status)
        self.finish(problem.body)


class _Page(_Handler):
    """The page holds no secret, so anyone on this machine may have it."""

    def get(self) -> None:
        policy = "default-src 'self' 'unsafe-inline' data:; frame-ancestors 'none'"
        self.set_header("Content-Security-Policy", policy)
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.finish(resources.files(__package__ or "").joinpath("page.html").read_bytes())


class _Private(_Handler):
    """Asks for the token."""

    def prepare(self) -> None:
        super().prepare()
        given = self.request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.server.token.encode()):
            raise Refused(
                "the request must carry the server's token, as `Authorization: Bearer <token>`",
                status=401,
                code="invalid_api_key",
            )


class _Nowhere(_Private):
    def prepare(self) -> None:
        super().prepare()
        raise Refused(f"there is no {self.request.path}; see /v1/completions", status=404)


class _Models(_Private):
    def get(self) -> None:
        # max_model_len, of prompt and output, is vLLM's addition to the API; the page takes both.
        server = self.server
        one = {"id": server.name, "object": "model", "created": 0, "owned_by": "you"}
        card = {**one, "max_model_len": server.engine.max_length + 1, "example": server.prompt}
        self.finish({"object": "list", "data": [card]})


class _Completions(_Private):
    stream: Stream | None = None
    left = False

    async def post(self) -> None:
        asked, slots = self._asked(), self.settings["slots"]
        if slots.locked():
            raise _too_many(
                f"{self.settings['most']} requests are already under way; try again later"
            )
        async with slots:
            stream, prompt = await self._in_thread(self._submitted, asked)
            with suppress(StreamClosedError):  # the client has left
                await self._answer(asked, stream, prompt)

    def on_connection_close(self) -> None:
        self.left = True
        if self.stream is not None:
            self.stream.cancel()

    def _asked(self) -> Asked:
        if len(self.request.body) > LARGEST:
            raise Refused(f"the body must have at most {LARGEST:,} bytes", status=413)
        try:
            body = json.loads(self.request.body)
        except (ValueError, RecursionError) as problem:
            raise Refused(f"the body must be JSON: {problem}") from None
        return parse(body, model=self.server.name)

    async def _in_thread(self, act: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, act, *arguments)

    def _submitted(self, asked: Asked) -> tuple[Stream, int]:
        """Submit the request, and return its stream and the number of its prompt's tokens."""
        engine, most = self.server.engine, asked.sampling.max_tokens
        try:
            tokens = engine.tokens_of(asked.prompt)
            if len(tokens) + most > engine.max_length + 1:
                raise Refused(
                    f"prompt and max_tokens together must be at most {engine.max_length + 1} "
                    f"tokens, got {len(tokens)} and {most}",
                    param="prompt" if len(tokens) > most else "max_tokens",
                    code="context_length_exceeded",
                )
            self.stream = stream = self.settings["service"].submit(tokens, asked.sampling)
        except QueueFull as problem:
            raise _too_many(str(problem)) from None
        except (TypeError, ValueError) as problem:
            field = "stop" if str(problem).startswith("stop") else "prompt"
            raise Refused(str(problem), param=field) from None
        except RuntimeError as problem:  # the service has closed
            raise Refused(str(problem), status=503) from None
        if self.left:
            stream.cancel()
        return stream, len(tokens)

    async def _answer(self, asked: Asked, stream: Stream, prompt: int) -> None:
        told = {"id": stream.id, "model": self.server.name, "created": int(time.time())}
        marks, text, count, finish = Marks(self.settings["tokenizer"]), "", 0, ""
        if asked.stream:
            self.set_header("Content-Type", "text/event-stream")
            self.set_header("Cache-Control", "no-cache")
        while not finish:
            output: Output = await self._in_thread(next, stream)
            text, count, finish = text + output.text, count + len(output.tokens), output.finish
            if asked.stream:
                for piece, guessed in marks.split(output):
                    await self._send(completion(told, piece, guessed=guessed))
        if self.left:
            return
        if finish in ("cancelled", "error"):
            failed = Refused(output.reason or "the server has stopped", status=500)
            if not asked.stream:
                raise failed
            await self._send(failed.body)
        elif not asked.stream:
            self.finish(completion(told, text, finish, usage=(prompt, count)))
            return
        else:
            await self._send(completion(told, "", finish))
            if asked.usage:
                await self._send(completion(told, None, usage=(prompt, count)))
        self.write("data: [DONE]\n\n")
        await self.finish()

    async def _send(self, told: dict[str, Any]) -> None:
        self.write(f"data: {json.dumps(told)}\n\n")
        await self.flush()


def _too_many(message: str) -> Refused:
    return Refused(message, status=429, code="rate_limit_exceeded")
