"""EOS, stop texts and max_tokens end an output at the same token, in blocks as one by one."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from labcore.decoding.contract import SamplingConfig
from labcore.decoding.generation import generate, stream
from labcore.decoding.stops import StopMatch, StopTexts
from labcore.models import ByteTokenizer
from tests.decoding.toys import Guess, Toy, plain

BYTES = ByteTokenizer()


class Pieces:
    """Tokens of several characters, as a BPE has."""

    words = ("a", "b", "ab", "bca", "c", "ca", "")

    def decode(self, tokens) -> str:
        return "".join(self.words[token] for token in tokens)


def blocks_of(length: int) -> list[list[int]]:
    """Draft lengths under which an end lies at each place of a block."""
    return [[size, *[length] * 20] for size in range(length + 1)]


def chains(target: Toy, lengths: list[int]) -> Guess:
    return Guess(target, torch.Generator().manual_seed(0), wrong=0.0, lengths=lengths)


@pytest.mark.parametrize("end", [0, 1, 2, 3, 4, 5])
def test_eos_at_every_place_of_a_block(end: int) -> None:
    said = [0, 5, 6, 7, 5, 6, 7, 5, 6, 7, 5, 6]
    said[2 + end] = 9
    target = Toy.script(10, said, eos=(8, 9))
    for lengths, most in product(blocks_of(4), (end, end + 1, end + 2, 9)):
        sampling = SamplingConfig(max_tokens=max(most, 1))
        found = generate(target, [[1, 2]], sampling, proposer=chains(target, lengths))
        expected = said[2 : 2 + sampling.max_tokens]
        if 9 in expected:
            expected = expected[: expected.index(9) + 1]
        assert found.tokens == [expected]
        assert found.finish == ["eos" if 9 in expected else "length"]
        # What was drafted behind the end is neither tried nor accepted: nothing was wrong.
        assert found.statistics.accepted == found.statistics.tried <= len(expected)
        assert found.statistics.tokens == len(expected)
        assert target.cache.rows[0] == [1, 2, *expected][:-1]


@pytest.mark.parametrize("stop", ["c", "bc", "abc", "ca", "é", "é!", "\u20ac"])
def test_a_stop_text_at_every_place_of_a_block(stop: str) -> None:
    text = "abab" + "abcabé!\u20acc" * 2
    prompt = BYTES.encode("x")
    target = Toy.script(257, [0, *BYTES.encode(text), *[256] * 9], eos=(256,))
    for lengths, most in product(blocks_of(5), range(1, 18)):
        sampling = SamplingConfig(max_tokens=most, stop=("zz", stop))
        proposer = chains(target, lengths)
        found = generate(target, [prompt], sampling, proposer=proposer, tokenizer=BYTES)
        tokens, finish, said = plain(target, prompt, sampling, BYTES)
        assert (found.tokens[0], found.finish[0], found.texts[0]) == (tokens, finish, said)
        cut = len(BYTES.encode(text[: text.index(stop) + len(stop)]))
        assert finish == ("stop" if most >= cut else "length")
        if finish == "stop":
            assert found.texts[0] == text[: text.index(stop)]


@pytest.mark.parametrize("children", [1, 3])
@pytest.mark.parametrize("trial", range(25))
def test_random_texts_end_as_in_the_plain_loop(children: int, trial: int, seed: int) -> None:
    """Tokens of several characters, an empty one, several stops, EOS; some stops span blocks."""
    seed += trial
    generator = torch.Generator().manual_seed(seed)
    target = Toy.random(7, seed, eos=(6,) if trial % 3 == 0 else (), spread=4.0)
    letters = [("abc"[i]) for i in torch.randint(3, (12,), generator=generator).tolist()]
    stops = ("".join(letters[:2]), "".join(letters[2:6]), "".join(letters[6:9]))
    sampling = SamplingConfig(
        stop=stops[: 1 + trial % 3], max_tokens=3 + trial, seed=seed, temperature=trial % 2 * 1.0
    )
    prompts = [[1], [2, 3], [0, 4, 5]]
    tokenizer = Pieces()
    # At a temperature an empty draft draws what the plain loop draws.
    proposer = None if trial % 2 else Guess(target, generator, children=children)
    found = generate(target, prompts, sampling, proposer=proposer, tokenizer=tokenizer)
    for row, prompt in enumerate(prompts):
        tokens, finish, said = plain(target, prompt, sampling, tokenizer)
        assert (found.tokens[row], found.finish[row], found.texts[row]) == (tokens, finish, said)
        assert not any(stop in found.texts[row] for stop in sampling.stop)
        assert found.per_row[row].tokens == len(tokens)


@pytest.mark.parametrize("trial", range(20))
def test_a_stream_takes_nothing_back(trial: int, seed: int) -> None:
    seed += trial
    target = Toy.random(6, seed, spread=4.0)
    generator = torch.Generator().manual_seed(seed)
    letters = ["abc"[i] for i in torch.randint(3, (5,), generator=generator).tolist()]
    sampling = SamplingConfig(stop=("".join(letters), "cc"), max_tokens=20)
    tokenizer = Pieces()
    proposer = Guess(target, generator)
    whole = plain(target, [1], sampling, tokenizer)[0]
    sent: list[int] = []
    blocks = stream(target, [1], sampling, proposer=proposer, tokenizer=tokenizer)
    for block in blocks:
        assert block
        sent += block
        assert whole[: len(sent)] == sent
    assert sent == whole


def test_a_stream_holds_back_what_may_begin_a_stop() -> None:
    """Of "abxabcab" with the stop "abcd" the first "ab" is held until the x is known."""
    text = "abxabcabéabcdab"
    target = Toy.script(257, [0, *BYTES.encode(text), *[256] * 9], eos=(256,))
    sampling = SamplingConfig(stop=("abcd",), max_tokens=17)
    blocks = list(stream(target, [1], sampling, tokenizer=BYTES))
    assert [BYTES.decode(block) for block in blocks] == ["abx", "abc", "ab" + "é"]
    whole = SamplingConfig(stop=("abcd",), max_tokens=7)
    ended = list(stream(target, [1], whole, tokenizer=BYTES))
    assert [BYTES.decode(block) for block in ended] == ["abx", "abca"]  # the end lets go


def test_the_first_completed_stop_ends_the_output() -> None:
    """One by one "bc" is complete before "abcd" is, so a block must not take the earlier begin."""
    stops = StopTexts(("abcd", "bc"), BYTES)
    assert stops.match(BYTES.encode("xabcd"), 5) == StopMatch(read=4, kept=2, characters=2)
    # The same token completes both: the one that begins first.
    stops = StopTexts(("c", "abc"), BYTES)
    assert stops.match(BYTES.encode("xabcd"), 2) == StopMatch(read=4, kept=1, characters=1)
    assert stops.match(BYTES.encode("xab"), 3) is None


def test_token_with_a_stop_inside_is_kept_and_its_text_is_cut() -> None:
    stops = StopTexts(("c",), Pieces())
    assert stops.match([0, 3, 1], 3) == StopMatch(read=2, kept=2, characters=2)  # a|bca|b
    target = Toy.script(7, [0, 0, 3, 1, 1, 1])
    sampling = SamplingConfig(stop=("c",), max_tokens=3)
    found = generate(target, [[1]], sampling, tokenizer=Pieces())
    assert (found.tokens, found.texts, found.finish) == ([[0, 3]], ["ab"], ["stop"])


def test_half_a_character_is_no_text_yet() -> None:
    euro = BYTES.encode("a\u20ac")
    stops = StopTexts(("\u20ac",), BYTES)
    assert [stops.match(euro[:size], 1) for size in (1, 2, 3)] == [None] * 3
    assert stops.match(euro, 1) == StopMatch(read=4, kept=1, characters=1)
    # A character before the stop is kept with all of its bytes.
    after = StopTexts(("!",), BYTES)
    assert after.match(BYTES.encode("\u20ac!"), 1) == StopMatch(read=4, kept=3, characters=1)
    assert [after.settled(BYTES.encode("\u20ac")[:size]) for size in (1, 2, 3)] == [0, 0, 3]


def test_a_stop_in_the_prompt_is_none() -> None:
    target = Toy.script(257, [0, 0, *BYTES.encode("bab"), *[256] * 4])
    sampling = SamplingConfig(stop=("ab",), max_tokens=3)
    found = generate(target, [BYTES.encode("aa")], sampling, tokenizer=BYTES)
    assert (found.texts, found.finish) == (["b"], ["stop"])


def test_eos_comes_before_a_stop_and_a_stop_before_length() -> None:
    target = Toy.script(257, [0, *BYTES.encode("ab"), 256, 256], eos=(256,))
    for most, stop, finish in ((2, "b", "stop"), (3, "zz", "eos"), (2, "zz", "length")):
        for lengths in blocks_of(3):
            found = generate(
                target, [[1]], SamplingConfig(max_tokens=most, stop=(stop,)),
                proposer=chains(target, lengths), tokenizer=BYTES,
            )  # fmt: skip
            assert found.finish == [finish]
    assert found.texts == ["ab"]
