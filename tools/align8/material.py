"""What all runs share: one initial state with its tokenizer, and one text.

In: an empty folder. Out: `initial/` in Hugging Face's format (config.json, model.safetensors, tokenizer.json) and
`text.jsonl`. Everything follows from fixed seeds.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import torch
from safetensors.torch import save_file

from hp_components import CorpusTokenizer
from hp_components.data import open_corpus
from hp_models.qwen3_5_v2 import Qwen3_5StateDictAdapter, qwen3_5_config

__all__ = ["CORPUS", "INITIAL", "LAYER_TYPES", "make_material"]

INITIAL, CORPUS = "initial", "text.jsonl"
VOCABULARY = 384
LAYER_TYPES = ("linear_attention", "full_attention")


def make_material(folder: Path) -> None:
    """Write the folder, and let the tokenizer train there, not in the user's cache."""
    folder.mkdir(parents=True)
    corpus = folder / CORPUS
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(count=600)), encoding="utf-8")
    tokenizer = CorpusTokenizer.Config(vocab_size=VOCABULARY).build(
        corpus=open_corpus(str(corpus)), cache_dir=folder / "cache"
    )
    tokenizer.save(folder / INITIAL)
    save_initial_state(folder / INITIAL)


def texts(count: int) -> list[str]:
    """Sentences of made-up words, of 5 to 60 words: rows hold ends of documents, so ranks count different tokens."""
    draw = random.Random(7)
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 3))) for _ in range(300)]
    return [" ".join(draw.choices(words, k=draw.randint(5, 60))) for _ in range(count)]


def save_initial_state(folder: Path) -> None:
    """A small hybrid model with one matrix for both ends.

    Every weight is a little off the value that it is usually drawn at: a norm's weight of 0, or a gate of 1, would
    hide an operation that is left out. Some sizes cannot be cut evenly by eight or four ranks.
    """
    config = qwen3_5_config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=100,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        layer_types=LAYER_TYPES,
        rope_theta=10_000.0,
        mrope_section=(2, 1, 1),
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        initializer_range=0.05,
        tie_word_embeddings=True,
        max_position_embeddings=512,
    )
    model = config.build()
    model.init_states(seed=11)
    generator = torch.Generator().manual_seed(12)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    adapter = Qwen3_5StateDictAdapter(config)
    tensors = {name: tensor.contiguous() for name, tensor in adapter.to_hf(model.state_dict()).items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, os.fspath(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(adapter.hf_config(), indent=2) + "\n", encoding="utf-8")
