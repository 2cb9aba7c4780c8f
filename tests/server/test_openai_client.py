"""The official client sees what the engine does by itself."""

import json
import math
from typing import Any

import openai
import pytest
import torch

from penstock.engine.llm import LLM
from penstock.engine.sampler import SamplingParams
from tests.server.running import NAME, Running

Messages = list[Any]
MESSAGES: Messages = [
    {"role": "system", "content": "You keep the sluice."},
    {"role": "user", "content": "When does it open? " * 12},
]
PROMPT = "Every sluice has its hour. " * 6
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return server.client()


def test_models_are_listed_and_found(client: openai.OpenAI, llm: LLM) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).object == "model"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_a_greedy_chat_is_what_the_engine_says(client: openai.OpenAI, llm: LLM) -> None:
    expected = llm.generate(MESSAGES, max_tokens=24)
    answer = client.chat.completions.create(model=NAME, messages=MESSAGES, **GREEDY)
    [choice] = answer.choices
    assert choice.message.content == expected.text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == expected.finish_reason == "length"
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == expected.usage.total_tokens


def test_parts_of_text_are_lines(client: openai.OpenAI, llm: LLM) -> None:
    parts: Messages = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
    ]
    answer = client.chat.completions.create(model=NAME, messages=parts, **GREEDY)
    expected = llm.generate([{"role": "user", "content": "one\ntwo"}], max_tokens=24).text
    assert answer.choices[0].message.content == expected


def test_a_greedy_completion_is_what_the_engine_says(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model=NAME, prompt=PROMPT, **GREEDY)
    assert answer.choices[0].text == llm.generate(PROMPT, raw=True, max_tokens=24).text
    assert answer.object == "text_completion"


def test_several_prompts_are_answered_as_each_alone(client: openai.OpenAI, llm: LLM) -> None:
    texts = ["first " * 20, "second"]
    ids = [llm.tokenize(text, raw=True) for text in texts]
    expected = [llm.generate(text, raw=True, max_tokens=24).text for text in texts]
    for prompt in (texts, ids):
        answer = client.completions.create(model=NAME, prompt=prompt, **GREEDY)
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert [choice.text for choice in answer.choices] == expected
        assert answer.usage.prompt_tokens == len(ids[0]) + len(ids[1])
    assert client.completions.create(model=NAME, prompt=ids[0], **GREEDY).choices[0].text == expected[0]


def test_without_a_limit_a_completion_has_16_tokens_and_a_chat_the_rest(
    client: openai.OpenAI, server: Running, llm: LLM
) -> None:
    answer = client.completions.create(model=NAME, prompt=PROMPT, temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    long = "x" * (server.service.max_request_tokens - 30)
    chat = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": long}], temperature=0
    )
    assert chat.usage is not None
    assert chat.usage.total_tokens == server.service.max_request_tokens
    assert chat.choices[0].finish_reason == "length"


def test_a_stream_adds_up_to_the_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=NAME, messages=MESSAGES, **GREEDY)
    stream = client.chat.completions.create(model=NAME, messages=MESSAGES, stream=True, **GREEDY)
    chunks = list(stream)
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    text = client.completions.create(model=NAME, prompt=PROMPT, **GREEDY).choices[0].text
    pieces = client.completions.create(model=NAME, prompt=PROMPT, stream=True, **GREEDY)
    assert "".join(piece.choices[0].text for piece in pieces) == text


def test_usage_comes_last_in_a_stream_that_asks_for_it(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "n": 2, **GREEDY}
    client.chat.completions.create(**asked)  # from now on it is in the cache
    whole = client.chat.completions.create(**asked)
    *chunks, last = client.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **asked
    )
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    assert last.choices == []
    assert last.usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 2 * 24
    assert whole.usage.prompt_tokens_details is not None
    assert (whole.usage.prompt_tokens_details.cached_tokens or 0) > 0


def test_n_answers_are_drawn_with_seeds_in_a_row(client: openai.OpenAI, llm: LLM) -> None:
    drawn: dict[str, Any] = {"temperature": 1.0, "max_tokens": 12}
    several = client.chat.completions.create(model=NAME, messages=MESSAGES, n=3, seed=5, **drawn)
    texts = [choice.message.content for choice in several.choices]
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    for index, text in enumerate(texts):
        sampling = SamplingParams(temperature=1.0, seed=5 + index)
        assert text == llm.generate(MESSAGES, max_tokens=12, sampling=sampling).text


