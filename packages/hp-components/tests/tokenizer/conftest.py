"""Real tokenizer folders of several kinds, made with the library `tokenizers` itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox doesn't.",
    "def main(argv: list[str]) -> int:\n    for i in range(10):\n        print(i * 3.14)\n    return 0\n",
    "Füße, naïve café, 你好世界, здравствуй мир, 🙂🙃 and\ttabs  and   spaces\r\n",
] * 4


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hp-cache"
    monkeypatch.setenv("HP_CACHE_DIR", str(folder))
    return folder


def byte_level_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def split_bpe() -> Tokenizer:
    """As the Qwens have it: rules of their own cut text into words, which are then bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    rules = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(rules), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def plain_bpe() -> Tokenizer:
    """Of characters, cut at white space; what it has not seen is unknown."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder(suffix="")
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<eos>"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def metaspace_bpe() -> Tokenizer:
    """As Llama 2 has it: spaces are part of the tokens, unknown characters fall back to bytes, BOS in a template."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False, max_token_length=12
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def unigram() -> Tokenizer:
    """As T5 has it: EOS in a template."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", tokenizer.token_to_id("</s>"))]
    )
    return tokenizer


def word_piece() -> Tokenizer:
    """As BERT has it: [CLS] and [SEP], which are neither BOS nor EOS."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    ids = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    return tokenizer


KINDS: dict[str, tuple[Callable[[], Tokenizer], dict[str, object]]] = {
    "byte-level BPE": (byte_level_bpe, {"eos_token": "<|endoftext|>", "bos_token": None}),
    "split BPE": (split_bpe, {"eos_token": "<|endoftext|>"}),
    "plain BPE": (plain_bpe, {"eos_token": "<eos>", "unk_token": "<unk>"}),
    "metaspace BPE": (metaspace_bpe, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "unigram": (unigram, {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}),
    "WordPiece": (word_piece, {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}),
    "with added tokens": (
        byte_level_bpe,
        {
            "eos_token": {
                "__type": "AddedToken",
                "content": "<|im_end|>",
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            },
            "added_tokens_decoder": {
                "400": {"content": "<|im_start|>", "special": True, "normalized": False},
                "401": {"content": "<|im_end|>", "special": True, "normalized": False},
                "402": {"content": "<tool>", "special": False, "normalized": False},
            },
        },
    ),
    # The keys that tokenizer.json overrules.
    "BOS refused elsewhere": (metaspace_bpe, {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}),
    "EOS asked for elsewhere": (unigram, {"eos_token": "</s>", "add_eos_token": False, "add_bos_token": True}),
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tokenizer folder for each kind."""
    made = {}
    for kind, (make, config) in KINDS.items():
        folder = made[kind] = tmp_path_factory.mktemp("tokenizer")
        make().save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config})
        )
    return made


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


@pytest.fixture
def bpe_files(tmp_path: Path) -> Path:
    """vocab.json and merges.txt, nothing else."""
    folder = tmp_path / "gpt2"
    folder.mkdir()
    byte_level_bpe().model.save(str(folder))
    assert sorted(path.name for path in folder.iterdir()) == ["merges.txt", "vocab.json"]
    return folder


@pytest.fixture
def truncating_file(tmp_path: Path) -> Path:
    """A tokenizer.json that remembers to cut texts to 4 tokens, and to fill them up to 9."""
    tokenizer = byte_level_bpe()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    tokenizer.add_special_tokens([AddedToken("<pad>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"
