"""The tokenizer in a Hugging Face folder. transformers is imported only where there is no tokenizer.json."""

import base64
import json
import math
import struct
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from penstock.errors import ModelError, ModelFileError
from penstock.models.hf.folder import read_json
from penstock.models.reading import Fields, first_line, reading, shortened, trusting
from penstock.models.text.tokenizer import MAX_TOKENS, SpecialTokens, Tokenizer

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_MAX_TEMPLATE_BYTES = 1 << 20
_MAX_TOKENIZER_BYTES = 32 << 20
# How many times longer a text may become before it is cut into tokens, and how often its tokens may be repeated: real
# files stay below 40, and repeat nothing. Tokens put around a text, steps of a part of the file, letters of an affix.
_MAX_GROWTH, _MAX_REPEATS, _MAX_AROUND, _MAX_STEPS, _MAX_AFFIX = 64, 2, 1000, 64, 256
_PARTS = ("normalizer", "pre_tokenizer", "decoder")
_LISTS = ("normalizers", "pretokenizers", "processors", "decoders")
_MAX_WORD = 1000  # of WordPiece, which takes the square of it
# Runs of characters that regular expressions are tried on, beside those they name: those of real files take 2 ms for
# one, what grows with the square of a text 200.
_RUNS, _RUN_LENGTH, _MOST_RUN_S = " \n1aA.中", 10_000, 0.05
_MAX_PATTERN = 2048  # characters; real ones have 300


def folder_tokenizer(path: Path, vocab_size: int | None = None) -> Tokenizer:
    """With all tokens that its files name, as in transformers, but for those that a model of `vocab_size` has not."""
    with trusting(f"{path} holds an unusable tokenizer"), reading(path):
        return _folder_tokenizer(path, vocab_size)


def _folder_tokenizer(path: Path, vocab_size: int | None) -> Tokenizer:
    config = _read(path / "tokenizer_config.json")
    backend = _backend(path)
    has_decoder = config.has("added_tokens_decoder")
    # Where the tokens are not described, older files count, and before this one.
    older = {} if has_decoder else _read(path / "special_tokens_map.json").values
    tokens = replace(config, values={**config.values, **older})
    roles = [*_ROLES, *(key for key in tokens.values if key.endswith("_token") and key not in _ROLES)]
    found = {role: token for role in roles if (token := _token(tokens, role)) is not None}
    extra = _extra_tokens(tokens)
    described = _described_tokens(config) if has_decoder else []
    texts = {token.content for token in described} | {
        token.content for token in backend.get_added_tokens_decoder().values()
    }
    # A token with a role is special even where tokenizer.json has it as a word like others.
    named = [token for token in (*found.values(), *extra) if token.content not in texts]
    _add_tokens(backend, [*described, *named], vocab_size)
    backend.encode_special_tokens = config.boolean("split_special_tokens", False)
    for token in backend.get_added_tokens_decoder().values():
        if (
            token.lstrip or token.rstrip
        ) and token.content.isspace():  # each would look at all white space again
            raise ModelFileError(
                f"{path}: a token of white space that takes the white space around it is absurd"
            )

    names = {role: token.content for role, token in found.items()}
    eos = backend.token_to_id(names["eos_token"]) if "eos_token" in names else None
    special = SpecialTokens(eos_ids=() if eos is None else (eos,), names=names)
    ignored = None
    if config.has("add_prefix_space") and config.boolean("add_prefix_space") != _adds_space(backend):
        ignored = "add_prefix_space of tokenizer_config.json: tokenizer.json says otherwise"
    return Tokenizer(backend, special, _chat_template(path, config), ignored=ignored)


def _add_tokens(backend: tokenizers.Tokenizer, tokens: list[AddedToken], vocab_size: int | None) -> None:
    room = sys.maxsize if vocab_size is None else vocab_size - backend.get_vocab_size()
    wanted = []
    for token in tokens:
        is_new = token.content and backend.token_to_id(token.content) is None
        if not is_new or room > 0:
            wanted.append(token)
            room -= bool(is_new)
    backend.add_tokens(wanted)


