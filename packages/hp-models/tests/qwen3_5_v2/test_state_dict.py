"""Weights go to Hugging Face names and back as the same bits, whole or in part; folders load on both sides."""

import json

import pytest
import safetensors.torch
import torch
import transformers
from hybrid import hf_config, pair, perturb

from hp_models.qwen3_5_v2 import Qwen3_5Model, Qwen3_5StateDictAdapter


def same(first, second):
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) and value.dtype == second[name].dtype for name, value in first.items())


@pytest.fixture(scope="module")
def untied():
    ours, theirs = pair()
    return ours, theirs, Qwen3_5StateDictAdapter(ours.config)


def test_there_and_back_is_the_same_bits(untied):
    ours, theirs, adapter = untied
    same(adapter.to_hf(adapter.from_hf(theirs.state_dict())), dict(theirs.state_dict()))
    same(adapter.from_hf(adapter.to_hf(ours.state_dict())), dict(ours.state_dict()))
    short = {name: value.bfloat16() for name, value in theirs.state_dict().items()}
    same(adapter.to_hf(adapter.from_hf(short)), short)


def test_queries_keys_and_values_are_rows_of_what_checkpoints_join(untied):
    ours, theirs, _ = untied
    joined, mine = theirs.model.layers[0].linear_attn, ours.layers[0].linear_attn
    parts = (mine.in_proj_q.weight, mine.in_proj_k.weight, mine.in_proj_v.weight)
    assert [len(part) for part in parts] == [32, 32, 96]
    assert torch.equal(torch.cat(parts), joined.in_proj_qkv.weight)
    assert torch.equal(torch.cat((mine.conv_q, mine.conv_k, mine.conv_v)), joined.conv1d.weight)


def test_every_name_of_theirs_can_be_translated_alone(untied):
    ours, theirs, adapter = untied
    made = {}
    for name, value in theirs.state_dict().items():
        part = adapter.from_hf({name: value})
        same(adapter.to_hf(part), {name: value})
        made |= part
    same(made, dict(ours.state_dict()))


def test_a_part_without_which_nothing_can_be_joined_is_named(untied):
    ours, _, adapter = untied
    part = {name: value for name, value in ours.state_dict().items() if not name.endswith("conv_k")}
    with pytest.raises(ValueError, match=r"linear_attn\.conv1d\.weight .* layers\.0\.linear_attn\.conv_k is"):
        adapter.to_hf(part)


def test_of_a_model_with_vision_the_text_part_is_taken(untied):
    _, theirs, adapter = untied
    text = dict(theirs.state_dict())
    composite = {name.replace("model.", "model.language_model."): value for name, value in text.items()}
    extra = {"model.visual.pos_embed.weight": torch.ones(2), "mtp.fc.weight": torch.ones(2)}
    same(adapter.to_hf(adapter.from_hf({**composite, **extra})), text)


def test_what_is_not_of_this_model_is_refused_by_name(untied):
    _, _, adapter = untied
    with pytest.raises(ValueError, match=r"transformer\.h\.0\.weight: no name of a Qwen3\.5 checkpoint"):
        adapter.from_hf({"transformer.h.0.weight": torch.ones(1)})
    with pytest.raises(ValueError, match=r"layers\.0\.linear_attn\.conv1d\.weight: 7 rows, this model has 32 \+ 32"):
        adapter.from_hf({"model.layers.0.linear_attn.conv1d.weight": torch.ones(7, 1, 4)})
    with pytest.raises(ValueError, match="layer 1 of this model is no linear-attention layer"):
        adapter.from_hf({"model.layers.1.linear_attn.conv1d.weight": torch.ones(160, 1, 4)})
    with pytest.raises(ValueError, match=r"given twice"):
        adapter.from_hf({"model.norm.weight": torch.ones(1), "model.language_model.norm.weight": torch.ones(1)})


@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_of_transformers_loads_here_and_ours_loads_there(tied, tmp_path):
    torch.manual_seed(0)
    theirs = perturb(transformers.Qwen3_5ForCausalLM(hf_config(tie_word_embeddings=tied)))
    theirs.save_pretrained(tmp_path / "theirs")
    config = Qwen3_5Model.Config.from_hf_config(tmp_path / "theirs")
    adapter = Qwen3_5StateDictAdapter(config)
    stored = safetensors.torch.load_file(tmp_path / "theirs" / "model.safetensors")
    ours = config.build()
    ours.load_state_dict(adapter.from_hf(stored))
    assert (ours.lm_head.weight is ours.embed_tokens.weight) is tied

    written = adapter.to_hf(ours.state_dict())
    same(written, stored)
    (tmp_path / "ours").mkdir()
    safetensors.torch.save_file(written, tmp_path / "ours" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "ours" / "config.json").write_text(json.dumps(adapter.hf_config()), encoding="utf-8")
    again, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    same(dict(again.state_dict()), dict(theirs.state_dict()))
    ids = torch.randint(0, 101, (1, 20))
    assert torch.equal(again(ids, use_cache=False).logits, theirs(ids, use_cache=False).logits)
