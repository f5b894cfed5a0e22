"""The server answers as the API says, to this machine alone, and outlives its clients."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from typing import Any

import openai
import pytest

from labcore.decoding import SamplingConfig, generate
from labcore.models import ByteTokenizer, pretrained, shipped_tokenizer
from labcore.serving import Engine
from labcore.serving import http as served
from labcore.serving.engine.outputs import Output
from labcore.serving.engine.scheduler import QueueFull
from labcore.serving.engine.service import Service
from labcore.serving.http import Server, running
from labcore.serving.http.handlers import LARGEST, Marks

PROMPT = "def area(width, height):\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    engine = Engine(pretrained("draft"), shipped_tokenizer(), proposer="ngram")
    with running(Server(engine=engine, name="mine")) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=server.token)


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.005)


def alone(**sampling: Any) -> str:
    """What the model says when nobody else asks."""
    model, tokenizer = pretrained("draft"), shipped_tokenizer()
    asked = SamplingConfig(**sampling)
    found = generate(model, [tokenizer.encode(PROMPT)], asked, tokenizer=tokenizer)
    assert found.texts is not None
    return found.texts[0]


def ask(server: Server, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    """Post a body, and return the status and the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    sent = {"Authorization": f"Bearer {server.token}", **headers}
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", "/v1/completions", text, sent)
    answer = connection.getresponse()
    told = json.loads(answer.read())
    connection.close()
    return answer.status, told


