"""The files of a tokenizer folder, read and written.

In: a folder with tokenizer.json, or vocab.json and merges.txt, and the JSON files beside it that name special tokens.
Out: a `TokenizerFolder`; `write_folder` writes one that transformers reads too.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from hp_protocols.errors import ConfigError, Fault, nearest

__all__ = ["TokenizerFolder", "read_folder", "write_folder"]

log = logging.getLogger(__name__)

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# The tokenizer classes whose vocab.json + merges.txt mean GPT-2's byte-level rules. The two files do not say how text
# is cut into words, so those of another class would give wrong ids without a word.
_GPT2_CLASSES = {"GPT2Tokenizer", "GPT2TokenizerFast", "RobertaTokenizer", "RobertaTokenizerFast"}
# Carried along by `save`, as others read them.
_CARRIED_FILES = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json")
_MORE_TEMPLATES = "additional_chat_templates"
# Vocabularies that say neither how text is cut into words nor how it is normalised, and what they are.
_UNREAD_FILES = {
    "tokenizer.model": "a sentencepiece model",
    "spiece.model": "a sentencepiece model",
    "vocab.txt": "a WordPiece vocabulary",
    "tiktoken.model": "a tiktoken vocabulary",
}


@dataclass(frozen=True, slots=True)
class TokenizerFolder:
    """A tokenizer and what is known about it.

    Attributes:
        config: the content of tokenizer_config.json.
        carried: other files of the folder, by name.
        special_tokens: the tokens with a name of their own (bos_token, eos_token …), as chat templates know them.
        chat_template: the Jinja source of the folder's chat template.
    """

    tokenizer: Tokenizer
    bos_token: str | None
    eos_token: str | None
    config: Mapping[str, Any] = field(default_factory=dict)
    carried: Mapping[str, bytes] = field(default_factory=dict)
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None

    @property
    def bos_id(self) -> int | None:
        return None if self.bos_token is None else self.tokenizer.token_to_id(self.bos_token)

    @property
    def eos_id(self) -> int | None:
        return None if self.eos_token is None else self.tokenizer.token_to_id(self.eos_token)


def read_folder(given: str | os.PathLike[str], *, where: str = "tokenizer.tokenizer_path") -> TokenizerFolder:
    """Read a tokenizer folder (or its tokenizer.json).

    Raises:
        ConfigError: nothing there, files missing, unreadable or contradicting each other.
    """
    path = Path(given).expanduser()
    if not str(given) or not path.exists():
        raise ConfigError(_missing(path, str(given), where))
    folder = path if path.is_dir() else path.parent
    config = _read_json(folder / "tokenizer_config.json")
    has_file = not path.is_dir() or (folder / "tokenizer.json").is_file()
    tokenizer = _load(path, config, where)
    # A tokenizer.json may carry the truncation and padding of its last use, which would cut documents short.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokens_map, model_config = _read_json(folder / "special_tokens_map.json"), _read_json(folder / "config.json")
    named = {
        key: _token(source[key], key, folder)
        for source in (tokens_map, config)
        for key in _NAMED_TOKENS
        if key in source
    }
    _add_special_tokens(tokenizer, config, [token for token in named.values() if token is not None], folder)
    bos, eos = (_special(key, named, model_config, tokenizer) for key in ("bos", "eos"))
    if not has_file:
        _apply_bos_and_eos_keys(tokenizer, config, {"bos": bos, "eos": eos})
    elif keys := [key for key in ("add_bos_token", "add_eos_token") if key in config]:
        # As in transformers 5: a tokenizer.json decides for itself, by its post-processor.
        log.info("%s: tokenizer.json decides about BOS and EOS; %s not used", folder, " and ".join(keys))
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))
    return TokenizerFolder(
        tokenizer=tokenizer,
        bos_token=bos,
        eos_token=eos,
        config=config,
        carried=_carried(folder),
        special_tokens={key: token.content for key, token in named.items() if token is not None},
        chat_template=_chat_template(folder, config),
    )


def _carried(folder: Path) -> dict[str, bytes]:
    more = sorted((folder / _MORE_TEMPLATES).glob("*.jinja"))
    files = [folder / name for name in _CARRIED_FILES if (folder / name).is_file()] + more
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The folder's template: that of its own file, else the one in tokenizer_config.json (of several, the default)."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(Fault(str(file), f"cannot be read: {error}")) from error
    given = config.get("chat_template")
    if isinstance(given, list):
        try:
            given = {str(entry["name"]): entry["template"] for entry in given}
        except (TypeError, KeyError) as error:
            where = f"{folder / 'tokenizer_config.json'}: chat_template"
            allowed = "text, or a list of objects with `name` and `template`"
            raise ConfigError(Fault(where, "is not as it should be", allowed=allowed)) from error
        log.info("%s: of the chat templates %s the one named default is used", folder, ", ".join(given))
        given = given.get("default")
    return given if isinstance(given, str) else None


def write_folder(content: TokenizerFolder, folder: str | os.PathLike[str]) -> None:
    """Write tokenizer.json, tokenizer_config.json and the files carried along."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    config = dict(content.config)
    config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    for key, token in (("bos_token", content.bos_token), ("eos_token", content.eos_token)):
        if token is not None:
            config.setdefault(key, token)
    files = dict(content.carried)
    files["tokenizer.json"] = content.tokenizer.to_str(pretty=True).encode()
    files["tokenizer_config.json"] = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    for name, data in files.items():
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_bytes(data)


