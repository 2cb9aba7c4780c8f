"""Tokenizers agree with transformers, or with llama.cpp's definition where that is the file's."""

import base64
import json
import os
import struct
import time
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2_SPLIT

from penstock.errors import ModelError, ModelFileError, PromptError
from penstock.models.gguf import tokenizer as gguf_tokenizer_module
from penstock.models.gguf.header import read_header
from penstock.models.gguf.tokenizer import gguf_tokenizer
from penstock.models.hf.tokenizer import folder_tokenizer
from penstock.models.opened import open_model
from penstock.models.text.tokenizer import Tokenizer
from tests.models.builders import SCORES, TOKENIZER, TOKENS, write_gguf

TEXTS = [
    "",
    " ",
    "\n",
    "Hello world, this isn't hard: it's what we'll do.",
    "WE'RE SHOUTING, AREN'T WE?",
    "def f(x: int) -> int:\n\treturn x ** 2  # squared\n\n\nclass A:\n    pass\n",
    "1234567890 3.14159 -1,000,000 0x1F",
    "naïve café Ωμέγα Привет мир 你好世界 日本語テキスト العربية हिन्दी",
    "🎉 👨‍👩‍👧‍👦 🇩🇪 ✌🏽",
    "   leading,   inner     and trailing   \n \n  ",
    "\t\ttabs\r\nand\r\rreturns\u00a0\u3000\u200b",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name>x",
    "x" * 300,
    "e\u0301 (combining) ﬁ ½ \ufeff \ufffd \x00 \x7f",
]
CORPUS = [text for text in TEXTS if text] * 3


def byte_level_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def save_folder(folder: Path, backend: tokenizers.Tokenizer, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config})
    )
    return folder


def oracle(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(str(folder))


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return open_model(smollm2_path).tokenizer


@pytest.fixture(scope="module")
def smollm2_oracle(smollm2_path: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(str(smollm2_path.parent), gguf_file=smollm2_path.name)


@pytest.mark.parametrize("text", [text for text in TEXTS if "½" not in text])
def test_the_default_model_encodes_as_transformers_does(
    smollm2: Tokenizer, smollm2_oracle: Any, text: str
) -> None:
    ids = smollm2.encode(text, add_special_tokens=True)
    assert ids == smollm2_oracle.encode(text)
    assert smollm2.decode(ids, skip_special=False) == smollm2_oracle.decode(ids) == text
    assert smollm2.decode(ids) == smollm2_oracle.decode(ids, skip_special_tokens=True)


def test_the_default_model_splits_every_digit_off(smollm2: Tokenizer) -> None:
    """As its own tokenizer.json and llama.cpp have it: any numeric character, where transformers, reading the
    GGUF, keeps those beyond ASCII with their neighbours."""
    for text, digits in (("a 12 b", 2), ("½ ² Ⅷ", 3), ("a٣٤b", 2)):
        pieces = [smollm2.encode(part, add_special_tokens=False) for part in _around_digits(text)]
        assert list(chain(*pieces)) == smollm2.encode(text, add_special_tokens=False)
        assert len([part for part in _around_digits(text) if part.isnumeric()]) == digits


def _around_digits(text: str) -> list[str]:
    parts = [""]
    for character in text:
        if character.isnumeric():
            parts += [character, ""]
        else:
            parts[-1] += character
    return [part for part in parts if part]


def test_the_default_model_s_tokens(smollm2: Tokenizer, smollm2_oracle: Any) -> None:
    assert smollm2.vocab_size == len(smollm2_oracle)
    assert [smollm2.decode([token], skip_special=False) for token in smollm2.eos_ids] == [
        "<|im_end|>",
        "<|endoftext|>",
    ]


CHATS = [
    [{"role": "user", "content": "What is 2 & 2 <now>?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  hi\n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b 🎉"},
        {"role": "user", "content": "<|im_end|> inside"},
    ],
]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
def test_the_default_model_s_chats(
    smollm2: Tokenizer, smollm2_oracle: Any, chat: list[dict[str, str]], prompt: bool
) -> None:
    assert smollm2.has_chat_template
    text = smollm2.render_chat(chat, add_generation_prompt=prompt)
    assert text == smollm2_oracle.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
    if prompt:
        theirs = smollm2_oracle.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert smollm2.encode_chat(chat) == theirs


@settings(deadline=None, max_examples=60)
@given(text=st.text(st.characters(exclude_categories=["Cs", "Cc", "Cn", "Co"]), max_size=80))
def test_text_survives_the_default_model_s_round_trip(smollm2: Tokenizer, text: str) -> None:
    """Its vocabulary lacks some control characters, so these are left out here."""
    assert smollm2.decode(smollm2.encode(text, add_special_tokens=False), skip_special=False) == text


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_decode_equals_the_library_s(smollm2: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, smollm2.vocab_size - 1), max_size=40))
    for skip in (True, False):
        theirs = smollm2._backend.decode(ids, skip_special_tokens=skip)
        assert smollm2.decode(ids, skip_special=skip) == theirs


