"""A model of transformers with our attention: the logits, tokens and gradients of its own forms."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from labcore.attention import huggingface
from tests.attention.kernels import needs_interpreter, ran  # noqa: F401

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "pad_token_id": 0,
    "eos_token_id": None,
}
WINDOW = 7
CONFIGS = {
    "llama": (transformers.LlamaConfig, {}),
    "mistral": (transformers.MistralConfig, {"sliding_window": WINDOW}),
    # A scale besides D ** -0.5, a softcap that the scores reach, and a window in every other layer.
    "gemma2": (
        transformers.Gemma2Config,
        {"sliding_window": WINDOW, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 5},
    ),
}
# Of the largest value. Eager takes its softmax in float32; sdpa has no softcap.
BOUNDS = {
    ("eager", torch.float64): 2e-6,
    ("sdpa", torch.float64): 1e-12,
    ("eager", torch.float32): 5e-5,
    ("sdpa", torch.float32): 5e-5,
}


def model_of(
    name: str, generator: torch.Generator, dtype: torch.dtype = torch.float64, **changes: Any
) -> transformers.PreTrainedModel:
    kind, more = CONFIGS[name]
    huggingface.register(backend="torch")
    config = kind(**{**SIZES, **more, **changes}, attn_implementation=huggingface.NAME)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return model.eval()


def tokens_of(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randint(1, SIZES["vocab_size"], shape, generator=generator)


def peers_of(name: str) -> list[str]:
    return ["eager"] if name == "gemma2" else ["eager", "sdpa"]


def close(ours: Tensor, theirs: Tensor, bound: float) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=bound * float(theirs.abs().max()))


def generate(model: transformers.PreTrainedModel, name: str, tokens: Tensor, **more: Any) -> Any:
    """Greedy tokens [B, new] and the logits [B, new, V] that chose them, with a cache."""
    model.set_attn_implementation(name)
    count = more.pop("count", 20)
    found = model.generate(
        tokens, do_sample=False, max_new_tokens=count, output_logits=True,
        return_dict_in_generate=True, **{"attention_mask": torch.ones_like(tokens), **more},
    )  # fmt: skip
    return found.sequences[:, tokens.shape[1] :], torch.stack(found.logits, 1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """T and S of each call of `flash_attention`."""
    seen, real = [], huggingface.flash_attention

    def counted(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        seen.append((query.shape[2], key.shape[2]))
        return real(query, key, value, **options)

    monkeypatch.setattr(huggingface, "flash_attention", counted)
    return seen


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_with_a_cache_are_those_of_transformers(
    name: str, dtype: torch.dtype, generator: torch.Generator, calls: list
) -> None:
    """Two logits of float32 that tie within their error would fail one run in some 10,000."""
    model = model_of(name, generator, dtype)
    prompt = tokens_of((2, 11), generator)
    tokens, logits = generate(model, "labcore", prompt)
    held = WINDOW if name == "mistral" else 11 + 19
    assert len(calls) == 2 * 20 and (1, held) in calls, calls
    for peer in peers_of(name):
        theirs, their_logits = generate(model, peer, prompt)
        assert torch.equal(tokens, theirs)
        close(logits, their_logits, BOUNDS[peer, dtype])
    assert len(calls) == 2 * 20


@pytest.mark.parametrize("name", CONFIGS)
def test_several_new_tokens_see_the_cache_and_each_other(
    name: str, generator: torch.Generator, calls: list
) -> None:
    model, tokens = model_of(name, generator), tokens_of((2, 29), generator)
    cache, parts = transformers.DynamicCache(config=model.config), []
    with torch.inference_mode():
        for part in tokens.split([5, 9, 1, 14], 1):
            parts.append(model(part, past_key_values=cache, use_cache=True).logits)
        assert any(1 < queries < keys for queries, keys in calls)
        for peer in peers_of(name):
            model.set_attn_implementation(peer)
            close(torch.cat(parts, 1), model(tokens).logits, BOUNDS[peer, torch.float64])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_training_step_has_the_gradients_of_transformers(
    name: str, generator: torch.Generator
) -> None:
    model, tokens = model_of(name, generator).train(), tokens_of((2, 23), generator)
    grads = {}
    for form in ("labcore", *peers_of(name)):
        model.set_attn_implementation(form)
        loss = model(tokens, labels=tokens).loss
        grads[form] = torch.autograd.grad(loss, list(model.parameters()))
    for peer in peers_of(name):
        for ours, theirs in zip(grads["labcore"], grads[peer], strict=True):
            assert theirs.abs().max() > 0
            close(
                ours, theirs, 50 * BOUNDS[peer, torch.float64]
            )  # sums over tokens, large and small


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_token(name: str, side: str, generator: torch.Generator) -> None:
    """Against each row alone, which has no padding."""
    model, lengths = model_of(name, generator), (13, 1, 6)
    rows = [tokens_of((1, length), generator) for length in lengths]
    tokens, mask = torch.zeros(3, 13, dtype=torch.int64), torch.zeros(3, 13, dtype=torch.int64)
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        place = slice(13 - length, None) if side == "left" else slice(length)
        tokens[i, place], mask[i, place] = row[0], 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(tokens, attention_mask=mask, position_ids=positions).logits
        for i, row in enumerate(rows):
            close(logits[i, mask[i].bool()], model(row).logits[0], 1e-12)
    if side == "left":
        together, logits = generate(model, "labcore", tokens, attention_mask=mask)
        for i, row in enumerate(rows):
            alone, its_logits = generate(model, "labcore", row)
            assert torch.equal(together[i], alone[0])
            close(logits[i], its_logits[0], 1e-12)
        model.float()  # eager's mask for float64 overflows in its softmax
        together, logits = generate(model, "labcore", tokens, attention_mask=mask)
        for peer in peers_of(name):
            theirs, their_logits = generate(model, peer, tokens, attention_mask=mask)
            assert torch.equal(together, theirs)
            close(logits, their_logits, BOUNDS[peer, torch.float32])


@needs_interpreter
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_the_kernels_run_in_a_model(name: str, generator: torch.Generator, ran: list[str]) -> None:  # noqa: F811
    model = model_of(name, generator, torch.float32)
    huggingface.register(backend="triton")
    prompt = tokens_of((1, 9), generator)
    tokens, logits = generate(model, "labcore", prompt, count=4)
    assert len(ran) == 2 * 4
    theirs, their_logits = generate(model, "eager", prompt, count=4)
    assert torch.equal(tokens, theirs)
    close(logits, their_logits, BOUNDS["eager", torch.float32])
    grads = {}
    for form in ("labcore", "eager"):
        model.set_attn_implementation(form)
        grads[form] = torch.autograd.grad(
            model(prompt, labels=prompt).loss, list(model.parameters())
        )
    assert len(ran) > 2 * 4 + 2, ran
    for ours, theirs in zip(grads["labcore"], grads["eager"], strict=True):
        close(ours, theirs, 50 * BOUNDS["eager", torch.float32])


def test_autocast_keeps_its_dtype_with_and_without_padding(generator: torch.Generator) -> None:
    model, tokens = model_of("llama", generator, torch.float32), tokens_of((2, 9), generator)
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    for attention_mask in (None, mask):
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            logits = model(tokens, attention_mask=attention_mask).logits
        assert logits.dtype == torch.bfloat16 and bool(logits.isfinite().all())


def test_what_the_kernels_lack_is_refused(generator: torch.Generator) -> None:
    tokens = tokens_of((2, 9), generator)
    model = model_of("llama", generator)
    holes = torch.ones_like(tokens)
    holes[1, 3] = 0
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).expand(2, -1)
    square = torch.zeros(2, 1, 9, 9, dtype=torch.float64)
    for arguments, sentence in (
        ({"attention_mask": holes}, "padding of a row on one side"),
        ({"position_ids": packed, "use_cache": False}, "the model needs another mask"),
        ({"attention_mask": square}, r"doesn't support an attention mask of shape \(2, 1, 9, 9\)"),
    ):
        with pytest.raises(ValueError, match=sentence):
            model(tokens, **arguments)
    with pytest.raises(ValueError, match="needs the last key to belong to the last query"):
        generate(model, "labcore", tokens, cache_implementation="static")
    with pytest.raises(ValueError, match="has no dropout, got dropout=0.25; set"):
        model_of("llama", generator, attention_dropout=0.25).train()(tokens)
    heads = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"doesn't support \['s_aux'\]"):
        huggingface.attention_function(model, heads, heads, heads, None, s_aux=heads)
    with pytest.raises(ValueError, match="the model needs another mask"):
        chunks = {"local_size": 8, "config": model.config}
        huggingface.padding_mask(q_length=9, kv_length=9, **chunks)


def test_labcore_does_not_import_transformers() -> None:
    code = "import sys, labcore.attention; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
