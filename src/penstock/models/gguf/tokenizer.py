"""The tokenizer that a GGUF file carries in its metadata, as llama.cpp defines it."""

import math
from collections.abc import Mapping

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from penstock.errors import ModelError, ModelFileError
from penstock.models.gguf.config import END_KEYS, token_id
from penstock.models.gguf.header import GgufValue
from penstock.models.reading import Fields, shortened, trusting
from penstock.models.text.tokenizer import MAX_TOKENS, SpecialTokens, Tokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_SPACE = "▁"
# SentencePiece's tokens are much shorter; the search for pairs in long ones would take long.
_MAX_MERGED = 128
# Real vocabularies have about two pairs for each token: Llama 2 has 61 thousand for 32, Gemma 581 for 256.
_MAX_PAIRS_PER_TOKEN = 16

# As the models' own tokenizer.json have them; llama.cpp spells out the cases.
_SHORTENED = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_MODERN = _SHORTENED + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Marks belong to words.
_QWEN35 = _MODERN.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
    r" ?[^\s\p{L}\p{N}]", r" ?[^\s\p{L}\p{M}\p{N}]"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _by_case(ending: str, digits: str, but: str = "", closing: str = r"[\r\n/]") -> str:
    """Words begin where capitals do, and have no letters of `but`; signs take what is `closing` with them."""
    start, upper, lower = (
        r"[^\r\n\p{L}\p{N}]?",
        rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]",
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]",
    )
    words = f"{start}{upper}*{lower}+{ending}|{start}{upper}+{lower}*{ending}"
    return rf"{words}|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+{closing}*|\s*[\r\n]+|\s+(?!\S)|\s+"


_GPT4O = _by_case(_SHORTENED + "?", "{1,3}")
_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Letters that had two cases when DeepSeek's list of them was made.
_NEWER = (
    r"\x{560}-\x{588}\x{10c7}\x{10cd}\x{10d0}-\x{10ff}\x{1c80}-\x{1c8a}\x{2d00}-\x{2d2d}\x{a790}-\x{a7fa}"
    r"\x{ab30}-\x{ab68}\x{10570}-\x{105bc}\x{10d50}-\x{10d85}\x{16e40}-\x{1df2a}"
)
_CASED = rf"(?:(?![{_NEWER}])[\p{{Lu}}\p{{Ll}}\p{{Lt}}])"

# Each expression splits what those before it left whole.
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama3": (_MODERN % "{1,3}",),
    "dbrx": (_MODERN % "{1,3}",),
    "qwen2": (_MODERN % "",),
    "qwen35": (_QWEN35 % "",),
    "seed-coder": (_MODERN.replace(r"\p{N}]+[\r\n]*", r"\p{N}\r\n]+") % "",),
    "gpt-4o": (_GPT4O,),
    "tiny_aya": (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O),
    "tekken": (_by_case("", ""),),
    "kimi-k2": (r"\p{Han}+|" + _by_case(_SHORTENED + "?", "{1,3}", r"&&[^\p{Han}]", r"[\r\n]"),),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?{_CASED}+",
        r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+",
        r"\s+$",
        r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+",
        r"\p{N}+",
    ),
    "deepseek-v3": (r"\p{N}{1,3}", r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK),
}
# By that of the table: others that split so.
_TWINS = {
    "gpt-2": "gpt2 phi-2 exaone4 olmo mellum granite-docling trillion a.x-4.0 gigachat",
    "smollm": "starcoder refact command-r exaone minerva-7b codeshell mellum2",
    "llama3": "llama-bpe llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    "dbrx": "glm4 chatglm-bpe smaug-bpe",
    "qwen2": "deepseek-r1-qwen stablelm2 hunyuan solar-open megrez kormo",
    "gpt-4o": "kanana2",
    "deepseek-v3": "hunyuan-dense joyai-llm",
}
_ALIASES = {twin: name for name, twins in _TWINS.items() for twin in twins.split()}
_WHOLE_WORDS = (
    "llama3",
    "tekken",
)  # a word that is a token is taken as it is; and a text begins with the first one
# Names that end a turn. llama.cpp stops at them too, whether or not the metadata says so.
_ENDS = (
    *(
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<end_of_turn>",
        "<|end_of_text|>",
    ),
    *(
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<end_of_utterance>",
        "<turn|>",
    ),
)
# Which ends but a part of a turn where there are these, too: gpt-oss, Solar Open.
_PART_END, _TURN_ENDS = "<|end|>", ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})