@pytest.mark.parametrize("adds", [None, (True, False), (False, True), (True, True), (False, False)])
@pytest.mark.parametrize("template", [False, True])
def test_a_folder_encodes_as_transformers_does(
    tmp_path: Path, adds: tuple[bool, bool] | None, template: bool
) -> None:
    """The post-processor in tokenizer.json decides, whatever tokenizer_config.json says."""
    backend = byte_level_backend()
    if template:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    backend.enable_truncation(4)  # must not cut a prompt
    config: dict[str, Any] = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}}
    if adds:
        config |= {"add_bos_token": adds[0], "add_eos_token": adds[1]}
    folder = save_folder(tmp_path, backend, config)
    ours, theirs = folder_tokenizer(folder), oracle(folder)
    for text in TEXTS:
        for special in (True, False):
            assert ours.encode(text, add_special_tokens=special) == theirs.encode(
                text, add_special_tokens=special, truncation=False
            )
    assert ours.eos_ids == (theirs.eos_token_id,)


def test_tokens_with_a_role_are_special(tmp_path: Path) -> None:
    state = json.loads(byte_level_backend().to_str())
    state["added_tokens"] = []
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    folder = save_folder(tmp_path, backend, {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<none>"})
    ours = folder_tokenizer(folder)
    ids = ours.encode("<s>hi</s>", add_special_tokens=False)
    assert ids == oracle(folder).encode("<s>hi</s>", add_special_tokens=False)
    assert ours.decode(ids) == "hi"


def sentence_piece_backend(prefixed: bool) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
        limit_alphabet=60,
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.train_from_iterator(CORPUS, trainer)
    if prefixed:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), backend.normalizer])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefixed else []),
        ]
    )
    # Training makes every one of them special; only three are.
    state = json.loads(backend.to_str())
    state["added_tokens"] = state["added_tokens"][:3]
    return tokenizers.Tokenizer.from_str(json.dumps(state))


@pytest.mark.parametrize("prefixed", [True, False])
def test_a_sentence_piece_folder(tmp_path: Path, prefixed: bool) -> None:
    folder = save_folder(
        tmp_path, sentence_piece_backend(prefixed), {"bos_token": "<s>", "eos_token": "</s>"}
    )
    ours, theirs = folder_tokenizer(folder), oracle(folder)
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids) == text


def test_a_folder_without_tokenizer_json_goes_through_transformers(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.model.save(str(tmp_path))  # vocab.json and merges.txt
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Qwen2Tokenizer", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "</s>"}'
    )
    ours = folder_tokenizer(tmp_path)
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=True) == oracle(tmp_path).encode(text)


def token(content: str, **flags: bool) -> dict[str, Any]:
    plain = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    return {"content": content, **plain, **flags}