def _described_tokens(config: Fields) -> list[AddedToken]:
    described = config.nested("added_tokens_decoder")
    if not all(key.isdecimal() and len(key) < 10 for key in described.values):
        raise config.error("added_tokens_decoder", list(described.values), "an object of tokens by their ids")
    keys = sorted(described.values, key=int)
    return [token for key in keys if (token := _token(described, key, is_special=False)) is not None]


def _extra_tokens(fields: Fields) -> list[AddedToken]:
    """Special tokens without a role, under the key of today or that of older files."""
    for key in ("extra_special_tokens", "additional_special_tokens"):
        value = fields.values.get(key)
        if isinstance(value, dict):  # with names of their own
            value = list(value.values())
        if not isinstance(value, list | None):
            raise fields.error(key, value, "a list of tokens")
        if value:
            listed = Fields(f"{fields.origin}: {key}", {str(place): each for place, each in enumerate(value)})
            return [token for place in listed.values if (token := _token(listed, place)) is not None]
    return []


def _token(fields: Fields, key: str, *, is_special: bool = True) -> AddedToken | None:
    """A token, which is a string or an object around one; keys like `add_bos_token` are none."""
    value = fields.values.get(key)
    if isinstance(value, str):
        return AddedToken(value, special=is_special) if value else None
    if value is None or (key.endswith("_token") and isinstance(value, bool)):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise fields.error(key, value, "a token")
    flags = Fields(f"{fields.origin}: {key}", value)
    given = {flag: flags.boolean(flag) for flag in _FLAGS if flags.has(flag)}
    return AddedToken(value["content"], **(given | {"special": True} if is_special else given))


def _adds_space(backend: tokenizers.Tokenizer) -> bool:
    """Whether a text is read as if a space stood before it."""
    parts = [part for part in (backend.normalizer, backend.pre_tokenizer) if part is not None]
    steps = [step for part in parts for step in _steps(json.loads(part.__getstate__()))]
    return any(
        step.get("add_prefix_space")
        or step.get("prepend")
        or step.get("prepend_scheme") in ("always", "first")
        for step in steps
    )


def _backend(path: Path) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    if file.is_file():
        with trusting(f"{file} is not a usable tokenizer"):
            content = read_json(file, _MAX_TOKENIZER_BYTES)
            _check_growth(content)
            _check_patterns(content)
            del content  # several times as large as the file
            return tokenizers.Tokenizer.from_file(str(file))
    try:
        from transformers import AutoTokenizer

        made = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        backend: tokenizers.Tokenizer = made.backend_tokenizer
        return backend
    except Exception as error:  # anything from a missing file to a missing package
        raise ModelError(
            f"{path} has no tokenizer.json, and transformers makes none: {first_line(error)}"
        ) from error


def _chat_template(path: Path, config: Fields) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        with trusting(f"cannot read {file}"):
            if file.stat().st_size > _MAX_TEMPLATE_BYTES:
                raise ModelFileError(f"{file} is absurdly large for a chat template")
            return file.read_text(encoding="utf-8")
    for fields in (_read(path / "chat_template.json"), config):
        template = fields.values.get("chat_template")
        if isinstance(template, list):  # several templates, by name
            named = {
                entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)
            }
            template = named.get("default")
        if isinstance(template, str):
            return template
        if template is not None:
            raise fields.error("chat_template", template, "a template or a list with one named default")
    return None