def stream(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Post a body with stream, and return the choices of all chunks."""
    headers = {"Authorization": f"Bearer {server.token}"}
    asked = json.dumps({**body, "stream": True})
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        connection.request("POST", "/v1/completions", asked, headers)
        lines = connection.getresponse().read().decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]


def test_the_client_library_gets_what_the_model_says_alone(client: openai.OpenAI) -> None:
    wanted = alone(max_tokens=40)
    found = client.completions.create(model="mine", prompt=PROMPT, max_tokens=40, temperature=0)
    assert found.choices[0].text == wanted
    assert found.usage is not None and found.usage.total_tokens == found.usage.prompt_tokens + (
        found.usage.completion_tokens
    )
    parts = list(
        client.completions.create(
            model="mine",
            prompt=PROMPT,
            max_tokens=40,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(one.choices[0].text for one in parts[:-1]) == wanted
    assert parts[-1].usage == found.usage and not parts[-1].choices
    assert parts[-2].choices[0].finish_reason == found.choices[0].finish_reason


def test_a_seed_gives_the_same_text_again_and_stops_end_it(client: openai.OpenAI) -> None:
    one, two = (
        client.completions.create(model="mine", prompt=PROMPT, max_tokens=30, seed=7)
        for _ in range(2)
    )
    assert one.choices[0].text == two.choices[0].text == alone(max_tokens=30, temperature=1, seed=7)
    whole = alone(max_tokens=30)
    stop = whole.split()[1]
    stopped = client.completions.create(
        model="mine", prompt=PROMPT, max_tokens=30, temperature=0, stop=[stop]
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == whole.partition(stop)[0]


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [one.id for one in client.models.list()] == ["mine"]


def test_many_at_once_get_each_their_own(client: openai.OpenAI) -> None:
    def one(seed: int) -> str:
        found = client.completions.create(model="mine", prompt=PROMPT, max_tokens=24, seed=seed)
        return found.choices[0].text

    with ThreadPoolExecutor(12) as pool:
        texts = list(pool.map(one, range(12)))
    assert texts == [alone(max_tokens=24, temperature=1, seed=seed) for seed in range(12)]


def test_a_stream_says_what_a_draft_had_guessed(server: Server) -> None:
    prompt, tokenizer = "a, b, c, a, b, c, a, b, c, a,", shipped_tokenizer()
    engine = Engine(pretrained("draft"), tokenizer, proposer="ngram")
    engine.submit(prompt, SamplingConfig(max_tokens=24))
    wanted = []
    while not engine.idle:
        for output in engine.step():
            for token, guessed in zip(output.tokens, output.guessed, strict=True):
                wanted += [(letter, guessed) for letter in tokenizer.decode([token])]
    parts = stream(server, {"model": "mine", "prompt": prompt, "max_tokens": 24, "temperature": 0})
    told = [(letter, one["guessed"]) for one in parts[:-1] for letter in one["text"]]
    assert told == wanted and {guessed for _, guessed in told} == {True, False}
    assert parts[-1] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}


def test_a_character_of_two_tokens_is_the_first_one_s() -> None:
    tokens = [*"日a".encode(), *"é".encode(), 0xE6]
    marks = Marks(ByteTokenizer())
    say = lambda tokens, guessed, text: marks.split(  # noqa: E731
        Output(id="1", tokens=tuple(tokens), guessed=tuple(guessed), text=text)
    )
    assert say(tokens[:2], [False, True], "") == []  # the character isn't whole
    assert say(tokens[2:5], [True, True, True], "日a") == [("日", False), ("a", True)]
    assert say(tokens[5:], [False, False], "é\ufffd") == [("é", True), ("\ufffd", False)]


@pytest.mark.parametrize(
    ("body", "status", "param", "said"),
    [
        (b"{", 400, None, "must be JSON"),
        (b"[" * 100_000, 400, None, "must be JSON"),
        ([], 400, None, "must be a JSON object, got list"),
        ({"model": "other", "prompt": "a"}, 404, "model", "must be 'mine', got 'other'"),
        ({"model": "mine"}, 400, "prompt", "list of tokens, got None"),
        ({"model": "mine", "prompt": ["a", "b"]}, 400, "prompt", "got a list of 2"),
        ({"model": "mine", "prompt": ""}, 400, "prompt", "list of tokens, got ''"),
        ({"model": "mine", "prompt": {}}, 400, "prompt", "got {}"),
        ({"model": "mine", "prompt": 5}, 400, "prompt", "got 5"),
        ({"model": "mine", "prompt": [99_999]}, 400, "prompt", "between 0 and 2047"),
        ({"model": "mine", "prompt": "a", "n": 2}, 400, "n", "n must be 1 here, got 2"),
        (
            {"model": "mine", "prompt": "a", "echo": True},
            400,
            "echo",
            "echo must be false here, got true",
        ),
        ({"model": "mine", "prompt": "a", "colour": 1}, 400, "colour", "not a field"),
        ({"model": "mine", "prompt": "a", "stream": "yes"}, 400, "stream", "true or false"),
        ({"model": "mine", "prompt": "a", "max_tokens": 0}, 400, "max_tokens", "at least 1"),
        ({"model": "mine", "prompt": "a", "max_tokens": 1.5}, 400, "max_tokens", "a whole number"),
        ({"model": "mine", "prompt": "a", "top_p": 2}, 400, "top_p", "from 0 to 1, got 2"),
        ({"model": "mine", "prompt": "a", "top_p": 0}, 400, "top_p", "above 0"),
        ({"model": "mine", "prompt": "a", "temperature": "hot"}, 400, "temperature", "number"),
        ({"model": "mine", "prompt": "a", "temperature": [1]}, 400, "temperature", "number"),
        ({"model": "mine", "prompt": "a", "temperature": True}, 400, "temperature", "number"),
        (
            {"model": "mine", "prompt": "a", "seed": 2**70},
            400,
            "seed",
            "from -9223372036854775808 to",
        ),
        ({"model": "mine", "prompt": "a", "stop": 5}, 400, "stop", "stop must be"),
        ({"model": "mine", "prompt": "a", "stop": [1]}, 400, "stop", "stop must be"),
        ({"model": "mine", "prompt": "a", "stop": ["a"] * 5}, 400, "stop", "up to four"),
        ({"model": "mine", "prompt": "a", "stream_options": {}}, 400, "stream_options", "stream"),
        (b" " * (LARGEST + 1), 413, None, "at most 1,048,576 bytes"),
    ],
)
def test_a_bad_request_is_refused_in_the_api_s_form(
    server: Server, body: Any, status: int, param: str | None, said: str
) -> None:
    found, told = ask(server, body)
    assert found == status and told.keys() == {"error"}
    assert told["error"]["param"] == param and said in told["error"]["message"]
    assert told["error"]["type"] == "invalid_request_error"


def test_what_fills_the_context_is_served_and_one_token_more_is_refused(
    server: Server, client: openai.OpenAI
) -> None:
    room = server.engine.max_length + 1 - 3
    full = client.completions.create(model="mine", prompt=[[5] * room], max_tokens=3)
    assert full.usage is not None and full.usage.prompt_tokens == room
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="mine", prompt=[[5] * (room + 1)], max_tokens=3)
    assert caught.value.code == "context_length_exceeded"


def test_without_a_seed_each_answer_is_drawn_anew(client: openai.OpenAI) -> None:
    texts = [
        client.completions.create(model="mine", prompt=PROMPT, max_tokens=40).choices[0].text
        for _ in range(3)
    ]
    assert len(set(texts)) == 3


def test_strangers_are_refused(server: Server, client: openai.OpenAI) -> None:
    body = {"model": "mine", "prompt": "a"}
    for headers in ({"Authorization": "Bearer wrong"}, {"Authorization": ""}):
        status, told = ask(server, body, **headers)
        assert status == 401 and told["error"]["code"] == "invalid_api_key"
    # A page of another site, under a name of its own or by what a browser lets it send.
    for header, stranger in (("Host", "evil.example"), ("Origin", "null"), ("Origin", "http://a")):
        status, told = ask(server, body, **{header: stranger})
        assert status == 403 and f"{header.lower()} must be" in told["error"]["message"]
    assert ask(server, body, Origin=f"http://127.0.0.1:{server.port}")[0] == 200
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    assert server._socket.getsockname()[0] == "127.0.0.1"  # other machines can't connect


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/completions", 405), ("POST", "/v1/chat/completions", 404), ("PUT", "/", 405)],
)
def test_what_is_not_there_is_said_in_the_api_s_form(
    server: Server, method: str, path: str, status: int
) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        connection.request(method, path, b"{}", {"Authorization": f"Bearer {server.token}"})
        answer = connection.getresponse()
        told = json.loads(answer.read())
    assert answer.status == status and told["error"]["type"] == "invalid_request_error"


def admitted(server: Server) -> int:
    return sum(len(record.admitted) for record in server.engine.trace)


def leave(server: Server, **asked: Any) -> None:
    """Ask for a long answer, and leave after its first bytes, or at once if there's no stream."""
    asked = {"model": "mine", "prompt": PROMPT, "max_tokens": 900, "temperature": 0, **asked}
    body = json.dumps(asked)
    head = f"POST /v1/completions HTTP/1.1\r\nAuthorization: Bearer {server.token}\r\n"
    head += f"Host: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    known = admitted(server)
    with socket.create_connection(("127.0.0.1", server.port)) as end:
        end.sendall((head + body).encode())
        if asked.get("stream"):
            assert end.recv(10)
        else:
            until(lambda: admitted(server) > known)


def test_a_client_that_leaves_is_forgotten_and_others_go_on(
    server: Server, client: openai.OpenAI, capfd: pytest.CaptureFixture[str]
) -> None:
    before = server.engine.counters.finished.get("cancelled", 0)
    for streams in (True, False, True):
        leave(server, stream=streams)
    found = client.completions.create(model="mine", prompt=PROMPT, max_tokens=20, temperature=0)
    assert found.choices[0].text == alone(max_tokens=20)
    until(lambda: server.engine.counters.finished.get("cancelled", 0) == before + 3)
    until(lambda: not server.engine.pool.held)
    assert capfd.readouterr().err == ""


class Held(Engine):
    """Takes no step before it is let go."""

    go = threading.Event()

    def step(self) -> list[Output]:
        assert self.go.wait(60)
        return super().step()


def test_requests_share_a_batch_and_too_many_are_asked_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("labcore.serving.http.server.MOST", 3)
    engine = Held(pretrained("draft"), shipped_tokenizer())
    body = {"model": "mine", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    with running(Server(engine=engine, name="mine")) as server, ThreadPoolExecutor(5) as pool:
        ended = as_completed([pool.submit(ask, server, body) for _ in range(5)])
        refused = [next(ended).result() for _ in range(2)]
        engine.go.set()
        answered = [one.result() for one in ended]

        def full(*_: Any) -> None:
            raise QueueFull("at most 9 requests may wait")

        monkeypatch.setattr(Service, "submit", full)
        refused.append(ask(server, body))
    assert [status for status, _ in refused] == [429] * 3
    assert {told["error"]["code"] for _, told in refused} == {"rate_limit_exceeded"}
    texts = [told["choices"][0]["text"] for _, told in answered]
    assert texts == [alone(max_tokens=12)] * 3
    assert max(len(record.decodes) for record in engine.trace) == 3


@pytest.mark.long
def test_what_a_killed_server_leaves_stops_no_other() -> None:
    code = (
        "import asyncio, sys; from labcore.models import pretrained, shipped_tokenizer; "
        "from labcore.serving import Engine; from labcore.serving.http import Server; "
        "engine = Engine(pretrained('draft'), shipped_tokenizer()); "
        "server = Server(engine=engine, name='mine', port=int(sys.argv[1]), token='t'); "
        "asyncio.run(server.run(lambda: print(server.port, flush=True)))"
    )
    port = 0
    for _ in range(2):
        command = [sys.executable, "-c", code, str(port)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
            assert started.stdout is not None
            port = int(started.stdout.readline())
            with socket.create_connection(("127.0.0.1", port)) as end:
                end.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert end.recv(12) == b"HTTP/1.1 200"
                started.kill()


def test_an_engine_s_error_reaches_the_client(
    server: Server, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no memory")

    body = {"model": "mine", "prompt": PROMPT}
    with monkeypatch.context() as broken:
        broken.setattr(server.engine.runner, "run", fail)
        status, told = ask(server, body)
        assert status == 500 and told["error"]["type"] == "server_error"
        assert told["error"]["message"] == "ValueError: no memory"
        with pytest.raises(openai.APIError, match="no memory"):
            list(client.completions.create(stream=True, **body))
        with pytest.raises(RuntimeError, match="no memory"):
            served.ask(server, PROMPT)
    assert ask(server, body)[0] == 200


def test_the_page_needs_no_token_and_holds_none(server: Server) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
        connection.request("GET", "/")
        answer = connection.getresponse()
        page = answer.read().decode()
    assert answer.status == 200 and "/v1/completions" in page and server.token not in page
    assert server.address == f"http://127.0.0.1:{server.port}/#token={server.token}"


def test_the_printed_command_gets_an_answer(server: Server) -> None:
    told = json.loads(subprocess.check_output(["sh", "-c", server.example], text=True))
    assert told["object"] == "text_completion" and told["usage"]["completion_tokens"] > 0