@pytest.mark.parametrize("prefixed", [None, True])
@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"added_tokens_decoder": {"401": token("<more>", lstrip=True), "400": token("<extra>")}}, {}),
        ({"added_tokens_decoder": {"0": token("<s>", rstrip=True), "9": token("he", special=False)}}, {}),
        (
            {
                "additional_special_tokens": [
                    "<extra>",
                    {"__type": "AddedToken", **token("<more>", rstrip=True)},
                ]
            },
            {},
        ),
        ({"extra_special_tokens": ["<more>"], "additional_special_tokens": ["<extra>"]}, {}),
        ({"extra_special_tokens": {"image_token": "<extra>"}, "video_token": "<more>"}, {}),
        (
            {"mask_token": {"__type": "AddedToken", **token("<more>", lstrip=True)}, "cls_token": "<extra>"},
            {},
        ),
        ({"split_special_tokens": True}, {}),
        ({"split_special_tokens": True, "additional_special_tokens": ["<extra>"]}, {}),
        (
            {"eos_token": "<s>"},
            {"special_tokens_map.json": {"eos_token": "</s>", "sep_token": token("<more>")}},
        ),
        (
            {"added_tokens_decoder": {"0": token("<s>")}, "eos_token": "<s>"},
            {"special_tokens_map.json": {"eos_token": "</s>"}},
        ),
        ({"add_prefix_space": True}, {}),
    ],
)
def test_tokens_of_the_tokenizer_s_configuration(
    tmp_path: Path, prefixed: bool | None, config: dict[str, Any], files: dict[str, Any]
) -> None:
    backend = byte_level_backend() if prefixed is None else sentence_piece_backend(prefixed)
    folder = save_folder(tmp_path, backend, {"bos_token": "<s>", "eos_token": "</s>", **config})
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    ours, theirs = folder_tokenizer(folder), oracle(folder)
    text = "hi there  <s>x <extra> y  <more>  he<mask></s>"
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert ours.eos_ids == (theirs.eos_token_id,)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert (ours.ignored is not None) == ("add_prefix_space" in config and prefixed is None)


def test_tokens_that_the_model_has_not_are_left_out(tmp_path: Path) -> None:
    backend = byte_level_backend()
    folder = save_folder(tmp_path, backend, {"additional_special_tokens": ["<a>", "<b>", "<s>"]})
    size = backend.get_vocab_size()
    for room in range(3):
        ids = folder_tokenizer(folder, size + room).encode("<a><b><s>", add_special_tokens=False)
        assert max(ids) < size + max(room, 1)
        assert len([token for token in ids if token >= size]) == room


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"x": token("a")}},
        {"added_tokens_decoder": {"1": 7}},
        {"added_tokens_decoder": ["a"]},
        {"added_tokens_decoder": {"1": {"content": "a", "lstrip": "no"}}},
        {"additional_special_tokens": "a"},
        {"additional_special_tokens": [[1]]},
        {"eos_token": 7},
        {"eos_token": {"content": 7}},
        {"split_special_tokens": "yes"},
        {"add_prefix_space": 3},
    ],
)
def test_a_damaged_configuration_of_tokens_is_an_error(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = save_folder(tmp_path, byte_level_backend(), config)
    with pytest.raises(ModelFileError, match=next(iter(config))):
        folder_tokenizer(folder)


def replacing(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


CHARSMAP = base64.b64encode(struct.pack("<I", 4) + bytes(4) + b"a" * 10_000 + b"\0").decode()
MULTIPLYING: list[tuple[str, Any]] = [
    ("normalizer", {"type": "Sequence", "normalizers": [replacing("a", "aaaa")] * 20}),
    ("normalizer", {"normalizers": [{"normalizers": [replacing("a", "aaaa")] * 5}] * 5}),
    ("normalizer", replacing("a", "b" * 1000)),
    ("normalizer", replacing("", "b" * 1000)),
    ("normalizer", {"type": "Replace", "pattern": {"Regex": "(?=a)"}, "content": "b" * 1000}),
    ("normalizer", {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "aaaa"}] * 20}),
    ("normalizer", {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 40}),
    ("normalizer", {"type": "Sequence", "normalizers": [{"type": "NFKC"}] * 1000}),
    ("normalizer", {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}),
    (
        "pre_tokenizer",
        {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
            ]
            * 40,
        },
    ),
    (
        "post_processor",
        {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 1000,
            "pair": [],
            "special_tokens": {},
        },
    ),
    (
        "post_processor",
        {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {"x": {"id": "x", "ids": [1] * 10_000, "tokens": ["a"] * 10_000}},
        },
    ),
    ("decoder", {"type": "Sequence", "decoders": [replacing("e", "e" * 1000)]}),
]