def _check_growth(content: dict[str, Any]) -> None:
    """A ValueError where a text or its tokens may become many times longer than they are, by the file's rules."""
    growth = math.prod(map(_growth, _steps(content.get("normalizer"))))
    growth *= math.prod(map(_growth, _steps(content.get("pre_tokenizer"))))
    decoded = math.prod(map(_growth, _steps(content.get("decoder"))))
    if max(growth, decoded) > _MAX_GROWTH:
        raise ValueError(f"its steps may make a text {max(growth, decoded):.4g} times longer")
    repeats, num_around = 1, 0
    for step in _steps(content.get("post_processor")):
        pieces = step.get("single") or ()
        repeats *= max(sum("Sequence" in piece for piece in pieces), 1)
        tokens = step.get("special_tokens") or {}
        for piece in pieces:
            name = piece.get("SpecialToken", {}).get("id")
            num_around += len(tokens[name].get("ids", ())) if name in tokens else 0
    if repeats > _MAX_REPEATS or num_around > _MAX_AROUND:
        raise ValueError(f"its post-processor repeats a text {repeats} times with {num_around} tokens around")
    model = content.get("model") or {}
    for affix in ("continuing_subword_prefix", "end_of_word_suffix"):
        if len(model.get(affix) or "") > _MAX_AFFIX:
            raise ValueError(f"its {affix} is absurdly long")
    for part in (model.get("vocab"), model.get("merges"), content.get("added_tokens")):
        if part is not None and len(part) > MAX_TOKENS:
            raise ValueError(f"{len(part)} tokens or merges are absurd")
    if (model.get("max_input_chars_per_word") or 0) > _MAX_WORD:
        raise ValueError(f"its max_input_chars_per_word is more than {_MAX_WORD}")


def _check_patterns(content: dict[str, Any]) -> None:
    """A ValueError where a regular expression takes time that grows with the square of a text, or worse: by long runs
    of one character, what may spoil a match behind them, and the letters without which nobody would try one."""
    for step in (step for part in _PARTS for step in _steps(content.get(part))):
        match step:
            case {"pattern": {"Regex": str(pattern)}}:
                if len(pattern) > _MAX_PATTERN:
                    raise ValueError(f"its regular expression {shortened(pattern)} is absurdly long")
                split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "removed")
                for character in dict.fromkeys(_RUNS + pattern):
                    began_s = time.thread_time()
                    split.pre_tokenize_str(character * _RUN_LENGTH + "\0" + pattern)
                    if time.thread_time() - began_s > _MOST_RUN_S:
                        raise ValueError(
                            f"its regular expression {shortened(pattern)} is slow for long texts"
                        )


def _steps(part: Any) -> list[dict[str, Any]]:
    """The steps of a part of tokenizer.json, in their order. Older files have no types."""
    if part is None:
        return []
    lists = [part[name] for name in _LISTS if name in part]
    if not lists:
        return [part]
    steps = [step for listed in lists for each in listed for step in _steps(each)]
    if len(steps) > _MAX_STEPS:
        raise ValueError(f"it has {len(steps)} steps where {_MAX_STEPS} are plenty")
    return steps


def _growth(step: dict[str, Any]) -> float:
    """How many times more bytes a step may make of a text. Unicode's own forms are not counted: applied again, they
    change nothing more."""
    match step:
        case {"pattern": {"String": str(old)}, "content": str(new)} if old:
            return max(_num_bytes(new) / _num_bytes(old), 1)
        case {"pattern": _, "content": str(new)} | {"prepend": str(new)}:
            return 1 + _num_bytes(new)
        case {"precompiled_charsmap": str(packed)}:
            # A trie, then what characters become: the longest that Unicode has is of 33 bytes.
            table = base64.b64decode(packed)
            strings = table[4 + struct.unpack_from("<I", table)[0] :].split(b"\0")
            return max(*map(len, strings), 8) / 8
        case {"replacement": str(mark)}:
            return 1 + _num_bytes(mark)
        case {"type": "ByteLevel"} | {"trim_offsets": _}:
            return 2
    return 1


def _num_bytes(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


def _read(file: Path) -> Fields:
    return Fields(str(file), read_json(file) if file.is_file() else {})
