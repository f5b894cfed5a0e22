"""A decoder computes what its model computes in one piece, also after ragged rollbacks."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch
import transformers

from labcore.decoding.contract import SamplingConfig
from labcore.decoding.decoders import LlamaDecoder, TransformersDecoder, as_decoder
from labcore.decoding.generation import generate, stream
from labcore.decoding.medusa import FusedHeads, Medusa, MedusaHeads, chain_tree
from labcore.decoding.proposers import Adaptive, DraftModel, Gated, NGram
from labcore.models import save_pretrained
from labcore.models.fused import FusedLlama
from tests.models.shapes import CONFIGS, model_of, tokens_of

# transformers computes norms and softmax in fp32 in double models too; a wrong slot costs 0.01 or
# more.
ROUNDED = 1e-4
SMALL = {"vocab_size": 29, "pad_token_id": None, "bos_token_id": None}
PEERS = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=64, **SMALL)
    ),
    "neox": lambda: transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            eos_token_id=[5, 7],
            **SMALL,
        )
    ),
    # A window much shorter than the rows: what was rolled back must not be lost.
    "window": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=24,
            sliding_window=4,
            **SMALL,
        )
    ),
}


def peer_of(name: str, seed: int) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    model = PEERS[name]().double().eval()
    with torch.no_grad():  # a fresh model's logits are nearly equal
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def walk(decoder, whole, seed: int, close: float) -> None:
    """Ragged forwards, rollbacks and kept chains in random order, against `whole(row)`."""
    draw = random.Random(seed)
    rows: list[list[int]] = [[], [], []]
    cache = decoder.new_cache(3, 48)
    for _ in range(9):
        counts = [draw.randrange(5) if row else 1 + draw.randrange(4) for row in rows]
        counts[draw.randrange(3)] += 1
        tokens = torch.tensor(
            [[draw.randrange(decoder.vocab_size) for _ in range(max(counts))] for _ in rows]
        )
        out = decoder(tokens, counts=torch.tensor(counts), cache=cache)
        assert not out.logits.requires_grad and out.logits.shape[-1] == decoder.vocab_size
        for b, count in enumerate(counts):
            rows[b] += tokens[b, :count].tolist()
            if count:
                logits, hidden = whole(rows[b])
                for mine, theirs in ((out.logits, logits), (out.hidden, hidden)):
                    torch.testing.assert_close(
                        mine[b, :count], theirs[-count:], rtol=close, atol=close
                    )
        chosen = draw.randrange(3)
        kept = draw.randrange(counts[chosen] + 1)
        cache.keep(chosen, range(kept))
        del rows[chosen][len(rows[chosen]) - counts[chosen] + kept :]
        lengths = [draw.randrange(max(len(row) - 3, 0), len(row) + 2) for row in rows]
        cache.truncate(torch.tensor(lengths))
        rows = [row[:length] for row, length in zip(rows, lengths, strict=True)]
        assert cache.lengths.tolist() == [len(row) for row in rows]


@pytest.mark.parametrize("name", ["grouped", "qwen2"])
def test_llama_and_its_transformers_checkpoint_are_one_decoder(
    name: str, seed: int, generator: torch.Generator, tmp_path: Path
) -> None:
    model = model_of(CONFIGS[name], generator)
    save_pretrained(model, tmp_path)
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)

    @torch.no_grad()
    def whole(row: list[int]):
        out = model.double()(torch.tensor([row]))
        return out.logits[0], out.hidden[0]

    ours, theirs = as_decoder(model.double()), as_decoder(peer.double().eval())
    assert isinstance(ours, LlamaDecoder) and isinstance(theirs, TransformersDecoder)
    assert ours.vocab_size == theirs.vocab_size == 37
    assert ours.eos_token_ids == theirs.eos_token_ids == model.config.eos_token_ids
    assert ours.new_cache(2, 7).capacity == 7
    walk(ours, whole, seed, 1e-8)
    walk(theirs, whole, seed, ROUNDED)


@pytest.mark.parametrize("name", PEERS)
def test_any_causal_model_of_transformers_can_be_rolled_back(name: str, seed: int) -> None:
    model = peer_of(name, seed)

    @torch.no_grad()
    def whole(row: list[int]):
        out = model(torch.tensor([row]), output_hidden_states=True)
        return out.logits[0], out.hidden_states[-1][0]

    decoder = as_decoder(model)
    walk(decoder, whole, seed, ROUNDED)
    assert decoder.eos_token_ids == {"gpt2": (50256,), "neox": (5, 7), "window": (2,)}[name]


def test_what_a_decoder_already_is_stays(generator: torch.Generator) -> None:
    decoder = as_decoder(model_of(CONFIGS["plain"], generator))
    assert as_decoder(decoder) is decoder


def test_a_llama_runs_in_its_fused_form_wherever_it_has_one(generator: torch.Generator) -> None:
    model = model_of(CONFIGS["grouped"], generator)
    assert as_decoder(model) is as_decoder(model) and isinstance(as_decoder(model), FusedLlama)
    assert isinstance(as_decoder(model.double()), LlamaDecoder)
    hook = model.float().layers[0].register_forward_hook(lambda *_: None)
    assert isinstance(as_decoder(model), LlamaDecoder)
    hook.remove()
    assert isinstance(as_decoder(model.train()), FusedLlama)


def test_generation_follows_training(seed: int, generator: torch.Generator) -> None:
    """Tokens, drafts and streams are those of the weights at their start."""
    model = model_of(CONFIGS["grouped"], generator)
    sampling, prompt = SamplingConfig(max_tokens=12), [1, 2, 3]
    heads = MedusaHeads(model, heads=2, layers=1)
    medusa = Medusa(heads, chain_tree(2))
    alone, *inner = (DraftModel(model, gamma=3) for _ in range(3))
    proposers = alone, Adaptive(inner[0]), Gated(inner[1], NGram())
    optimizer = torch.optim.SGD([*model.parameters(), *heads.parameters()], lr=0.3)
    seen = set()
    for _ in range(4):
        plain = generate(LlamaDecoder(copy.deepcopy(model)), [prompt], sampling).tokens[0]
        assert generate(model, [prompt], sampling).tokens == [plain]
        assert [t for block in stream(model, prompt, sampling) for t in block] == plain
        for proposer in proposers:
            told = generate(model, [prompt], sampling, proposer=proposer)
            # The target drafts for itself, so all is accepted: an old form's drafts would not be.
            assert told.tokens == [plain] and told.statistics.accepted == told.statistics.drafted
        assert generate(model, [prompt], sampling, proposer=medusa).tokens == [plain]
        hidden = torch.randn(1, model.config.hidden_size, generator=generator)
        torch.testing.assert_close(medusa.heads(hidden), heads(hidden), rtol=1e-4, atol=1e-4)
        assert isinstance(medusa.heads, FusedHeads)
        seen.add(tuple(plain))
        said = torch.randint(37, (1, 20), generator=generator)
        out = model(said)
        loss = torch.nn.functional.cross_entropy(out.logits[0, :-1], said[0, 1:])
        (loss + heads(out.hidden.detach()).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(seen) > 1


def test_trees_go_through_llama_and_are_refused_by_transformers(
    seed: int, generator: torch.Generator
) -> None:
    model = model_of(CONFIGS["plain"], generator).double()
    tokens = tokens_of(model.config, (1, 4), generator)
    tree = torch.tensor([[-1, 0, 0, -1]], dtype=torch.int32)
    decoder = as_decoder(model)
    cache = decoder.new_cache(1, 8)
    decoder(torch.tensor([[3]]), counts=torch.tensor([1]), cache=cache)
    out = decoder(tokens, counts=torch.tensor([4]), cache=cache, tree=tree)
    path = torch.tensor([[3, tokens[0, 0].item(), tokens[0, 2].item()]])
    with torch.no_grad():
        torch.testing.assert_close(out.logits[0, 2], model(path).logits[0, 2])
    peer = as_decoder(peer_of("gpt2", seed))
    with pytest.raises(ValueError, match="tree must be None"):
        peer(tokens % 29, counts=torch.tensor([4]), cache=peer.new_cache(1, 8), tree=tree)


def test_what_is_no_decoder_is_refused(seed: int) -> None:
    with pytest.raises(TypeError, match="model must be a Llama"):
        as_decoder(torch.nn.Linear(2, 2))
    model = peer_of("gpt2", seed)
    with pytest.raises(ValueError, match="evaluation mode"):
        as_decoder(model.train())
    tiny = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    whole = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=9, **tiny))
    with pytest.raises(ValueError, match="encoder-decoder"):
        as_decoder(whole.eval())
    recurrent = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, state_size=2)
    )
    with pytest.raises(ValueError, match="MambaForCausalLM"):
        as_decoder(recurrent.eval())


def test_shapes_that_do_not_fit_are_refused(seed: int) -> None:
    decoder = as_decoder(peer_of("gpt2", seed))
    cache = decoder.new_cache(2, 9)
    tokens = torch.ones(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="2 rows of the cache"):
        decoder(tokens, counts=torch.tensor([1, 2, 3]), cache=cache)
    with pytest.raises(ValueError, match="above 0 in some row"):
        decoder(tokens, counts=torch.tensor([0, 0]), cache=cache)
    decoder(tokens, counts=torch.tensor([3, 2]), cache=cache)
    with pytest.raises(ValueError, match="lengths must have shape"):
        cache.truncate(torch.tensor([1]))
    with pytest.raises(ValueError, match="count up from 0"):
        cache.keep(0, [0, 2])
    with pytest.raises(ValueError, match="batch"):
        decoder.new_cache(0, 9)
    with pytest.raises(ValueError, match="capacity"):
        decoder.new_cache(1, 0)