def _missing(path: Path, given: str, where: str) -> Fault:
    allowed = "a folder with tokenizer.json, or with vocab.json and merges.txt"
    if not given:
        return Fault(where, "is empty", allowed=allowed)
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    close = nearest(path.name, beside)
    return Fault(
        where,
        f"{given!r} does not exist",
        allowed=allowed,
        hint=f"did you mean {path.parent / close}?"
        if close
        else "a model's folder of the Hugging Face hub has them; download it first, nothing is downloaded from here",
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ConfigError(
            Fault(f"{path}:{error.lineno}", f"is not JSON: {error.msg} at column {error.colno}")
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(Fault(str(path), f"cannot be read: {error}")) from error
    if not isinstance(content, dict):
        raise ConfigError(Fault(str(path), "is not a JSON object"))
    return content


def _load(path: Path, config: Mapping[str, Any], where: str) -> Tokenizer:
    """The library's tokenizer from whichever files are there."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        try:
            return Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception for every kind of bad file
            raise ConfigError(Fault(str(file), f"is no tokenizer file of the library `tokenizers`: {error}")) from error
    vocab, merges = path / "vocab.json", path / "merges.txt"
    if vocab.is_file() and merges.is_file():
        return _load_bpe(vocab, merges, config)
    there = ", ".join(sorted(entry.name for entry in path.iterdir())[:12]) or "nothing"
    looked_for = "looked for tokenizer.json and for vocab.json + merges.txt"
    unread = "".join(
        f"; {name} is {kind}, which is not read" for name, kind in _UNREAD_FILES.items() if (path / name).is_file()
    )
    raise ConfigError(
        Fault(
            where,
            f"no tokenizer in {str(path)!r}: {looked_for}; found {there}{unread}",
            hint="transformers turns other kinds into one: AutoTokenizer.from_pretrained(a).save_pretrained(b)",
        )
    )


def _load_bpe(vocab: Path, merges: Path, config: Mapping[str, Any]) -> Tokenizer:
    kind = config.get("tokenizer_class")
    if kind is not None and kind not in _GPT2_CLASSES:
        raise ConfigError(
            Fault(
                str(vocab),
                f"vocab.json and merges.txt do not say how {kind} cuts text into words",
                allowed="tokenizer.json, or these two files of a " + " or ".join(sorted(_GPT2_CLASSES)),
                hint="write tokenizer.json with transformers: AutoTokenizer.from_pretrained(a).save_pretrained(b)",
            )
        )
    if kind is None:
        log.info("%s: no tokenizer_class is given; reading the files as GPT-2's", vocab.parent)
    try:
        tokenizer = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    except Exception as error:  # as above: plain Exception
        raise ConfigError(
            Fault(f"{vocab} with {merges.name}", f"cannot be read as a BPE vocabulary: {error}")
        ) from error
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space", False)))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def _token(value: object, key: str, folder: Path) -> AddedToken | None:
    """A special token as the files write it: null, a string, or an object with its content and flags."""
    if value is None:
        return None
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        flags = {flag: bool(value[flag]) for flag in ("single_word", "lstrip", "rstrip", "normalized") if flag in value}
        return AddedToken(value["content"], special=bool(value.get("special", True)), **flags)
    raise ConfigError(Fault(f"{folder}: {key}", f"is {value!r}", allowed="a string, or an object with `content`"))


def _add_special_tokens(tokenizer: Tokenizer, config: Mapping[str, Any], named: list[AddedToken], folder: Path) -> None:
    """Add the tokens that only the files beside know, and see that they get the ids written there."""
    where = f"{folder / 'tokenizer_config.json'}: added_tokens_decoder"
    try:
        decoder = {
            int(index): _token(value, f"added_tokens_decoder.{index}", folder)
            for index, value in config.get("added_tokens_decoder", {}).items()
        }
    except (AttributeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(Fault(where, "is not as it should be", allowed="an object of ids and tokens")) from error
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    wanted = [token for _, token in sorted(decoder.items()) if token is not None] + named
    tokenizer.add_tokens([token for token in wanted if token.content not in known])
    wrong = {
        token.content: (index, tokenizer.token_to_id(token.content))
        for index, token in decoder.items()
        if token is not None
    }
    faults = [
        Fault(where, f"{content!r} has id {index} there, but {actual} in the tokenizer")
        for content, (index, actual) in wrong.items()
        if index != actual
    ]
    if faults:
        raise ConfigError(faults)


def _special(
    key: str, named: Mapping[str, AddedToken | None], model_config: Mapping[str, Any], tokenizer: Tokenizer
) -> str | None:
    """The BOS or EOS token: by name from the tokenizer's files, else by id from the model's config.json.

    A null in the tokenizer's files counts: it says that there is none.
    """
    if f"{key}_token" in named:
        token = named[f"{key}_token"]
        return None if token is None else token.content
    index = model_config.get(f"{key}_token_id")
    if isinstance(index, list):
        index = index[0] if index else None
    return tokenizer.id_to_token(index) if isinstance(index, int) else None


def _apply_bos_and_eos_keys(tokenizer: Tokenizer, config: Mapping[str, Any], tokens: Mapping[str, str | None]) -> None:
    """Do what add_bos_token and add_eos_token of tokenizer_config.json say, for a folder without tokenizer.json."""
    wanted = {key: token for key, token in tokens.items() if token is not None and config.get(f"add_{key}_token")}
    if wanted:
        template = f"{wanted.get('bos', '')} $A {wanted.get('eos', '')}".strip()
        ids = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(wanted.values())]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
