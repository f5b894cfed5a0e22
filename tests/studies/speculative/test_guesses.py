"""Who guessed each token: a record that today's models repeat, and rules that hold for any text."""

import json
import random

import pytest

from labcore import decoding, models
from labcore.studies.speculative import guesses


@pytest.fixture(scope="module")
def pair():
    return models.pretrained("target"), models.pretrained("draft")


def test_the_recorded_forty_are_those_of_the_shipped_models(pair, seed: int) -> None:
    kept = json.loads(guesses.FILE.read_text("utf-8"))
    remedy = "run python -m labcore.studies.speculative.guesses"
    assert kept["models"] == guesses.model_hashes(), f"a shipped model has changed: {remedy}"
    recorded, asked = guesses.forty(), guesses.prompts()
    assert len(recorded) == 40 and list(recorded) == list(asked)
    for name, ways in recorded.items():
        assert len(ways) == 6
        for one in ways.values():
            assert len(one.who) == len(one.tokens) > 0 and set(one.who) <= set("tdn"), name
    name = random.Random(seed).choice(list(asked))
    for guesser in guesses.GUESSERS:
        again = guesses.write(*pair, asked[name], guesser)
        # Another CPU may decide a near tie differently, and from there on the text is another.
        one, pairs = recorded[name][f"{guesser}, 0"], zip(again.tokens, again.who, strict=True)
        same = next(
            (i for i, (old, new) in enumerate(zip(one.tokens, again.tokens, strict=False))
             if old != new), len(one.tokens),
        )  # fmt: skip
        assert list(pairs)[:same] == list(zip(one.tokens, one.who, strict=True))[:same]
        assert same > 0


@pytest.mark.parametrize("guesser", guesses.GUESSERS)
def test_the_text_is_the_targets_own_and_each_step_is_counted(pair, guesser: str) -> None:
    prompt = models.prompts("code")[4]
    found = guesses.write(*pair, prompt, guesser, tokens=21)
    tokenizer = models.shipped_tokenizer()
    given = tokenizer.encode(prompt)[-guesses.TAIL :]
    asked = decoding.SamplingConfig(max_tokens=21)
    assert "".join(found.tokens) == tokenizer.decode(
        decoding.generate(pair[0], [given], asked).tokens[0], special=True
    )
    assert len(found.who) == 21 and found.prompt == tokenizer.decode(given)
    ways = {"draft model": set("dt"), "n-grams": set("nt"), "n-grams first": set("dnt")}
    assert set(found.who) <= ways[guesser]
    assert "dddddd" not in found.who and "nnnnn" not in found.who  # four guesses per step


def test_what_cannot_be_written_is_refused(pair) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        guesses.write(*pair, "")
    with pytest.raises(ValueError, match="guesser must be one of"):
        guesses.write(*pair, "x", "an oracle")
    either = guesses.Either(decoding.NGram(3, 1), decoding.NoProposer())
    with pytest.raises(ValueError, match="one row"):
        either.propose([[1], [2]], [], [], [])