@pytest.mark.parametrize(("part", "content"), MULTIPLYING)
def test_a_tokenizer_that_multiplies_is_refused(tmp_path: Path, part: str, content: Any) -> None:
    state = json.loads(byte_level_backend().to_str())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**state, part: content}))
    with pytest.raises(ModelFileError, match=r"tokenizer\.json is not a usable tokenizer: it"):
        folder_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "pattern",
    [r"\s+$", "a+$", "q+$", r"(\s|\n)+x", "(1+)+$", r"[^z]*\.x", "|".join(map(chr, range(256, 2300)))],
)
@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer"])
def test_a_regular_expression_that_is_slow_for_long_texts_is_refused(
    tmp_path: Path, part: str, pattern: str
) -> None:
    state = json.loads(byte_level_backend().to_str())
    step: dict[str, Any] = {"type": "Replace", "pattern": {"Regex": pattern}, "content": "b"}
    if part == "pre_tokenizer":
        step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**state, part: step}))
    began_s = time.monotonic()
    with pytest.raises(ModelFileError, match=r"tokenizer\.json is not a usable tokenizer"):
        folder_tokenizer(tmp_path)
    assert time.monotonic() - began_s < 10


@pytest.mark.parametrize(
    "model",
    [
        {"continuing_subword_prefix": "#" * 1000},
        {"max_input_chars_per_word": 10**9},
        {"merges": ["a b"] * ((1 << 20) + 1)},
    ],
)
def test_a_model_that_multiplies_is_refused(tmp_path: Path, model: dict[str, Any]) -> None:
    state = json.loads(byte_level_backend().to_str())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**state, "model": {**state["model"], **model}}))
    with pytest.raises(ModelFileError, match=next(iter(model))):
        folder_tokenizer(tmp_path)


