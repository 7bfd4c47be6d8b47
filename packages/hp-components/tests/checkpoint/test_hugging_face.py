"""Hugging Face folders in and out, against transformers' own Llama; the adapter joins, stacks and ties."""

import json
import logging

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hp_components import CheckpointError, CheckpointManager
from hp_components.checkpoint.contents import ModelParts
from hp_components.checkpoint.export import Exporter
from hp_protocols.errors import ConfigError
from hp_protocols.state_dict_adapter import BaseStateDictAdapter
from hp_protocols.testing import run_world

SIZE, HIDDEN, VOCAB, LAYERS = 8, 12, 22, 2


def llama_config(tied=False):
    return LlamaConfig(
        hidden_size=SIZE,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        tie_word_embeddings=tied,
    )


def llama_folder(folder, *, tied=False, dtype=torch.float32, **options):
    torch.manual_seed(1)
    model = LlamaForCausalLM(llama_config(tied)).to(dtype)
    model.save_pretrained(folder, **options)
    return model


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(SIZE, 3 * SIZE, bias=False)
        self.out = nn.Linear(SIZE, SIZE, bias=False)
        self.up = nn.Parameter(torch.zeros(2, HIDDEN, SIZE))  # gate and up, stacked
        self.down = nn.Linear(HIDDEN, SIZE, bias=False)
        self.norm1 = nn.RMSNorm(SIZE)
        self.norm2 = nn.RMSNorm(SIZE)


