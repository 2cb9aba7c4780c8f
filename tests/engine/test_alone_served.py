"""Alone is served: a request gives the same answer from `LLM`, and from a service, whatever it asks for."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import LLM, JsonFormat, SamplingParams
from penstock.engine.events import Finished, GenerationRequest, TokenGenerated
from penstock.engine.sampler import TokenLogprobs
from penstock.engine.service import Service, ServiceConfig
from tests.byte_models import model_of_bytes
from tests.engine.listening import Listening
from tests.oracle import random_prompt

# What each sampling parameter may be, beside what it is by default. A new parameter has to be named here.
SAMPLING: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 0.7, 1.5),
    "top_k": (0, 5),
    "top_p": (1.0, 0.6),
    "min_p": (0.0, 0.2),
    "repetition_penalty": (1.0, 1.8),
    "seed": (3, 17),
    "presence_penalty": (0.0, 1.5, -1.0),
    "frequency_penalty": (0.0, 2.0),
    "logit_bias": ({}, {65: 30.0, 66: -100.0}),
    "min_tokens": (0, 12),
    "stop_token_ids": ((), (65, 80, 100)),
    "allowed_token_ids": (None, tuple(range(60, 130))),
    "bad_sequences": ((), ((66,), (70, 71), (65, 65))),
}
# Most of what the prompt says comes again in it: penalties that counted the prompt would show.
PROMPT = random_prompt(40, 256, 3) * 5
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]
    text: str
    reason: str
    logprobs: tuple[TokenLogprobs, ...]
    usage: tuple[int, int]


@pytest.fixture(scope="module", params=["llama", "qwen3_5_text"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = model_of_bytes(request.param, tmp_path_factory.mktemp("models") / request.param)
    config = folder / "config.json"
    # Some of the tokens that it likes end a sequence.
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token_id": [7, 201]}))
    return LLM(folder, dtype="float32", chunk=64)


@pytest.fixture(scope="module")
def service(llm: LLM) -> Iterator[Service]:
    with Service(llm, ServiceConfig(cache_tokens=4096, reuse=False)) as service:
        yield service


def alone(llm: LLM, request: GenerationRequest) -> Answer:
    result = llm.generate(
        request.token_ids,
        max_tokens=request.max_tokens,
        sampling=request.sampling,
        stop=request.stop,
        json_format=request.json_format,
        num_logprobs=request.num_logprobs,
        ignore_eos=request.ignore_eos,
    )
    usage = (result.usage.prompt_tokens, result.usage.completion_tokens)
    return Answer(result.token_ids, result.text, result.finish_reason, result.logprobs or (), usage)


def served(service: Service, request: GenerationRequest) -> Answer:
    listener = Listening()
    service.submit(request, listener)
    end = listener.end
    assert isinstance(end, Finished)
    tokens = [event for event in listener.events if isinstance(event, TokenGenerated)]
    return Answer(
        tuple(event.token for event in tokens),
        "".join(event.text for event in tokens) + end.text,
        end.reason,
        tuple(event.logprobs for event in tokens if event.logprobs is not None),
        (end.usage.prompt_tokens, end.usage.completion_tokens),
    )


def test_every_sampling_parameter_is_tried() -> None:
    assert set(SAMPLING) == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in SAMPLING.items() for value in values]
)
def test_each_sampling_parameter(llm: LLM, service: Service, name: str, value: Any) -> None:
    settings = {"temperature": 0.9, "seed": 11, name: value}
    request = GenerationRequest(PROMPT, 24, SamplingParams(**settings), ignore_eos=True)
    assert alone(llm, request) == served(service, request)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_asked_for(llm: LLM, service: Service, data: st.DataObject) -> None:
    chosen = {name: data.draw(st.sampled_from(values)) for name, values in SAMPLING.items()}
    held = data.draw(st.sampled_from([None, None, JsonFormat(), JsonFormat(SCHEMA)]))
    if held is not None:  # what they leave may not be JSON
        chosen |= {"min_tokens": 0, "allowed_token_ids": None, "bad_sequences": ()}
    request = GenerationRequest(
        PROMPT[: data.draw(st.sampled_from([1, 63, 64, 65, 200]))],
        data.draw(st.integers(1, 20)),
        SamplingParams(**chosen),
        tuple(data.draw(st.sets(st.sampled_from(["e", "A", "zz", "AAA"]), max_size=2))),
        data.draw(st.sampled_from([None, 0, 3])),
        held,
        data.draw(st.booleans()),
    )
    assert alone(llm, request) == served(service, request)


def test_each_end(llm: LLM, service: Service) -> None:
    """At the length, at a stop string, at an end of sequence, at the end of a schema."""
    plain = GenerationRequest(PROMPT, 30, SamplingParams(temperature=1.0, seed=5), ignore_eos=True)
    whole = alone(llm, plain)
    stop = next(text for text in whole.text[4:] if text.isascii() and text.isprintable())
    requests = {
        "length": plain,
        "stop": GenerationRequest(PROMPT, 30, plain.sampling, (stop,), ignore_eos=True),
        "eos": GenerationRequest(PROMPT, 400, SamplingParams(temperature=1.5, seed=5)),
        "schema": GenerationRequest(PROMPT, 200, plain.sampling, json_format=JsonFormat(SCHEMA)),
    }
    answers = {name: alone(llm, request) for name, request in requests.items()}
    assert {name: served(service, request) for name, request in requests.items()} == answers
    reasons = {name: answer.reason for name, answer in answers.items()}
    assert reasons == {"length": "length", "stop": "stop", "eos": "stop", "schema": "stop"}
    assert answers["eos"].token_ids[-1] in (7, 201)
    assert set(json.loads(answers["schema"].text)) == {"a", "b"}


def test_penalties_count_what_was_generated_and_not_the_prompt(llm: LLM) -> None:
    """The first token has nothing generated before it, so no such penalty changes it."""
    plain = llm.generate(PROMPT, max_tokens=1, num_logprobs=0)
    for penalty in (SamplingParams(presence_penalty=2.0), SamplingParams(frequency_penalty=2.0)):
        assert llm.generate(PROMPT, max_tokens=1, sampling=penalty).token_ids == plain.token_ids


def test_a_schema_may_be_given_as_it_is(llm: LLM) -> None:
    result = llm.generate("x", max_tokens=200, json_format=SCHEMA, num_logprobs=2)
    assert set(json.loads(result.text)) == {"a", "b"}
    assert result.logprobs is not None
    assert [len(each.most_likely) for each in result.logprobs] == [2] * len(result.token_ids)
    assert result.to_dict()["logprobs"][0]["logprob"] == result.logprobs[0].logprob