@pytest.mark.parametrize("flag", ["lstrip", "rstrip"])
@pytest.mark.parametrize("is_described", [False, True])
def test_white_space_that_takes_more_of_it_is_refused(tmp_path: Path, flag: str, is_described: bool) -> None:
    """Wherever it is described: each such token would look at all white space around it."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    token = {"content": "\n ", **flags, flag: True}
    state = json.loads(byte_level_backend().to_str())
    added = [] if is_described else [{"id": 300, **token}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({**state, "added_tokens": added}))
    if is_described:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"300": token}}))
    with pytest.raises(ModelFileError, match="white space"):
        folder_tokenizer(tmp_path)


def test_an_absurdly_large_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    os.truncate(tmp_path / "tokenizer.json", 33 << 20)
    with pytest.raises(ModelFileError, match="absurdly large"):
        folder_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", '{"model": {"type": "BPE"}}', "null"])
def test_a_damaged_tokenizer_json_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        folder_tokenizer(tmp_path)


def test_a_folder_without_any_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        folder_tokenizer(tmp_path)


def test_where_a_chat_template_may_lie(tmp_path: Path) -> None:
    backend = byte_level_backend()
    messages = [{"role": "user", "content": "hi"}]

    def rendered(config: dict[str, Any]) -> str:
        return folder_tokenizer(save_folder(tmp_path, backend, config)).render_chat(messages)

    with pytest.raises(ModelError, match="no chat template"):
        rendered({})
    assert rendered({"chat_template": "config"}) == "config"
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ bos_token }}!"}]
    assert rendered({"chat_template": several, "bos_token": "<s>"}) == "<s>!"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}')
    assert rendered({"chat_template": "config"}) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert rendered({"chat_template": "config"}) == "jinja"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").unlink()
    with pytest.raises(ModelFileError, match="chat_template"):
        rendered({"chat_template": 7})


def from_metadata(tmp_path: Path, **changes: Any) -> Tokenizer:
    values = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    metadata = {key: value for key, value in (TOKENIZER | values).items() if value is not None}
    return gguf_tokenizer(read_header(write_gguf(tmp_path / "t.gguf", metadata, {})).metadata, "t.gguf")


def merge_by_score(text: str) -> list[int]:
    """SentencePiece as llama.cpp has it: merge the pair with the best score, the leftmost of equals."""
    scores = dict(zip(TOKENS, SCORES, strict=True))
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [
            (scores[left + right], -at)
            for at, (left, right) in enumerate(pairwise(symbols))
            if left + right in TOKENS
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids: list[int] = []
    for symbol in symbols:
        ids += [TOKENS.index(symbol)] if symbol in TOKENS else [3 + byte for byte in symbol.encode()]
    return ids


@settings(deadline=None, max_examples=100)
@given(text=st.text(st.sampled_from("ab cé🎉"), max_size=12))
def test_sentence_piece_of_gguf_merges_by_score(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    tokenizer = from_metadata(tmp_path_factory.mktemp("spm"))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == merge_by_score(text)
    assert tokenizer.decode(ids) == text


def test_sentence_piece_options_of_gguf(tmp_path: Path) -> None:
    plain = from_metadata(tmp_path)
    assert plain.encode("a</s>a", add_special_tokens=True) == [
        1,
        262,
        2,
        262,
    ]  # a space after a special one too
    assert plain.eos_ids == (2,)
    bare = from_metadata(tmp_path, add_space_prefix=False, add_bos_token=False, add_eos_token=True)
    assert bare.encode("a", add_special_tokens=True) == [260, 2]
    assert bare.encode("a", add_special_tokens=False) == [260]
    assert bare.decode(bare.encode(" a", add_special_tokens=False)) == " a"


BYTE_LEVEL: dict[str, Any] = {
    "model": "gpt2",
    "tokens": [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "abb", "<think>", "<|eot_id|>"],
    "token_type": [1] * 258 + [4, 3],
    "merges": ["a b"],
    "scores": None,
    "bos_token_id": 259,
    "eos_token_id": 258,
    "unknown_token_id": None,
}


def test_byte_level_options_of_gguf(tmp_path: Path) -> None:
    plain = from_metadata(tmp_path, **BYTE_LEVEL, pre="gpt-2")
    ab, abb, think, eot = 256, 257, 258, 259
    b = plain.encode("b", add_special_tokens=True)[0]
    assert plain.encode("abb<think>ab<|eot_id|>", add_special_tokens=True) == [ab, b, think, ab, eot]
    assert plain.eos_ids == (think, eot)
    assert (
        plain.decode([ab, think, eot]) == "ab<think>"
    )  # user-defined tokens are text, control tokens are not
    # Llama 3 takes a word that is a token as it is, whatever the merges, and begins with its first token.
    llama3 = from_metadata(tmp_path, **BYTE_LEVEL, pre="llama-bpe")
    assert llama3.encode("abb ab", add_special_tokens=True)[:2] == [eot, abb]


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("gpt-2", "It's 1234  now", ["It", "'s", " 1234", " ", " now"]),
        ("smollm", "a 12b", ["a", " ", "1", "2", "b"]),
        ("llama3", "IT'S 12345\n\n x", ["IT", "'S", " ", "123", "45", "\n\n", " x"]),
        ("qwen2", "IT'S 123\n\n x", ["IT", "'S", " ", "1", "2", "3", "\n\n", " x"]),
        ("default", "a, 12345+b", ["a", ",", " ", "123", "45", "+", "b"]),
        ("gpt-4o", "aB IT'S 12345/\n", ["a", "B", " IT'S", " ", "123", "45", "/\n"]),
        ("tekken", "aB IT's 123", ["a", "B", " IT", "'s", " ", "1", "2", "3"]),
        ("kimi-k2", "aB日本IT's 1234/\n本x", ["a", "B", "日本", "IT's", " ", "123", "4", "/\n", "本", "x"]),
        ("kimi-k2", "a日//\n/ の", ["a", "日", "//\n", "/", " の"]),
        ("tiny_aya", "a 12345 b", ["a", " ", "12", "345", " b"]),
        ("seed-coder", "a1!\n\nb", ["a", "1", "!", "\n\n", "b"]),
        ("deepseek-llm", "Hm, Мир 日本12 \n", ["Hm", ",", " Мир", " ", "日本", "12", " ", "\n"]),
        ("deepseek-v3", "a.B 1234日本x!\n", ["a", ".B", " ", "123", "4", "日本", "x", "!\n"]),
    ],
)
def test_splits_before_merging(name: str, text: str, parts: list[str]) -> None:
    found = [text]
    for split in gguf_tokenizer_module._SPLITS[name]:
        splitter = pre_tokenizers.Split(tokenizers.Regex(split), behavior="isolated")
        found = [piece for part in found for piece, _ in splitter.pre_tokenize_str(part)]
    assert found == parts


def test_names_of_splits_are_known_once() -> None:
    names = [name for names in gguf_tokenizer_module._TWINS.values() for name in names.split()]
    assert len({*names, *gguf_tokenizer_module._SPLITS}) == len(names) + len(gguf_tokenizer_module._SPLITS)
    assert {*gguf_tokenizer_module._TWINS} <= {*gguf_tokenizer_module._SPLITS}


@pytest.mark.parametrize(
    ("others", "ends"),
    [
        ((), {256, 257}),
        (("<|return|>", "<|call|>"), {256, 258, 259}),
        (("<|flush|>", "<|calls|>"), {256, 258, 259}),
    ],
)
def test_what_ends_a_turn(tmp_path: Path, others: tuple[str, ...], ends: set[int]) -> None:
    """Where a turn has parts (gpt-oss), the end of a part is none."""
    tokens = [*BYTE_LEVEL["tokens"][:256], "<|endoftext|>", "<|end|>", *others, "ab"]
    kinds = [1] * 256 + [3] * (2 + len(others)) + [1]
    changes = {
        "tokens": tokens,
        "token_type": kinds,
        "bos_token_id": None,
        "eos_token_id": 256,
        "merges": ["a b"],
    }
    assert {*from_metadata(tmp_path, **{**BYTE_LEVEL, **changes}, pre="gpt-4o").eos_ids} == ends


def test_merges_of_whole_characters(tmp_path: Path) -> None:
    """As Gemma 4's files have them: neither bytes nor scores say what is merged."""
    merges = [f"{left} {right}" for left, right in (("a", "b"), ("▁", "ab"))]
    found = from_metadata(tmp_path, model="gemma4", merges=merges, scores=None, add_space_prefix=False)
    assert [TOKENS[each] for each in found.encode("ab ab", add_special_tokens=False)] == ["ab", "▁ab"]
    assert found.decode(found.encode("ab é", add_special_tokens=False)) == "ab é"


