"""An output's text, decoded step by step, is that of all its tokens decoded at once."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import tokenizers
from tokenizers import decoders, models

from labcore.decoding import SamplingConfig
from labcore.models import ByteTokenizer, Tokenizer, shipped_tokenizer
from labcore.serving.engine.engine import Engine
from labcore.serving.engine.outputs import Detokenizer
from tests.serving.tiny import BYTES, alone, mixed, run, tiny

TEXT = "Grüße, 日本語 — naïve 🙂🙃 \u200d x\u0301  two\n\n  spaces �"


class Counts:
    """A tokenizer that says how many tokens it was given."""

    def __init__(self, inner) -> None:
        self.inner, self.seen = inner, 0

    def decode(self, tokens) -> str:
        self.seen += len(tokens)
        return self.inner.decode(tokens)


def sentencepiece() -> Tokenizer:
    """As Llama 2's: spaces as U+2581, one dropped at the beginning, bytes for what is unknown."""
    words = ["<unk>", "▁", "▁a", "b", "▁▁", "é"]
    vocab = {word: place for place, word in enumerate(words)}
    vocab |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    inner = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(inner)


@pytest.mark.parametrize("kind", ["bytes", "shipped", "sentencepiece"])
def test_every_beginning_reads_as_when_decoded_at_once(seed: int, kind: str) -> None:
    chance = random.Random(seed)
    made = {"bytes": ByteTokenizer, "shipped": shipped_tokenizer, "sentencepiece": sentencepiece}
    tokenizer = made[kind]()
    for _ in range(150):
        noise = [chance.randrange(tokenizer.vocab_size) for _ in range(chance.randrange(30))]
        if kind == "sentencepiece":
            said = [6 + byte for byte in TEXT.encode()] + [1, 2, 3, 4, 1, 5] * 3
            chance.shuffle(said) if chance.random() < 0.5 else None
        else:
            said = tokenizer.encode(TEXT)
        row = noise + said + noise[::-1]
        detokenizer, end = Detokenizer(tokenizer), 0
        while end < len(row):
            end = min(end + chance.randint(1, 4), len(row))
            assert detokenizer.decode(row[:end]) == tokenizer.decode(row[:end])
            if chance.random() < 0.2:  # as stop texts ask
                shorter = chance.randint(0, end)
                assert detokenizer.decode(row[:shorter]) == tokenizer.decode(row[:shorter])
        row[chance.randrange(len(row))] = 0  # another output: nothing of the first stays
        assert detokenizer.decode(row) == tokenizer.decode(row)


@pytest.mark.parametrize("kind", ["bytes", "shipped"])
def test_a_step_decodes_a_few_tokens(seed: int, kind: str) -> None:
    tokenizer = Counts(ByteTokenizer() if kind == "bytes" else shipped_tokenizer())
    row = tokenizer.inner.encode(TEXT) * 20
    detokenizer = Detokenizer(tokenizer)
    for end in range(1, len(row) + 1):
        detokenizer.decode(row[:end])
    assert tokenizer.seen < 16 * len(row)  # all of it at each step would be len(row) / 2 a token


class Spells:
    """Two tokens a character of two bytes; four tokens for one of four."""

    def decode(self, tokens) -> str:
        return bytes(token % 256 for token in tokens).decode("utf-8", errors="replace")


def test_no_half_character_is_said_and_none_is_lost(seed: int) -> None:
    """The model is made to spell a text: its outputs add up to it, in whole characters."""
    data = TEXT.replace("�", "").encode()
    engine = Engine(tiny(seed, eos_token_ids=()), Spells())
    whole = engine.runner.run

    def spell(segments, wanted):
        logits, hidden = whole(segments, wanted)
        logits[0, data[segments[0].end - 3]] = 1e6
        return logits, hidden

    engine.runner.run = spell
    engine.submit([1, 2, 3], SamplingConfig(max_tokens=len(data)))
    said = []
    while not engine.idle:
        said += [output.text for output in engine.step()]
    assert "".join(said) == data.decode()
    assert not any("\ufffd" in text for text in said)


def test_stop_texts_of_several_tokens(seed: int) -> None:
    model, chance = tiny(seed, eos_token_ids=()), random.Random(seed)
    asked = []
    for prompt, one in mixed(chance, 12, most=30):
        plain = replace(one, max_tokens=30)
        text = alone(model, [(prompt, plain)])[0].texts[0]
        begin = chance.randrange(len(text))
        stop = tuple(filter(None, (text[begin : begin + 3].strip("\ufffd"), "zz")))
        asked.append((prompt, replace(plain, stop=stop)))
    engine = Engine(model, BYTES, proposer="ngram")
    names = [engine.submit(*one) for one in asked]
    heard = run(engine)
    for name, reference in zip(names, alone(model, asked), strict=True):
        assert (heard.tokens[name], heard.finish[name]) == (
            reference.tokens[0],
            reference.finish[0],
        )
        assert heard.text[name] == reference.texts[0]
