"""A part of a checkpoint is read, whole tensors come back, and what does not fit is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from labcore import processes
from labcore.models import Llama, LlamaConfig, from_pretrained, save_pretrained
from labcore.parallel import llama
from labcore.parallel.llama import ParallelLlama, gathered_state, load_parallel, parallelize
from labcore.parallel.regions import rank_and_size
from tests.models.shapes import model_of, tokens_of
from tests.parallel.pairs import Pairs, differences, module_seed, say
from tests.parallel.shapes import BASE, CONFIGS, SHORT, B, own_part, pair_of

COUNTS = (2, 4)


def gathered(g: torch.Generator) -> Pairs:
    """The whole state again, on all ranks or on one."""
    rank, ranks = rank_and_size()
    for name in ("tied", "biased"):
        whole, own = pair_of(CONFIGS[name], torch.bfloat16, g)
        state = gathered_state(own)
        assert state.keys() == whole.state_dict().keys()
        for key, tensor in whole.state_dict().items():
            yield f"{name}: {key}", state[key], tensor
        only = gathered_state(own, rank=ranks - 1)
        assert only.keys() == (state.keys() if rank == ranks - 1 else set())
        held = {tensor.untyped_storage().data_ptr() for tensor in own.state_dict().values()}
        kept = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
        assert not held & kept


def loading(folder: Path, g: torch.Generator) -> dict[str, list[str]]:
    """What differs between loading a part and taking the part of what was loaded."""
    ranks = rank_and_size()[1]
    wrong: dict[str, list[str]] = {}
    for place in sorted(folder.iterdir()):
        for dtype in (None, torch.float64) if ranks == 2 else (None,):
            label = f"{place.name}, {dtype}"
            wrong[label] = problems = []
            read: list[int] = []
            with mock.patch.object(llama, "_own_part", listening(read)):
                own = load_parallel(place, dtype=dtype)
            whole = from_pretrained(place, dtype=dtype)
            other = parallelize(copy.deepcopy(whole))
            if own.config != other.config or own.training or type(own) is not ParallelLlama:
                problems.append("another model")
            state = own.state_dict()
            for key, tensor in other.state_dict().items():
                if state[key].dtype != tensor.dtype or not torch.equal(state[key], tensor):
                    problems.append(key)
                # A view would keep the file mapped, and a column's part has gaps in it.
                if state[key].untyped_storage().nbytes() != tensor.nbytes:
                    problems.append(f"{key} is a view of more")
                if not state[key].is_contiguous():
                    problems.append(f"{key} has gaps")
            tokens = tokens_of(own.config, (B, SHORT), g)
            with torch.no_grad():
                logits = own(tokens).logits, other(tokens).logits
            if not torch.equal(*logits):
                problems.append("logits")
            once = sum(p.numel() for n, p in whole.named_parameters() if own_part(n, p) is p)
            stored = from_pretrained(place)
            rest = sum(p.numel() for p in stored.parameters()) - once
            if sum(read) != once + rest // ranks:
                problems.append(f"{sum(read)} numbers read of {once} + {rest} / {ranks}")
    return wrong


def listening(read: list[int]) -> Any:
    """`_own_part` with a file that counts the numbers which are read from it."""
    take = llama._own_part

    class Heard:
        def __init__(self, stored: Any) -> None:
            self.stored = stored

        def __getitem__(self, index: Any) -> Tensor:
            found = self.stored[index]
            read.append(found.numel())
            return found

    def heard(stored: Any, *arguments: Any) -> Tensor:
        return take(Heard(stored), *arguments)

    return heard


def told_by(ask: Any, kind: type[Exception] = ValueError) -> str:
    with pytest.raises(kind) as problem:
        ask()
    return str(problem.value)


def refusals(damaged: Path, g: torch.Generator) -> dict[str, str]:
    from torch.distributed.device_mesh import init_device_mesh

    ranks = rank_and_size()[1]
    odd = LlamaConfig(**BASE | {"num_attention_heads": 6 * ranks}, num_key_value_heads=3)
    model = model_of(odd, g)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    told = {"heads": told_by(lambda: parallelize(model))}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), "refused, and changed"
    assert type(model) is Llama
    several = LlamaConfig(**BASE | {"vocab_size": 45, "intermediate_size": 35})
    told["several"] = told_by(lambda: parallelize(model_of(several, g)))
    own = parallelize(model_of(CONFIGS["plain"], g), sequence_parallel=True)
    told["twice"] = told_by(lambda: parallelize(own))
    told["length"] = told_by(lambda: own(tokens_of(CONFIGS["plain"], (B, SHORT), g)))
    plane = init_device_mesh("cpu", (ranks // 2, 2))
    told["mesh"] = told_by(lambda: parallelize(model_of(CONFIGS["plain"], g), plane))
    told["kind"] = told_by(lambda: parallelize(torch.nn.Linear(2, 2)), TypeError)
    told["saved"] = told_by(lambda: save_pretrained(own, damaged / "never"))
    assert not (damaged / "never").exists()

    class Other(Llama):
        pass

    told["subclass"] = told_by(lambda: parallelize(Other(CONFIGS["plain"])), TypeError)
    routed = model_of(CONFIGS["plain"], g)
    routed.layers[1].mlp.up_proj = torch.nn.Identity()
    table = routed.embed_tokens
    told["replaced"] = told_by(lambda: parallelize(routed), TypeError)
    assert routed.embed_tokens is table, "refused, and changed"
    told["whole"] = told_by(lambda: gathered_state(model), TypeError)
    told["damaged"] = told_by(lambda: load_parallel(damaged / "strange"))
    told["untied"] = told_by(lambda: load_parallel(damaged / "untied"))
    told["empty"] = told_by(lambda: load_parallel(damaged), FileNotFoundError)
    return told


def saved_again(folder: Path, g: torch.Generator) -> dict[str, Any]:
    """What `gathered_state` names is a model that can be saved; the first rank does."""
    whole, own = pair_of(CONFIGS["biased"], torch.bfloat16, g)
    state = gathered_state(own, rank=0)
    if rank_and_size()[0]:
        return {}
    model = Llama(own.config, device="meta")
    model.load_state_dict(state, assign=True)
    save_pretrained(model, folder)
    found, wanted = from_pretrained(folder).state_dict(), whole.state_dict()
    same = {name: found[name].dtype == t.dtype and torch.equal(found[name], t)
            for name, t in wanted.items()}  # fmt: skip
    return same if found.keys() == wanted.keys() else {"names": False}


def everything(seed: int, folder: Path) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {
        "gathered": differences({"state": gathered}, seed),
        "loading": loading(folder / "good", g),
        "refused": refusals(folder / "bad", g),
        "saved": saved_again(folder / "again", g),
    }


def write_checkpoints(folder: Path, g: torch.Generator) -> None:
    for name in ("qwen2", "biased"):
        for limit in (10**9, 3_000):
            model = model_of(CONFIGS[name], g).to(torch.bfloat16)
            save_pretrained(model, folder / "good" / f"{name}-{limit}", max_shard_bytes=limit)
    for name, change in (("strange", strange), ("untied", untied)):
        place = folder / "bad" / name
        save_pretrained(model_of(CONFIGS["qwen2"], g), place)
        tensors = load_file(place / "model.safetensors")
        change(tensors)
        save_file(tensors, place / "model.safetensors")


def strange(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(3)
    tensors["model.layers.0.rotten"] = torch.ones(3)
    del tensors["model.layers.1.mlp.up_proj.weight"]


def untied(tensors: dict[str, Tensor]) -> None:
    # Every rank has a part of the vocabulary, and each must see a difference.
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


@pytest.fixture(scope="module", params=COUNTS)
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, list[dict[str, Any]]]:
    seed = module_seed()
    folder = tmp_path_factory.mktemp("checkpoints")
    write_checkpoints(folder, torch.Generator().manual_seed(seed))
    return request.param, processes.run(everything, request.param, seed, folder, timeout_s=300)


def test_the_whole_state_comes_back_bit_for_bit(runs) -> None:
    assert not say([one["gathered"] for one in runs[1]], "state", 0.0)


def test_a_gathered_model_is_saved_bit_for_bit(runs) -> None:
    first, *others = [one["saved"] for one in runs[1]]
    assert first and all(first.values()) and not any(others)


def test_alone_a_divided_model_is_whole_and_can_be_saved(
    tmp_path: Path, generator: torch.Generator
) -> None:
    own = parallelize(model_of(CONFIGS["tied"], generator))
    save_pretrained(own, tmp_path)
    for name, tensor in from_pretrained(tmp_path).state_dict().items():
        assert torch.equal(tensor, own.state_dict()[name])


def test_each_rank_reads_its_part_of_a_checkpoint(runs) -> None:
    for one in runs[1]:
        assert len(one["loading"]) == (8 if runs[0] == 2 else 4)
        assert all(not wrong for wrong in one["loading"].values()), one["loading"]


def test_what_does_not_fit_is_refused_by_name(runs) -> None:
    ranks, by_rank = runs
    for one in by_rank:
        told = one["refused"]
        assert f"got {ranks} ranks for num_key_value_heads=3;" in told["heads"]
        assert told["heads"].endswith("among 1 ranks")
        assert "for intermediate_size=35, vocab_size=45;" in told["several"]
        assert "llama must be whole" in told["twice"]
        assert told["length"].startswith(f"T must be a multiple of the {ranks} ranks ")
        assert f"got tokens of shape ({B}, {SHORT});" in told["length"]
        assert "a mesh must have one dimension, got 2" in told["mesh"]
        assert "not a subclass, got Linear" in told["kind"]
        assert "not a subclass, got Other" in told["subclass"]
        assert "layers.1.mlp.up_proj must be of class Linear, got Identity" in told["replaced"]
        saved = f"embed_tokens.weight of shape ({44 // ranks}, 22) where config has (44, 22)"
        assert saved in told["saved"]
        assert "labcore.parallel.llama.gathered_state(model)" in told["saved"]
        assert "llama must be a ParallelLlama, got Llama" in told["whole"]
        assert "model.norm.weight must have shape (22,), got (3,)" in told["damaged"]
        assert "model.layers.0.rotten is unexpected" in told["damaged"]
        assert "model.layers.1.mlp.up_proj.weight is missing" in told["damaged"]
        assert "lm_head.weight differs from model.embed_tokens.weight" in told["untied"]
        assert "holds no config.json" in told["empty"]