def test_qwen2_s_split_is_that_of_transformers() -> None:
    assert gguf_tokenizer_module._SPLITS["qwen2"] == (QWEN2_SPLIT,)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "t5"}, "'t5'; supported in GGUF are gpt2, llama, gemma4"),
        ({**BYTE_LEVEL, "pre": "martian"}, "pre-tokenizer 'martian' is not supported; known are .*smollm"),
        ({**BYTE_LEVEL, "merges": ["a z"]}, "merges is 'a z'"),
        ({**BYTE_LEVEL, "merges": None}, "merges is None"),
        ({"tokens": None}, "tokens is None"),
        ({"tokens": ["a", "a"]}, "token twice"),
        ({"tokens": [1, 2]}, "an array of strings"),
        ({**BYTE_LEVEL, "merges": ["a b"] * ((1 << 20) + 1)}, "1048577 merges are absurd"),
        ({"scores": [1.0]}, "an array of 265 numbers"),
        ({"token_type": [1]}, "an array of 265 integers"),
        ({"bos_token_id": 265}, "bos_token_id is 265"),
        ({"add_bos_token": 1}, "true or false"),
        ({"eos_token_id": [1, 2]}, "eos_token_id"),
    ],
)
def test_an_unusable_tokenizer_in_gguf_is_an_error(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        from_metadata(tmp_path, **changes)


def test_half_a_surrogate_pair_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="Unicode"):
        from_metadata(tmp_path).encode("a\ud800", add_special_tokens=True)


def test_pairs_without_bound_are_refused(tmp_path: Path) -> None:
    """Every cut of a run of one letter makes two tokens: thousands of pairs for a hundred tokens."""
    tokens = ["a" * length for length in range(1, 100)]
    changes = {"tokens": tokens, "scores": [0.0] * 99, "token_type": [1] * 99}
    with pytest.raises(ModelFileError, match="99 tokens are made of more than 1584 pairs"):
        from_metadata(tmp_path, **changes, bos_token_id=None, eos_token_id=None, unknown_token_id=None)


@pytest.mark.parametrize("failure", [ValueError("no such\ntoken"), OverflowError()])
def test_a_tokenizer_that_fails_is_an_error_of_the_file(tmp_path: Path, failure: Exception) -> None:
    class Backend:
        def encode_batch_fast(self, *_: object, **__: object) -> None:
            raise failure

    tokenizer = from_metadata(tmp_path)
    tokenizer._backend = Backend()  # type: ignore[assignment]
    with pytest.raises(ModelFileError, match=r"tokenizer fails: (no such|OverflowError)$"):
        tokenizer.encode("a", add_special_tokens=True)