class Lm(nn.Module):
    """The same weights under other names and in other pieces."""

    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, SIZE)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.norm = nn.RMSNorm(SIZE)
        self.head = nn.Linear(SIZE, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        raise NotImplementedError


_PLAIN = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_IN_LAYER = {
    "out.weight": "self_attn.o_proj.weight",
    "down.weight": "mlp.down_proj.weight",
    "norm1.weight": "input_layernorm.weight",
    "norm2.weight": "post_attention_layernorm.weight",
}
_JOINED = {
    "qkv.weight": (
        torch.cat,
        torch.chunk,
        ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
    ),
    "up": (torch.stack, lambda whole, count: torch.unbind(whole), ["mlp.gate_proj.weight", "mlp.up_proj.weight"]),
}


class Adapter(BaseStateDictAdapter):
    """Joins q, k and v, stacks gate and up; leaves out rotary tables; does not know anything else."""

    tied = False

    def to_hf(self, state_dict):
        made = {}
        for name, value in state_dict.items():
            if self.tied and name == "head.weight":
                continue
            if name in _PLAIN:
                made[_PLAIN[name]] = value
                continue
            _, index, inner = name.split(".", 2)
            if inner in _IN_LAYER:
                made[f"model.layers.{index}.{_IN_LAYER[inner]}"] = value
            else:
                _, part, theirs = _JOINED[inner]
                for their_name, piece in zip(theirs, part(value, len(theirs)), strict=True):
                    made[f"model.layers.{index}.{their_name}"] = piece
        return made

    def from_hf(self, hf_state_dict):
        made, rest = {}, dict(hf_state_dict)
        for ours, theirs in _PLAIN.items():
            if theirs in rest:
                made[ours] = rest.pop(theirs)
        for index in range(LAYERS):
            prefix = f"model.layers.{index}."
            for ours, theirs in _IN_LAYER.items():
                if prefix + theirs in rest:
                    made[f"layers.{index}.{ours}"] = rest.pop(prefix + theirs)
            for ours, (join, _, theirs) in _JOINED.items():
                pieces = [rest.pop(prefix + name) for name in theirs if prefix + name in rest]
                if len(pieces) == len(theirs):
                    made[f"layers.{index}.{ours}"] = join(pieces)
        if unknown := [name for name in rest if not name.endswith("rotary_emb.inv_freq")]:
            raise KeyError(f"no parameter of this model comes of {unknown[0]}")
        return made

    def hf_config(self):
        return llama_config(self.tied).to_dict() | {"architectures": ["LlamaForCausalLM"]}


class TiedAdapter(Adapter):
    tied = True


def adapter(tied=False):
    return (TiedAdapter if tied else Adapter)(model_config=None)


class Tokenizer:
    def save(self, folder):
        (folder / "tokenizer_config.json").write_text("{}")


def manager(folder, model, tied=False, **config):
    return CheckpointManager.Config(**({"interval": 1} | config)).build(
        run_folder=folder, model_parts=[model], state_dict_adapter=adapter(tied), tokenizer=Tokenizer()
    )


def start_from(folder, run, tied=False, dtype=torch.float32):
    torch.manual_seed(0)
    model = Lm(tied).to(dtype)
    assert manager(run, model, tied, initial_load_path=str(folder), initial_load_in_hf=True).load() is None
    return model


def expected(llama, tied=False):
    return adapter(tied).from_hf(dict(llama.state_dict()))


def assert_same(state, wanted):
    for name, value in wanted.items():
        whole = state[name].full_tensor() if isinstance(state[name], DTensor) else state[name]
        assert torch.equal(whole, value.to(whole.dtype)), name


# In


def test_a_published_folder_becomes_the_weights(tmp_path, caplog):
    llama = llama_folder(tmp_path / "hf")
    with caplog.at_level(logging.INFO):
        model = start_from(tmp_path / "hf", tmp_path / "run")
    assert_same(model.state_dict(), expected(llama))
    assert f"loading the weights of the Hugging Face folder {tmp_path}/hf: checkpoint.initial_load_path" in caplog.text
    assert f"not loaded from {tmp_path}/hf: rng (only the weights were asked for)" in caplog.text


def test_several_files_with_an_index_are_one_model(tmp_path):
    llama = llama_folder(tmp_path / "hf", max_shard_size="3KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    assert_same(start_from(tmp_path / "hf", tmp_path / "run").state_dict(), expected(llama))


def test_a_tied_head_may_be_missing(tmp_path):
    llama = llama_folder(tmp_path / "hf", tied=True)
    model = start_from(tmp_path / "hf", tmp_path / "run", tied=True)
    assert torch.equal(model.head.weight, llama.model.embed_tokens.weight)
    with pytest.raises(
        ConfigError, match=r"1 parameters of .* are missing in the folder: head\.weight \(of lm_head\.weight\)"
    ):
        start_from(tmp_path / "hf", tmp_path / "run2")


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [(torch.bfloat16, torch.float32, "exactly"), (torch.float32, torch.bfloat16, "rounded")],
)
def test_types_follow_the_model_and_the_log_says_so(tmp_path, caplog, theirs, ours, said):
    llama = llama_folder(tmp_path / "hf", dtype=theirs)
    with caplog.at_level(logging.INFO):
        model = start_from(tmp_path / "hf", tmp_path / "run", dtype=ours)
    assert_same(model.state_dict(), expected(llama))
    assert f"15 tensors become {ours} of {theirs}, {said}" in caplog.text


def test_everything_that_does_not_fit_is_told_at_once_and_nothing_is_changed(tmp_path):
    from safetensors.torch import load_file, save_file

    llama_folder(tmp_path / "hf")
    file = tmp_path / "hf/model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.self_attn.k_proj.weight"]
    tensors["model.norm.weight"] = torch.zeros(SIZE + 1)
    tensors["model.layers.1.mlp.extra.weight"] = torch.zeros(2)
    tensors["lm_head.weight"] = torch.zeros(VOCAB, SIZE, dtype=torch.int8)
    save_file(tensors, file)
    model = Lm()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError) as caught:
        manager(tmp_path / "run", model, initial_load_path=str(tmp_path / "hf"), initial_load_in_hf=True).load()
    text = str(caught.value)
    assert (
        "1 parameters of this model are missing in the folder: "
        "layers.0.qkv.weight (of model.layers.0.self_attn.k_proj.weight)" in text
    )
    assert "1 tensors in the folder are unknown to this model: model.layers.1.mlp.extra.weight" in text
    assert "norm.weight (folder (9,) from model.norm.weight, here (8,))" in text
    assert "no plain weights (quantised?): lm_head.weight (torch.int8)" in text
    assert_same(model.state_dict(), before)


def test_what_the_adapter_leaves_out_by_itself_is_a_warning(tmp_path, caplog):
    from safetensors.torch import load_file, save_file

    llama_folder(tmp_path / "hf")
    file = tmp_path / "hf/model.safetensors"
    save_file(load_file(file) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}, file)
    with caplog.at_level(logging.WARNING):
        start_from(tmp_path / "hf", tmp_path / "run")
    assert "1 tensors that this model does not use: model.layers.0.self_attn.rotary_emb.inv_freq" in caplog.text


def refusal(folder, run, **config):
    with pytest.raises(ConfigError) as caught:
        manager(run, Lm(), **({"initial_load_path": str(folder), "initial_load_in_hf": True} | config)).load()
    return str(caught.value)


def test_folders_that_cannot_be_used_are_refused_by_name(tmp_path):
    folder, run = tmp_path / "hf", tmp_path / "run"
    assert "there is no folder" in refusal(folder, run)
    folder.mkdir()
    assert "has neither model.safetensors nor model.safetensors.index.json" in refusal(folder, run)
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "has its weights in pytorch_model.bin: a pickled file can run any code" in refusal(folder, run)
    (folder / "other.safetensors").write_bytes(b"")
    (folder / "pytorch_model.bin").unlink()
    assert "has other.safetensors, but neither" in refusal(folder, run)
    assert "--checkpoint.initial_load_in_hf" in refusal(folder, run, initial_load_in_hf=False)
    (folder / "model.safetensors").write_bytes(b"half a file")
    assert "model.safetensors: cannot be read as safetensors" in refusal(folder, run)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "lost.safetensors"}}))
    assert "incomplete: the index names files that are not there: lost.safetensors" in refusal(folder, run)