def gguf_tokenizer(metadata: Mapping[str, GgufValue], origin: str) -> Tokenizer:
    """Raises an error that names what is missing or unknown."""
    prefix = "tokenizer.ggml."
    fields = Fields(
        origin, {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    )
    vocabulary = _Vocabulary(fields)
    kind = fields.text("model")
    if kind not in (known := ("gpt2", "llama", "gemma4")):
        raise ModelError(
            f"{origin} has a tokenizer of kind {shortened(repr(kind))}; supported in GGUF are {', '.join(known)}"
        )
    with trusting(f"{origin} holds an unusable tokenizer"):
        if kind == "gpt2":
            backend, adds_bos = _byte_level(vocabulary)
        elif kind == "llama":
            backend, adds_bos = _sentence_piece(vocabulary, _merges_by_score(vocabulary)), True
        else:
            backend, adds_bos = _sentence_piece(vocabulary, _listed_merges(vocabulary)), True
        backend.add_special_tokens(vocabulary.added(_CONTROL, _UNKNOWN))
        backend.add_tokens(vocabulary.added(_USER_DEFINED))

    bos, eos = vocabulary.named("bos_token_id"), vocabulary.named("eos_token_id")
    _add_by_itself(
        backend,
        bos=bos[1] if bos and fields.boolean("add_bos_token", adds_bos) else None,
        eos=eos[1] if eos and fields.boolean("add_eos_token", False) else None,
    )
    ends = [vocabulary.named(key) for key in END_KEYS]
    ended = {name for name in _ENDS if vocabulary.is_control(name)}
    if any(ended >= turn_ends for turn_ends in _TURN_ENDS):
        ended.discard(_PART_END)
    ends += [(name, vocabulary.ids[name]) for name in _ENDS if name in ended]
    names = {
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": vocabulary.named("unknown_token_id"),
        "pad_token": vocabulary.named("padding_token_id"),
    }
    special = SpecialTokens(
        eos_ids=tuple(dict.fromkeys(token[1] for token in ends if token)),
        names={role: token[0] for role, token in names.items() if token},
    )
    whole = Fields(origin, metadata)
    key = "tokenizer.chat_template"
    return Tokenizer(backend, special, whole.text(key) if whole.has(key) else None)


class _Vocabulary:
    """Tokens, their kinds and their ids, checked."""

    def __init__(self, fields: Fields) -> None:
        self.fields = fields
        self.tokens = _strings(fields, "tokens")
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if not self.tokens or len(self.ids) != len(self.tokens):
            raise ModelFileError(f"{fields.origin}: the vocabulary is empty or has a token twice")
        kinds = fields.values.get("token_type")
        if kinds is None:
            kinds = np.ones(len(self.tokens), dtype=np.int32)
        if not isinstance(kinds, np.ndarray) or len(kinds) != len(self.tokens):
            raise fields.error("token_type", kinds, f"an array of {len(self.tokens)} integers")
        self.kinds: list[int] = kinds.tolist()

    def of_kind(self, *kinds: int) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.kinds, strict=True) if kind in kinds]

    def added(self, *kinds: int) -> list[AddedToken]:
        return [
            AddedToken(token, normalized=False, special=_USER_DEFINED not in kinds)
            for token in self.of_kind(*kinds)
            if token
        ]

    def is_control(self, token: str) -> bool:
        return token in self.ids and self.kinds[self.ids[token]] == _CONTROL

    def named(self, key: str) -> tuple[str, int] | None:
        """The token whose id is under a key, where there is one."""
        index = token_id(self.fields, key)
        if index is None:
            return None
        if index >= len(self.tokens):
            raise self.fields.error(key, index, f"a token of the {len(self.tokens)} in the vocabulary")
        return self.tokens[index], index


def _byte_level(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    fields = vocabulary.fields
    name = fields.text("pre", "default")
    splits = _SPLITS.get(_ALIASES.get(name, name))
    if splits is None:
        known = ", ".join(sorted([*_SPLITS, *_ALIASES]))
        raise ModelError(f"{fields.origin}: the pre-tokenizer {name!r} is not supported; known are {known}")
    takes_words = _ALIASES.get(name, name) in _WHOLE_WORDS
    merges = _listed_merges(vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocabulary.ids, merges, ignore_merges=takes_words))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(split), behavior="isolated") for split in splits),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, takes_words


def _listed_merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    merges = []
    for merge in _strings(vocabulary.fields, "merges"):
        left, _, right = merge.partition(" ")
        if not (left in vocabulary.ids and right in vocabulary.ids and left + right in vocabulary.ids):
            raise vocabulary.fields.error("merges", merge, "a pair of tokens that make a token")
        merges.append((left, right))
    return merges


def _sentence_piece(vocabulary: _Vocabulary, merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    fields = vocabulary.fields
    unknown = vocabulary.of_kind(_UNKNOWN)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocabulary.ids,
            merges,
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = fields.boolean("add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefixed else []),
        ]
    )
    return backend


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """The pairs that make a token, best score first: SentencePiece merges by the score of what comes out."""
    fields, ids = vocabulary.fields, vocabulary.ids
    scores = fields.values.get("scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(vocabulary.tokens):
        raise fields.error("scores", scores, f"an array of {len(vocabulary.tokens)} numbers")
    unmergeable = {_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE}
    max_pairs = _MAX_PAIRS_PER_TOKEN * len(ids)
    ranked: list[tuple[float, int, tuple[str, str]]] = []
    for token, kind, score in zip(vocabulary.tokens, vocabulary.kinds, scores.tolist(), strict=True):
        if kind in unmergeable or len(token) > _MAX_MERGED or not math.isfinite(score):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                ranked.append((-score, len(ranked), (left, right)))
        if len(ranked) > max_pairs:
            raise ModelFileError(
                f"{fields.origin}: the vocabulary's {len(ids)} tokens are made of more than {max_pairs} pairs, "
                "which is absurd"
            )
    ranked.sort()
    return [pair for _, _, pair in ranked]


def _strings(fields: Fields, key: str) -> list[str]:
    value = fields.values.get(key)
    if not isinstance(value, list):
        raise fields.error(key, value, "an array of strings")
    if len(value) > MAX_TOKENS:
        raise ModelFileError(f"{fields.origin}: {len(value)} {key} are absurd")
    return value


def _add_by_itself(backend: tokenizers.Tokenizer, *, bos: int | None, eos: int | None) -> None:
    """Let encoding put these tokens, and no others, before and after a text."""
    pieces = [*(["BOS"] if bos is not None else []), "$A", *(["EOS"] if eos is not None else [])]
    tokens = [(name, token) for name, token in (("BOS", bos), ("EOS", eos)) if token is not None]
    backend.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=tokens)
