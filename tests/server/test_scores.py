"""Tokens and scores over HTTP: echo, log-probabilities of prompts, vectors, and what may come and what may not."""

import math
from typing import Any

import pytest

from penstock.engine.llm import LLM
from penstock.engine.sampler import TokenLogprobs
from tests.server.running import Running
from tests.server.scripted import scripted

PROMPT = "a prompt of some more than one chunk, which has sixty-four tokens; " * 2


def logprobs(scores: tuple[TokenLogprobs | None, ...] | None) -> list[float | None]:
    return [None if score is None else score.logprob for score in scores or ()]


def ids_of(llm: LLM, text: str) -> list[int]:
    return llm.tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_has_the_scores_of_prompt_and_answer(
    server: Running, llm: LLM, max_tokens: int, stream: bool
) -> None:
    whole = llm.generate(PROMPT, raw=True, max_tokens=max_tokens, num_logprobs=2, prompt_logprobs=2)
    for _ in range(2):  # the second time the prompt is in the cache
        fields = {"prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": max_tokens, "temperature": 0}
        reply = server.completion(stream=stream, **fields)
        choices = [event["choices"][0] for event in reply.events[:-1]] if stream else reply.json["choices"]
        assert "".join(choice["text"] for choice in choices) == PROMPT + whole.text
        told: dict[str, list[Any]] = {
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
            "tokens": [],
        }
        for name, values in told.items():
            values += (value for choice in choices for value in (choice["logprobs"] or {}).get(name, ()))
        assert told["token_logprobs"] == logprobs(whole.prompt_logprobs) + logprobs(whole.logprobs)
        assert [top and len(top) >= 2 for top in told["top_logprobs"]][:3] == [None, True, True]
        assert told["text_offset"] == [*range(len(PROMPT) + max_tokens)]
        assert choices[-1]["finish_reason"] == "length"


def test_scores_by_token_as_vllm_tells_them(server: Running, llm: LLM) -> None:
    expected = logprobs(llm.generate(PROMPT, raw=True, max_tokens=1, prompt_logprobs=1).prompt_logprobs)
    (choice,) = server.completion(prompt=PROMPT, prompt_logprobs=1, max_tokens=1).json["choices"]
    told = choice["prompt_logprobs"]
    assert told[0] is None
    ids = ids_of(llm, PROMPT)
    assert [each and each[str(token)]["logprob"] for token, each in zip(ids, told, strict=True)] == expected
    assert {each["rank"] for score in told[1:] for each in score.values()} <= {1, None}
    chat = server.chat(prompt_logprobs=0).json
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_told(server: Running, llm: LLM, stream: bool) -> None:
    fields = {"return_token_ids": True, "temperature": 0, "stream": stream}
    for path in ("completion", "chat"):
        reply = getattr(server, path)(**fields)
        bodies = reply.events[:-1] if stream else [reply.json]
        choices = [body["choices"][0] for body in bodies]
        answer = [token for choice in choices for token in choice.get("token_ids", ())]
        text = "".join(
            (choice.get("message") or choice.get("delta") or {}).get("content", "") for choice in choices
        )
        text += "".join(choice.get("text", "") for choice in choices)
        assert llm.tokenizer.decode(answer).encode() == text.encode()
        place = choices if path == "completion" else bodies
        (prompt,) = [each["prompt_token_ids"] for each in place if "prompt_token_ids" in each]
        assert "hello" in llm.tokenizer.decode(prompt)


def test_what_may_come_and_what_may_not(server: Running, llm: LLM) -> None:
    with scripted(llm, "one two three"):
        plain: dict[str, Any] = {"max_tokens": 13, "temperature": 0}

        def text(**fields: Any) -> str:
            answer: str = server.completion(**plain | fields).json["choices"][0]["text"]
            return answer

        assert text() == "one two three"
        assert text(stop=" t") == "one"
        assert text(stop=" t", include_stop_str_in_output=True) == "one t"
        assert text(stop=" t", min_tokens=6) == "one two"
        (space,) = ids_of(llm, " ")
        assert text(stop_token_ids=[space]) == "one"
        assert text(stop_token_ids=[space], include_stop_str_in_output=True) == "one "
        assert text(stop_token_ids=[space], min_tokens=5)[:3] == "one"
        assert len(text(stop_token_ids=[space], min_tokens=5)) >= 4
        assert " two" not in text(bad_words=["two"])
        allowed = ids_of(llm, "one tw")
        assert set(text(allowed_token_ids=allowed)) <= set("one tw")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": 2}, "prompt_logprobs"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [256]}, "allowed_token_ids"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids[0]"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"allowed_token_ids": [65], "bad_words": ["A"]}, "allowed_token_ids"),
        ({"min_tokens": 1, "guided_regex": "a"}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"priority": 0.5}, "priority"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(server: Running, llm: LLM, fields: dict[str, Any], param: str) -> None:
    if fields.get("bad_words") == ["A"]:
        fields = {**fields, "allowed_token_ids": ids_of(llm, "A")}
    reply = server.completion(**fields)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_embeddings_by_the_client(server: Running, llm: LLM) -> None:
    texts = [PROMPT, "short"]
    client = server.client()
    for form in ("float", "base64"):
        answer = client.embeddings.create(model="any", input=texts, encoding_format=form)
        assert answer.usage.prompt_tokens == len(PROMPT) + 5
        if form == "float":
            assert [each.embedding for each in answer.data] == [llm.embed(text) for text in texts]
    by_default = client.embeddings.create(model="any", input=texts)
    for each, text in zip(by_default.data, texts, strict=True):
        assert math.hypot(*each.embedding) == pytest.approx(1, abs=1e-5)
        assert each.embedding == pytest.approx(llm.embed(text), abs=1e-6)
    last = server.ask("POST", "/v1/embeddings", {"input": [list(b"abc")], "pooling": "last"}).json
    assert last["data"][0]["embedding"] == llm.embed(list(b"abc"), pooling="last")
    assert server.ask("POST", "/embeddings", {"input": "a", "cache_salt": ""}).error["param"] == "cache_salt"
    refused = server.ask("POST", "/embeddings", {"input": "a", "dimensions": 3})
    assert (refused.status, refused.error["param"]) == (400, "dimensions")