def test_a_model_without_an_adapter_and_a_config_that_cannot_be_written_are_seen_before_training(tmp_path):
    options = {"run_folder": tmp_path, "model_parts": [Lm()]}
    with pytest.raises(ConfigError, match=r"checkpoint\.last_save_in_hf: this model has no state-dict adapter"):
        CheckpointManager.Config(last_save_in_hf=True).build(**options)

    class Silent(Adapter):
        hf_config = BaseStateDictAdapter.hf_config

    with pytest.raises(ConfigError, match="Silent has no hf_config"):
        CheckpointManager.Config(last_save_in_hf=True).build(**options, state_dict_adapter=Silent(model_config=None))


# Out


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_what_the_last_save_wrote(tmp_path, tied):
    torch.manual_seed(3)
    model = Lm(tied)
    run = manager(tmp_path, model, tied, last_save_in_hf=True)
    assert run.save(4, last=True) is True
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-4", "step-4-hf"]
    llama, told = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint/step-4-hf", output_loading_info=True)
    assert not any(told.values())
    assert llama.dtype == torch.float32
    assert_same(model.state_dict(), expected(llama, tied))
    assert (tmp_path / "checkpoint/step-4-hf/tokenizer_config.json").exists()
    again = start_from(tmp_path / "checkpoint/step-4-hf", tmp_path / "other", tied)
    assert_same(again.state_dict(), model.state_dict())


def test_the_last_save_may_hold_only_the_weights_in_another_type(tmp_path):
    torch.manual_seed(3)
    model = Lm()
    options = {"last_save_in_hf": True, "last_save_model_only": True, "export_dtype": "bfloat16"}
    manager(tmp_path, model, **options).save(4, last=True)
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["step-4-hf"]
    llama = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint/step-4-hf")
    assert llama.dtype == torch.bfloat16
    wanted = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    assert_same(wanted, expected(llama))


def test_an_export_that_fails_leaves_nothing_and_the_one_before_stays(tmp_path, monkeypatch):
    model = Lm()
    run = manager(tmp_path, model, last_save_in_hf=True)
    run.save(4, last=True)
    before = (tmp_path / "checkpoint/step-4-hf/model.safetensors").read_bytes()
    nn.init.zeros_(model.embed.weight)
    with monkeypatch.context() as broken:
        broken.setattr(Tokenizer, "save", lambda self, folder: (folder / "no/such/folder").touch())
        with pytest.raises(CheckpointError, match="No such file or directory"):
            run.save(4, last=True)
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-4", "step-4-hf"]
    assert (tmp_path / "checkpoint/step-4-hf/model.safetensors").read_bytes() == before
    run.save(4, last=True)
    assert (tmp_path / "checkpoint/step-4-hf/model.safetensors").read_bytes() != before


# Sharded


def on_two_ranks(rank, world_size, folder):
    model = Lm(tied=True)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",)))
    options = {"initial_load_path": str(folder / "hf"), "initial_load_in_hf": True}
    manager(folder / "run", model, tied=True, **options).load()
    loaded = {name: value.full_tensor() for name, value in model.state_dict().items()}
    Exporter(folder / "out", ModelParts([model]), adapter(tied=True), None, None).export(1, "float32", file_bytes=2000)

    class Broken(TiedAdapter):
        def to_hf(self, state_dict):
            if rank == 0 and "layers.1.out.weight" in state_dict and not state_dict["layers.1.out.weight"].is_meta:
                raise ValueError("lost a head")
            return super().to_hf(state_dict)

    with pytest.raises(CheckpointError) as caught:
        Exporter(folder / "bad", ModelParts([model]), Broken(None), None, None).export(1, "float32")
    return loaded, str(caught.value)


def test_two_ranks_load_and_export_the_same_model(tmp_path):
    llama = llama_folder(tmp_path / "hf", tied=True)
    for loaded, refused in run_world(on_two_ranks, 2, tmp_path):
        assert_same(loaded, expected(llama, tied=True))
        assert refused.endswith("rank 0: ValueError: lost a head")
    assert not any((tmp_path / "bad").iterdir())
    assert len(list((tmp_path / "out/step-1-hf").glob("model-*-of-*.safetensors"))) > 2
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out/step-1-hf")
    for name, value in llama.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
