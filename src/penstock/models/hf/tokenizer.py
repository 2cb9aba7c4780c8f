"""The tokenizer in a Hugging Face folder. transformers is imported only where there is no tokenizer.json."""

from pathlib import Path

import tokenizers

from penstock.errors import ModelError, ModelFileError
from penstock.models.hf.folder import read_json
from penstock.models.reading import Fields, first_line, reading, trusting
from penstock.models.text.tokenizer import SpecialTokens, Tokenizer

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")
_MAX_TEMPLATE_BYTES = 1 << 20


def folder_tokenizer(path: Path) -> Tokenizer:
    with trusting(f"{path} holds an unusable tokenizer"), reading(path):
        return _folder_tokenizer(path)


def _folder_tokenizer(path: Path) -> Tokenizer:
    config = _read(path / "tokenizer_config.json")
    special_map = _read(path / "special_tokens_map.json")
    backend = _backend(path)
    texts = {role: _token_text(config, role) or _token_text(special_map, role) for role in _ROLES}
    names = {role: text for role, text in texts.items() if text}
    known = {role: token for role, text in names.items() if (token := backend.token_to_id(text)) is not None}
    # A token with a role is special even where tokenizer.json has it as a word like others.
    added = backend.get_added_tokens_decoder()
    backend.add_special_tokens([names[role] for role, token in known.items() if token not in added])
    special = SpecialTokens(
        eos_ids=(known["eos_token"],) if "eos_token" in known else (),
        names=names,
    )
    return Tokenizer(backend, special, _chat_template(path, config))


def _backend(path: Path) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    if file.is_file():
        with trusting(f"{file} is not a usable tokenizer"):
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


def _token_text(fields: Fields, role: str) -> str | None:
    """A special token's text, which is a string or an object around one."""
    value = fields.values.get(role)
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise fields.error(role, value, "a token")
    return value


def _read(file: Path) -> Fields:
    return Fields(str(file), read_json(file) if file.is_file() else {})
