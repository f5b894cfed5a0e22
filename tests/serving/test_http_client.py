"""The client gets what the engine writes, piece by piece, and the API's refusals as errors."""

from __future__ import annotations

import urllib.error
import urllib.request
from dataclasses import replace

import pytest

from labcore.decoding import SamplingConfig, generate
from labcore.models import pretrained, shipped_tokenizer
from labcore.serving import Engine
from labcore.serving.http import Server, ask, running
from labcore.serving.http.client import Answer

PROMPT = "def area(width, height):\n"


def test_a_server_in_a_thread_answers_and_ends_with_its_block() -> None:
    model, tokenizer = pretrained("draft"), shipped_tokenizer()
    made = Server(engine=Engine(model, tokenizer, proposer="ngram"), name="mine")
    with running(made) as server:
        answer = ask(server, PROMPT, max_tokens=40, temperature=0)
        with pytest.raises(RuntimeError, match="at most"):
            ask(server, PROMPT, max_tokens=10_000)
    greedy = SamplingConfig(max_tokens=40)
    alone = generate(model, [tokenizer.encode(PROMPT)], greedy, tokenizer=tokenizer)
    assert alone.texts == [answer.text] and answer.tokens == 40
    assert len(answer.pieces) < 40 and 0 < answer.waited < answer.seconds
    assert {guessed for _, guessed in answer.pieces} == {True, False}
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{made.port}/", timeout=5)


def test_an_answer_shows_what_was_guessed() -> None:
    pieces = (("a<", True), ("b", True), ("c", False))
    answer = Answer(prompt="p&", pieces=pieces, tokens=3, waited=0.1, seconds=0.2)
    assert answer._repr_html_().endswith("><b>p&amp;</b><mark>a&lt;b</mark>c</pre>")
    long = replace(answer, pieces=(("\n" * 20, True), ("x", False)))
    assert long._repr_html_().endswith("</b><mark>" + "\n" * 11 + "</mark>…</pre>")


def test_a_failure_in_the_block_ends_the_server_too() -> None:
    made = Server(engine=Engine(pretrained("draft"), shipped_tokenizer()), name="mine")
    with pytest.raises(ZeroDivisionError), running(made):
        _ = 1 // 0
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{made.port}/", timeout=5)