def test_the_text_ends_before_a_stop_string(client: openai.OpenAI, llm: LLM) -> None:
    text = llm.generate(MESSAGES, max_tokens=24).text
    stop = text[10:12]
    answer = client.chat.completions.create(model=NAME, messages=MESSAGES, stop=[stop, "nowhere"], **GREEDY)
    assert answer.choices[0].message.content == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def oracle_logprobs(llm: LLM, ids: list[int], num_answer: int) -> torch.Tensor:
    """[num_answer, vocab] of transformers' model over prompt and answer."""
    from tests.oracle import make_oracle

    oracle = make_oracle("llama", vocab_size=256, max_position_embeddings=6000)
    with torch.no_grad():
        logits = oracle.model(torch.tensor([ids])).logits[0]
    answer: torch.Tensor = logits[-num_answer - 1 : -1]
    return answer.float().log_softmax(dim=-1)


def test_logprobs_of_a_chat_are_the_models(client: openai.OpenAI, llm: LLM) -> None:
    result = llm.generate(MESSAGES, max_tokens=24)
    expected = oracle_logprobs(llm, [*llm.tokenize(MESSAGES), *result.token_ids], 24)
    answer = client.chat.completions.create(
        model=NAME, messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY
    )
    assert answer.choices[0].logprobs is not None
    entries = answer.choices[0].logprobs.content
    assert entries is not None
    assert len(entries) == 24
    for entry, token, row in zip(entries, result.token_ids, expected, strict=True):
        assert bytes(entry.bytes or []) == llm.tokenizer.pieces.of(token)
        assert math.isclose(entry.logprob, float(row[token]), abs_tol=2e-4)
        values = [other.logprob for other in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        torch.testing.assert_close(torch.tensor(values), row.topk(3).values, atol=2e-4, rtol=0)
    plain = client.chat.completions.create(model=NAME, messages=MESSAGES, logprobs=True, **GREEDY)
    assert plain.choices[0].logprobs is not None
    assert all(entry.top_logprobs == [] for entry in plain.choices[0].logprobs.content or ())


def test_logprobs_of_a_completion_say_where_tokens_are(client: openai.OpenAI, llm: LLM) -> None:
    result = llm.generate(PROMPT, raw=True, max_tokens=24)
    expected = oracle_logprobs(llm, [*llm.tokenize(PROMPT, raw=True), *result.token_ids], 24)
    whole = client.completions.create(model=NAME, prompt=PROMPT, logprobs=2, **GREEDY).choices[0]
    assert whole.logprobs is not None
    given = whole.logprobs.token_logprobs
    assert given is not None
    for logprob, token, row in zip(given, result.token_ids, expected, strict=True):
        assert math.isclose(logprob, float(row[token]), abs_tol=2e-4)
    offsets, tokens = whole.logprobs.text_offset, whole.logprobs.tokens
    assert offsets is not None
    assert tokens is not None
    assert offsets == sorted(offsets)
    for offset, token_text in zip(offsets, tokens, strict=True):
        if not token_text.startswith("bytes:"):
            assert whole.text[offset:].lstrip("�").startswith(token_text)
    for ranked, token_text in zip(whole.logprobs.top_logprobs or (), tokens, strict=True):
        assert token_text in ranked
        assert len(ranked) in (2, 3)
    chunks = list(client.completions.create(model=NAME, prompt=PROMPT, logprobs=2, stream=True, **GREEDY))
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        streamed = [
            item
            for chunk in chunks
            if chunk.choices[0].logprobs is not None
            for item in getattr(chunk.choices[0].logprobs, name)
        ]
        assert streamed == getattr(whole.logprobs, name)


SCHEMA = {
    "type": "object",
    "properties": {"gate": {"enum": ["open", "shut"]}, "level": {"type": "boolean"}},
    "required": ["gate", "level"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_of_a_schema_conforms(client: openai.OpenAI, temperature: float) -> None:
    answer = client.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        temperature=temperature,
        seed=3,
        max_tokens=400,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "gate", "schema": SCHEMA, "strict": True},
        },
    )
    assert answer.choices[0].finish_reason == "stop"
    value = json.loads(answer.choices[0].message.content or "")
    assert set(value) == {"gate", "level"}
    assert value["gate"] in ("open", "shut")
    assert isinstance(value["level"], bool)


def test_any_json_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        max_tokens=800,
        temperature=0,
        logit_bias={str(ord("}") - 33): 100},
        response_format={"type": "json_object"},
    )
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


def test_a_bias_forces_a_token(client: openai.OpenAI, llm: LLM) -> None:
    [token] = llm.tokenizer.encode("z", add_special_tokens=False)
    answer = client.completions.create(
        model=NAME, prompt="a", max_tokens=5, temperature=0, logit_bias={str(token): 100}
    )
    assert answer.choices[0].text == "zzzzz"


def test_parameters_without_effect_have_none(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model=NAME, messages=MESSAGES, **GREEDY)
    more = client.chat.completions.create(
        model=NAME, messages=MESSAGES, user="someone", metadata={"a": "b"}, store=False, **GREEDY
    )
    assert more.choices == plain.choices
