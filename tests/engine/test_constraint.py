"""Constraints: whatever is chosen among what they allow is the JSON that was asked for, and the end comes where it is
complete. Schemas of strangers end soon, one way or the other."""

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from penstock.engine.constraint import NUM_KEPT, Constraint, ConstraintFactory
from penstock.engine.events import Grammar, JsonFormat
from penstock.engine.grammar import FORMATS, MAX_GRAMMAR_BYTES
from penstock.errors import ModelError, SettingError
from penstock.models.opened import open_model
from penstock.models.text.tokenizer import SpecialTokens, Tokenizer
from tests.byte_models import byte_backend
from tests.oracle import make_oracle, random_prompt

Schema = dict[str, Any]
NUM_PADDING = 5  # ids that a model has and its tokenizer has not
MAX_STEPS = 3000
PERSON: Schema = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Vocabulary:
    """A tokenizer, and a factory for a model with it."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: tuple[int, ...] = ()) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = frozenset(eos_ids)
        self.size = tokenizer.vocab_size + NUM_PADDING
        self.factory = ConstraintFactory(tokenizer, self.size, self.eos_ids)

    def new(self, schema: Schema | None) -> Constraint:
        return self.factory.new(JsonFormat(schema))

    def allowed(self, constraint: Constraint) -> list[int]:
        return torch.nonzero(constraint.mask(torch.zeros(self.size)) == 0).flatten().tolist()

    def bytes_of(self, tokens: list[int]) -> bytes:
        return b"".join(self.tokenizer.pieces.of(token) for token in tokens)


@cache
def byte_vocabulary() -> Vocabulary:
    """Every token a byte, and no end."""
    return Vocabulary(Tokenizer(byte_backend(), SpecialTokens(), None))


@cache
def merged_vocabulary() -> Vocabulary:
    """Byte-level BPE, two ends of which one is not marked as special, and another special token."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    sample = json.dumps({"name": ["ab", True, None, 12.5, {}], "é": {"age": -1}}, ensure_ascii=False)
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=["<start>", "<end>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([sample, json.dumps(json.loads(sample), indent=2), "\n\n   \t"] * 3, trainer)
    backend.add_tokens([AddedToken("<turn>", special=False), AddedToken("<tool>", special=False)])
    vocab = backend.get_vocab()
    eos_ids = (vocab["<end>"], vocab["<turn>"])
    return Vocabulary(Tokenizer(backend, SpecialTokens(eos_ids), None), eos_ids)


@cache
def spaced_vocabulary() -> Vocabulary:
    """Pieces with marked spaces and tokens for single bytes, so that two tokens may have the same bytes."""
    names = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [*'{}[]":,.-+0123456789abcdeflnrstu▁', "▁{", '{"', '":', "▁true", "false", "▁▁▁▁", '"}']
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={name: token for token, name in enumerate(names)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.add_special_tokens(["<unk>", "</s>"])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return Vocabulary(Tokenizer(backend, SpecialTokens((1,)), None), (1,))


@lru_cache(maxsize=1)
def smollm2_vocabulary(path: Path) -> Vocabulary:
    opened = open_model(path)
    opened.source.close()
    return Vocabulary(opened.tokenizer, opened.tokenizer.eos_ids)


VOCABULARIES = [byte_vocabulary, merged_vocabulary, spaced_vocabulary]


in_vocabularies = pytest.mark.parametrize("make", VOCABULARIES, ids=lambda make: str(make.__name__))


# A modest part of JSON schema, and a checker of just that part.


def schemas() -> st.SearchStrategy[Schema]:
    constants = st.sampled_from(
        [None, True, 0, -7, 2.5, "", "a b", '"\\', "é\n", "<end>", [1, "x"], {"k": None}]
    )
    texts = st.tuples(st.integers(0, 3), st.integers(0, 4)).map(
        lambda sizes: {"type": "string", "minLength": sizes[0], "maxLength": sum(sizes)}
    )
    ranges = st.tuples(st.integers(-50, 50), st.integers(0, 200)).map(
        lambda ends: {"type": "integer", "minimum": ends[0], "maximum": sum(ends)}
    )
    plain = st.sampled_from([{"type": name} for name in ("integer", "number", "boolean", "null")])
    enums = st.lists(constants, min_size=1, max_size=4).map(lambda values: {"enum": values})
    leaves = st.one_of(texts, ranges, plain, enums)
    return st.recursive(
        leaves, lambda inner: st.one_of(arrays(inner), objects(inner), unions(inner)), max_leaves=6
    )


def arrays(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
        lambda parts: {
            "type": "array",
            "items": parts[0],
            "minItems": parts[1],
            "maxItems": parts[1] + parts[2],
        }
    )


def objects(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    names = st.sampled_from(["a", "ab", "name", "é", 'q"', "<end>"])
    return st.dictionaries(names, st.tuples(inner, st.booleans()), max_size=4).map(
        lambda parts: {
            "type": "object",
            "properties": {name: schema for name, (schema, _) in parts.items()},
            "required": [name for name, (_, is_required) in parts.items() if is_required],
            "additionalProperties": False,
        }
    )


def unions(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options})


def conforms(value: Any, schema: Schema) -> bool:
    if "anyOf" in schema:
        return any(conforms(value, option) for option in schema["anyOf"])
    if "enum" in schema:
        return any(type(value) is type(each) and value == each for each in schema["enum"])
    match schema["type"]:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "integer":
            is_integer = isinstance(value, int) and not isinstance(value, bool)
            return is_integer and schema.get("minimum", value) <= value <= schema.get("maximum", value)
        case "string":
            return isinstance(value, str) and schema.get("minLength", 0) <= len(value) <= schema["maxLength"]
        case "array":
            is_sized = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
            return is_sized and all(conforms(item, schema["items"]) for item in value)
        case _:
            known = schema["properties"]
            return (
                isinstance(value, dict)
                and set(schema["required"]) <= set(value) <= set(known)
                and all(conforms(value[name], known[name]) for name in value)
            )


def is_wanted(text: bytes, schema: Schema | None) -> bool:
    try:
        value = json.loads(text.decode())
    except ValueError:
        return False
    return isinstance(value, dict) if schema is None else conforms(value, schema)


def random_walk(vocabulary: Vocabulary, schema: Schema | None, seed: int) -> bytes:
    """Uniform draws among the tokens that are allowed, to the end. The end is allowed exactly where it may be."""
    draw = random.Random(seed)
    constraint = vocabulary.new(schema)
    text = b""
    for _ in range(MAX_STEPS):
        if constraint.is_finished and not vocabulary.eos_ids:
            return text
        allowed = vocabulary.allowed(constraint)
        ends = vocabulary.eos_ids.intersection(allowed)
        if vocabulary.eos_ids:
            assert ends == (vocabulary.eos_ids if is_wanted(text, schema) else set())
        if constraint.is_finished:
            assert set(allowed) == vocabulary.eos_ids
        assert all(vocabulary.tokenizer.pieces.of(token) for token in allowed if token not in ends)
        token = draw.choice(allowed)
        constraint.accept(token)
        if token in ends:
            assert constraint.is_finished
            return text
        text += vocabulary.tokenizer.pieces.of(token)
    raise AssertionError(f"no end after {MAX_STEPS} tokens: {text[-200:]!r}")


@in_vocabularies
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schema=schemas(), seed=st.integers(0, 2**30))
def test_any_walk_gives_the_json_asked_for(make: Callable[[], Vocabulary], schema: Schema, seed: int) -> None:
    vocabulary = make()
    if not vocabulary.eos_ids:
        # A number alone has no last digit: without a token for the end, something must close it.
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
    text = random_walk(vocabulary, schema, seed)
    assert is_wanted(text, schema), text


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(schema=schemas(), seed=st.integers(0, 2**30))
def test_any_walk_with_the_default_model_s_tokenizer(smollm2_path: Path, schema: Schema, seed: int) -> None:
    text = random_walk(smollm2_vocabulary(smollm2_path), schema, seed)
    assert is_wanted(text, schema), text


@in_vocabularies
def test_without_a_schema_it_is_an_object(make: Callable[[], Vocabulary]) -> None:
    vocabulary = make()
    for seed in range(5):
        constraint = vocabulary.new(None)
        first = [vocabulary.bytes_of([token]) for token in vocabulary.allowed(constraint)]
        assert first
        assert all(piece.startswith(b"{") for piece in first)
        # Strings have no bound here: walk for a while, then close what is open.
        text = b""
        draw = random.Random(seed)
        for _ in range(60):
            if constraint.is_finished:
                break
            token = draw.choice(
                [each for each in vocabulary.allowed(constraint) if each not in vocabulary.eos_ids]
            )
            constraint.accept(token)
            text += vocabulary.bytes_of([token])
        assert constraint.is_finished == is_wanted(text, None)


@settings(max_examples=10, deadline=None)
@given(schema=schemas(), seed=st.integers(0, 2**30), num_steps=st.integers(0, 12))
def test_a_token_is_allowed_exactly_where_its_bytes_are(schema: Schema, seed: int, num_steps: int) -> None:
    single, merged = byte_vocabulary(), merged_vocabulary()
    draw = random.Random(seed)
    constraint = merged.new(schema)
    tokens: list[int] = []
    for _ in range(num_steps):
        going_on = [token for token in merged.allowed(constraint) if token not in merged.eos_ids]
        if not going_on:
            break
        tokens.append(draw.choice(going_on))
        constraint.accept(tokens[-1])
    allowed = set(merged.allowed(constraint)) - merged.eos_ids
    for token in range(merged.size):
        piece = b"" if token in merged.eos_ids else merged.bytes_of([token])
        assert (token in allowed) == (
            piece != b"" and takes_bytes(single, schema, merged.bytes_of(tokens) + piece)
        )


def takes_bytes(single: Vocabulary, schema: Schema, text: bytes) -> bool:
    constraint = single.new(schema)
    id_of = {single.bytes_of([token]): token for token in range(256)}
    try:
        for byte in text:
            constraint.accept(id_of[bytes([byte])])
    except SettingError:
        return False
    return True


@in_vocabularies
def test_what_is_not_allowed_is_refused_and_changes_nothing(make: Callable[[], Vocabulary]) -> None:
    vocabulary = make()
    constraint = vocabulary.new(PERSON)
    draw = random.Random(1)
    for _ in range(6):
        allowed = vocabulary.allowed(constraint)
        forbidden = sorted(set(range(vocabulary.size)) - set(allowed))
        for token in [*draw.sample(forbidden, 20), -1, vocabulary.size, vocabulary.size - 1]:
            with pytest.raises(SettingError, match=f"token {token} is not allowed"):
                constraint.accept(token)
        assert vocabulary.allowed(constraint) == allowed
        constraint.accept(draw.choice(allowed))


def test_after_the_end_there_is_nothing() -> None:
    vocabulary = merged_vocabulary()
    constraint = vocabulary.new({"enum": [1]})
    constraint.accept(vocabulary.tokenizer.encode("1", add_special_tokens=False)[0])
    assert constraint.is_finished
    constraint.accept(min(vocabulary.eos_ids))
    assert constraint.is_finished
    with pytest.raises(SettingError, match="has ended"):
        constraint.mask(torch.zeros(vocabulary.size))
    with pytest.raises(SettingError, match="has ended"):
        constraint.accept(min(vocabulary.eos_ids))


def test_masks_leave_the_logits_as_they_are() -> None:
    vocabulary = byte_vocabulary()
    logits = torch.randn(vocabulary.size)
    before = logits.clone()
    masked = vocabulary.new(PERSON).mask(logits)
    assert torch.equal(logits, before)
    assert torch.equal(masked[masked > -torch.inf], logits[masked > -torch.inf])
    with pytest.raises(SettingError, match="do not fit"):
        vocabulary.new(PERSON).mask(logits[:-1])


def test_constraints_of_one_factory_are_independent() -> None:
    vocabulary = merged_vocabulary()
    wanted: list[Schema | None] = [PERSON, {"type": "boolean"}, {"enum": ["abc"]}, PERSON, {"type": "null"}]
    alone = [random_walk(vocabulary, schema, seed) for seed, schema in enumerate(wanted)]
    constraints = [vocabulary.new(schema) for schema in wanted]
    draws = [random.Random(seed) for seed in range(len(wanted))]
    texts = [b""] * len(wanted)
    is_open = [True] * len(wanted)
    while any(is_open):
        for place, (constraint, draw) in enumerate(zip(constraints, draws, strict=True)):
            if is_open[place]:
                token = draw.choice(vocabulary.allowed(constraint))
                constraint.accept(token)
                is_open[place] = token not in vocabulary.eos_ids
                texts[place] += vocabulary.bytes_of([token]) if is_open[place] else b""
    assert texts == alone


def test_threads_share_one_vocabulary() -> None:
    factory = ConstraintFactory(byte_vocabulary().tokenizer, 256, frozenset())
    built: list[object] = []
    threads = [threading.Thread(target=lambda: built.append(factory._build())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 8
    assert len(set(map(id, built))) == 1


def counting(factory: ConstraintFactory) -> list[Schema]:
    """The schemas that it compiles from now on."""
    compiled: list[Schema] = []
    compile_ = factory._compile

    def counted(grammar: str, setting: str) -> Any:
        schema = json.loads(grammar.partition("%json ")[2])
        compiled.append({name: value for name, value in schema.items() if name != "x-guidance"})
        return compile_(grammar, setting)

    factory._compile = counted  # type: ignore[method-assign]
    return compiled


def test_a_schema_is_compiled_once() -> None:
    factory = ConstraintFactory(byte_vocabulary().tokenizer, 256, frozenset())
    compiled = counting(factory)
    for _ in range(5):
        factory.new(JsonFormat(json.loads(json.dumps(PERSON))))
        factory.new(JsonFormat())
    assert compiled == [PERSON, {"type": "object"}]
    # The order of names is that of the answer's, so another order is another schema.
    turned = PERSON | {"properties": dict(reversed(PERSON["properties"].items()))}
    assert turned == PERSON
    factory.new(JsonFormat(turned))
    assert len(compiled) == 3


def test_the_schemas_used_last_are_kept() -> None:
    factory = ConstraintFactory(byte_vocabulary().tokenizer, 256, frozenset())
    compiled = counting(factory)
    for value in range(NUM_KEPT):
        factory.new(JsonFormat({"enum": [value]}))
    factory.new(JsonFormat({"enum": [0]}))
    factory.new(JsonFormat({"enum": ["one more"]}))  # now 1 was used longest ago
    factory.new(JsonFormat({"enum": [0]}))
    assert len(compiled) == NUM_KEPT + 1
    factory.new(JsonFormat({"enum": [1]}))
    assert compiled[-1] == {"enum": [1]}
    assert len(factory._starts) == NUM_KEPT
    for _ in range(2):
        with pytest.raises(SettingError):
            factory.new(JsonFormat({"type": "nothing"}))
    assert len(factory._starts) == NUM_KEPT


def test_threads_that_share_a_schema_do_not_meet() -> None:
    vocabulary = merged_vocabulary()
    alone = [random_walk(vocabulary, PERSON, seed) for seed in range(16)]
    together: dict[int, bytes] = {}

    def walk(seeds: range) -> None:
        for seed in seeds:
            together[seed] = random_walk(vocabulary, PERSON, seed)

    threads = [threading.Thread(target=walk, args=(range(start, 16, 4),)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[seed] for seed in range(16)] == alone


def test_a_model_that_knows_nothing_writes_json() -> None:
    vocabulary = byte_vocabulary()
    oracle = make_oracle("llama", vocab_size=vocabulary.size)
    constraint = vocabulary.new(PERSON)
    tokens: list[int] = []
    prompt = random_prompt(20)
    while not constraint.is_finished:
        tokens.append(int(constraint.mask(oracle.logits(prompt + tokens)).argmax()))
        constraint.accept(tokens[-1])
        assert len(tokens) < 500
    text = vocabulary.bytes_of(tokens)
    assert set(json.loads(text)) == {"name", "age"}


def test_white_space_is_bounded() -> None:
    vocabulary = byte_vocabulary()
    for schema in (PERSON, None):
        constraint = vocabulary.new(schema)
        constraint.accept(vocabulary.tokenizer.encode("{", add_special_tokens=False)[0])
        spaces = [vocabulary.tokenizer.encode(each, add_special_tokens=False)[0] for each in "\n \t"]
        num_spaces = 0
        while found := [token for token in vocabulary.allowed(constraint) if token in spaces]:
            constraint.accept(found[0])
            num_spaces += 1
            assert num_spaces < 40
        assert num_spaces > 1


def test_a_vocabulary_that_cannot_write_json_says_so() -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"{": 0, "a": 1}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    vocabulary = Vocabulary(Tokenizer(backend, SpecialTokens(), None))
    with pytest.raises((ModelError, SettingError)):
        vocabulary.new({"type": "integer"})
    # It can begin an object, and no key of it.
    constraint = vocabulary.new(PERSON)
    with pytest.raises((ModelError, SettingError)):
        accept_and_mask(constraint, 0, vocabulary.size)


def accept_and_mask(constraint: Constraint, token: int, size: int) -> None:
    constraint.accept(token)
    constraint.mask(torch.zeros(size))


def nested(depth: int) -> Schema:
    schema: Schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def choices(count: int, make: Callable[[int], Any]) -> list[Any]:
    return [make(each) for each in range(count)]


REFUSED: dict[str, tuple[Any, str]] = {
    "no object": (True, "object"),
    "no JSON": ({"const": {1, 2}}, "not JSON"),
    "not a number": ({"const": float("nan")}, "not JSON"),
    "half a character": ({"enum": ["\ud800"]}, "not accepted"),
    "deep": (nested(200), "recursion"),
    "much deeper": (nested(600), "too deeply|recursion"),
    "deeper": (nested(2_000), "nested too deeply"),
    "deepest": (nested(200_000), "bytes"),
    "as long as a book": ({"enum": list(range(3_000_000))}, "bytes"),
    "long": ({"enum": ["x" * 100_000]}, "bytes"),
    "wide": ({"type": "object", "properties": {f"k{n}": {} for n in range(2000)}}, "properties"),
    "many objects": (
        {"anyOf": choices(900, lambda n: {"properties": {f"k{n % 7}": {}}, "additionalProperties": True})},
        "too complex",
    ),
    "loop": ({"$ref": "#"}, "no answer that fits"),
    "loop of two": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        "fits",
    ),
    "loop that joins": ({"allOf": [{"$ref": "#"}, {"$ref": "#"}]}, "circular"),
    "elsewhere": ({"$ref": "http://127.0.0.1:9/schema.json"}, "does not fetch"),
    "a file": ({"$ref": "file:///etc/hostname"}, "does not fetch"),
    "nowhere": ({"$ref": "#/$defs/none"}, "does not exist"),
    "joined patterns": (
        {"allOf": choices(40, lambda n: {"type": "string", "pattern": f"a.{{{n}}}b"})},
        "patterns",
    ),
    "pattern properties": (
        {"type": "object", "patternProperties": {f"^a{n}_": {} for n in range(400)}},
        "patternProp",
    ),
    "look-ahead": ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
    "nested pattern": ({"type": "string", "pattern": "(" * 5000 + ")" * 5000}, "pattern cannot be used"),
    "large factors": (
        {"allOf": choices(3, lambda n: {"type": "integer", "multipleOf": 9967 + 2 * n})},
        "too complex",
    ),
    "unsupported": ({"type": "array", "uniqueItems": True, "not": {}}, '"not", "uniqueItems"'),
    "unsupported inside": ({"properties": {"a": {"dependentRequired": {"a": ["b"]}}}}, "dependentRequired"),
    "overlapping oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "use anyOf"),
    "unknown type": ({"type": "strng"}, "strng"),
    "nothing fits": ({"type": "integer", "minimum": 2, "maximum": 1}, "minimum"),
    "options": ({"type": "object", "x-guidance": {"lenient": True}}, "x-guidance"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why_in_one_line(name: str) -> None:
    schema, reason = REFUSED[name]
    started = time.process_time()
    with pytest.raises(SettingError, match=reason) as caught:
        merged_vocabulary().new(schema)
    assert time.process_time() - started < 2
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_an_unknown_format_holds_to_nothing_and_a_known_one_to_itself() -> None:
    vocabulary = merged_vocabulary()

    def starts(of: str) -> bytes:
        schema = {"properties": {"a": {"type": "string", "format": of}}, "required": ["a"]}
        constraint = vocabulary.new({"type": "object", **schema})
        for byte in b'{"a":"':
            constraint.accept(vocabulary.tokenizer.encode(chr(byte), add_special_tokens=False)[0])
        return vocabulary.bytes_of(vocabulary.allowed(constraint))

    free = starts("zorp")
    assert len(free) > 128
    for known in FORMATS - {"unknown"}:
        assert len(starts(known)) < len(free), known


WORKS: dict[str, Schema] = {
    "nothing": {},
    "nested": nested(100),
    "wide": {"type": "object", "properties": {f"k{n}": {"type": "string"} for n in range(900)}},
    "huge counts": {"type": "array", "items": {"type": "string", "minLength": 10**9}, "maxItems": 10**9},
    "many values": {"enum": choices(4000, lambda n: f"value {n}")},
    "many objects": {"enum": choices(700, lambda n: {f"k{n}": [n] * 12})},
    "counted states": {"type": "string", "pattern": "^(a|b)*a(a|b){300}$"},
    "nested counts": {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"},
    "nested stars": {"type": "string", "pattern": "^((a+)+)+$"},
    "many patterns": {
        "properties": {f"k{n}": {"type": "string", "pattern": f"a.{{{n}}}b"} for n in range(60)}
    },
    "recursive": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
    "doubling": {
        "$ref": "#/$defs/a0",
        "$defs": {
            f"a{n}": {
                "anyOf": [
                    {"$ref": f"#/$defs/a{n + 1}"},
                    {"type": "array", "items": {"$ref": f"#/$defs/a{n + 1}"}},
                ]
            }
            for n in range(40)
        }
        | {"a40": {"type": "integer"}},
    },
}


@pytest.mark.parametrize("name", WORKS)
def test_what_looks_hostile_but_is_not_stays_quick(name: str) -> None:
    vocabulary = merged_vocabulary()
    started = time.process_time()
    constraint = vocabulary.new(WORKS[name])
    draw = random.Random(0)
    for _ in range(100):
        if constraint.is_finished:
            break
        going_on = [token for token in vocabulary.allowed(constraint) if token not in vocabulary.eos_ids]
        constraint.accept(draw.choice(going_on))
    assert time.process_time() - started < 4


KEYWORDS = ["type", "enum", "const", "items", "properties", "required", "allOf", "anyOf", "oneOf", "$ref"]
KEYWORDS += ["pattern", "format", "minimum", "maxLength", "patternProperties", "additionalProperties"]


@settings(max_examples=100, deadline=None)
@given(
    schema=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(KEYWORDS) | st.text(max_size=4),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_any_value_as_a_schema_works_or_is_refused(schema: Any) -> None:
    if not isinstance(schema, dict):
        schema = {"properties": schema}
    refusal = None
    try:
        constraint = byte_vocabulary().new(schema)
    except SettingError as error:
        refusal = str(error)
    assert byte_vocabulary().allowed(constraint) if refusal is None else "\n" not in refusal


def takes(wanted: Grammar, text: str) -> bool:
    """Whether an answer of this text may end there."""
    vocabulary = merged_vocabulary()
    constraint = vocabulary.factory.new(wanted)
    ids = {vocabulary.bytes_of([token]): token for token in reversed(range(vocabulary.size))}
    try:
        for byte in text.encode():
            constraint.accept(ids[bytes([byte])])
    except SettingError:
        return False
    return constraint.is_finished or bool(vocabulary.eos_ids & set(vocabulary.allowed(constraint)))


@pytest.mark.parametrize(
    ("wanted", "right", "wrong"),
    [
        (Grammar.regex(r"[a-c]+/\d{2}"), ["a/12", "abc/00"], ["a/1", "d/12", "a/123"]),
        (Grammar.regex("a\nb?"), ["a\n", "a\nb"], ["a", "anb"]),
        (Grammar.choice(["yes", "no", 'é "x"\n']), ["yes", "no", 'é "x"\n'], ["ye", "yesno", "maybe"]),
        (Grammar('start: "a" NUMBER ("," NUMBER)*\nNUMBER: /[0-9]/'), ["a1", "a1,2"], ["a", "a1,"]),
        (Grammar('%llguidance {"allow_initial_skip": true}\nstart: "x"'), ["x"], [" x"]),
        (Grammar('root ::= "x" digit+\ndigit ::= [0-9]'), ["x1", "x12"], ["x", "1"]),
        (Grammar('start: "<" %json {"enum": [1, 2]} ">"'), ["<1>"], ["<3>"]),
    ],
    ids=lambda value: str(getattr(value, "text", ""))[:24],
)
def test_grammars_of_every_form(wanted: Grammar, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not takes(wanted, text)] == []
    assert [text for text in wrong if takes(wanted, text)] == []


DEEP = "(" * 20_000
NO_GRAMMAR: dict[str, tuple[Grammar, str]] = {
    "prose": (Grammar("please answer politely"), "rules"),
    "empty": (Grammar(""), "rules"),
    "long": (Grammar("start: " + "x" * MAX_GRAMMAR_BYTES), "bytes"),
    "no rule": (Grammar("start: nothing_here"), "grammar"),
    "loop": (Grammar("start: start"), "grammar"),
    "regex": (Grammar.regex("(a"), "grammar"),
    "deep regex": (Grammar.regex(DEEP), "grammar"),
    "look-ahead": (Grammar.regex("(?=a)b"), "look"),
    "deep rules": (Grammar("start: " + DEEP), "grammar"),
    "GBNF": (Grammar("root ::= ("), "GBNF"),
    "deep GBNF": (Grammar("root ::= " + DEEP), "GBNF"),
    "a schema of many": (
        Grammar("start: %json " + json.dumps({"properties": {f"k{n}": {} for n in range(1500)}})),
        "properties",
    ),
    "no schema": (Grammar("start: %json {"), "schema"),
}


@pytest.mark.parametrize("name", NO_GRAMMAR)
def test_what_is_no_grammar_is_refused_in_one_line(name: str) -> None:
    wanted, reason = NO_GRAMMAR[name]
    started = time.process_time()
    with pytest.raises(SettingError, match=reason) as caught:
        merged_vocabulary().factory.new(wanted)
    assert time.process_time() - started < 2
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("schema", "is_open"),
    [
        ({"properties": {"a": {}}}, False),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "integer"}}, True),
        ({"type": "object"}, True),
        ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {"type": "integer"}}}]}, True),
        ({"anyOf": [{"properties": {"a": {}}}, {"properties": {"c": {}}}]}, False),
        ({"properties": {"a": {}}, "patternProperties": {"^b$": {}}}, True),
    ],
    ids=str,
)
def test_objects_that_list_properties_have_no_others(schema: Schema, is_open: bool) -> None:
    wanted = {"type": "object", **schema}
    assert takes_bytes(byte_vocabulary(), wanted, b'{"b": 1}') == is_open
    assert takes_bytes(byte_vocabulary(), {"type": "array", "items": wanted}, b'[{"b": 1}]') == is_open


def test_without_llguidance_the_error_says_what_to_install() -> None:
    code = """
import sys
sys.modules["llguidance"] = None
from penstock.engine.constraint import ConstraintFactory
from penstock.engine.events import JsonFormat
from penstock.errors import SettingError
try:
    ConstraintFactory(None, 3, frozenset()).new(JsonFormat())
except SettingError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install llguidance" in done.stdout
