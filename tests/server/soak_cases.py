"""What a soak asks for: a pool of requests, each with the answer that it has when it runs alone."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

from penstock.engine.events import Finished, GenerationRequest, JsonFormat, TokenGenerated
from penstock.engine.llm import LLM
from penstock.engine.sampler import SamplingParams
from penstock.engine.service import Service, ServiceConfig
from tests.server.running import NAME

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
# What the largest body of a case is well below, and a body that is to be too large is above.
MAX_BODY_BYTES = 200_000
# How often each kind of request is drawn.
KINDS = {"plain": 5, "stop": 2, "two": 1, "json": 1, "logprobs": 1}
_TEXT = "\n".join(topics.values())
_GREEDY = SamplingParams(temperature=0.0)
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["a", "b", "c"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Answer:
    """One choice of an answer. `logprobs` are of the tokens that were chosen; None where they were not asked for."""

    text: str
    reason: str
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Case:
    """A request, and what it is answered: each of its choices is `alone`."""

    kind: str
    path: str
    body: Mapping[str, Any]
    num_choices: int
    num_prompt: int  # tokens
    num_answer: int  # tokens, of all choices
    alone: Answer


@dataclass(frozen=True)
class Refusal:
    """A request that is wrong, and the status that says so."""

    path: str
    body: bytes
    status: int


@dataclass(frozen=True)
class Sizes:
    """The longest prompts and answers, in tokens, and how many different requests there are."""

    prompt: int = 4000
    answer: int = 200
    num_cases: int = 60


def make_cases(llm: LLM, sizes: Sizes, *, seed: int, strict: bool) -> list[Case]:
    """The answers alone are by `LLM.generate`, but where that cannot give them: by a service that has one request at
    a time. So are all those of a strict service, whose decodes have bits of their own."""
    rng = random.Random(seed)
    tokens = llm.tokenizer.encode(_TEXT, add_special_tokens=False)
    with Service(llm, ServiceConfig(cache_tokens=2 * (sizes.prompt + sizes.answer), strict=strict)) as quiet:
        kinds = rng.choices(list(KINDS), weights=list(KINDS.values()), k=sizes.num_cases)
        # Each kind at least once.
        kinds[: len(KINDS)] = KINDS
        return [_make_case(kind, llm, quiet, tokens, sizes, rng) for kind in kinds]


def make_refusals(longest: int) -> list[Refusal]:
    """Where prompt and answer together may have `longest` tokens."""
    right: dict[str, Any] = {"model": NAME, "prompt": "x", "max_tokens": 2}
    chat = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    bad_schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}
    wrong: list[tuple[str, Any, int]] = [
        (COMPLETION, b"", 400),
        (COMPLETION, b"{", 400),
        (COMPLETION, b"\xff\xfe", 400),
        (CHAT, b"[" * 50_000, 400),
        (CHAT, [], 400),
        (CHAT, chat | {"messages": []}, 400),
        (CHAT, chat | {"messages": [{"role": "user"}]}, 400),
        (CHAT, chat | {"response_format": bad_schema}, 400),
        (COMPLETION, right | {"temperature": "hot"}, 400),
        (COMPLETION, right | {"max_tokens": -2}, 400),
        (COMPLETION, right | {"temprature": 1}, 400),
        (COMPLETION, right | {"prompt": [10**9]}, 400),
        (COMPLETION, right | {"n": 120}, 400),
        (COMPLETION, right | {"prompt": [1] * (longest + 1)}, 400),
        ("/v1/nothing", right, 404),
        (COMPLETION, b" " * (MAX_BODY_BYTES + 1), 413),
    ]
    return [
        Refusal(path, body if isinstance(body, bytes) else json.dumps(body).encode(), status)
        for path, body, status in wrong
    ]


def _make_case(
    kind: str, llm: LLM, quiet: Service, tokens: Sequence[int], sizes: Sizes, rng: random.Random
) -> Case:
    body, prompt = _prompt(llm, tokens, sizes, rng)
    path = CHAT if "messages" in body else COMPLETION
    max_tokens = rng.randint(1, sizes.answer)
    request = GenerationRequest(prompt, max_tokens, _GREEDY)
    num_choices = 1
    match kind:
        case "stop":
            text = _alone(llm, quiet, request)[0].text
            start = rng.randrange(len(text)) if text else 0
            request = GenerationRequest(prompt, max_tokens, _GREEDY, stop=(text[start : start + 2] or "x",))
            body["stop"] = list(request.stop)
        case "two":
            body["n"] = num_choices = 2
        case "json":
            request = GenerationRequest(prompt, max_tokens, _GREEDY, json_format=JsonFormat(_SCHEMA))
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": _SCHEMA},
            }
        case "logprobs":
            request = GenerationRequest(prompt, max_tokens, _GREEDY, num_logprobs=2)
            body |= {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    alone, num_answer = _alone(llm, quiet, request)
    if kind == "json" and alone.reason == "stop":
        json.loads(alone.text)
    body |= {"model": NAME, "max_tokens": max_tokens, "temperature": 0}
    return Case(kind, path, body, num_choices, len(prompt), num_choices * num_answer, alone)


def _prompt(
    llm: LLM, tokens: Sequence[int], sizes: Sizes, rng: random.Random
) -> tuple[dict[str, Any], list[int]]:
    """The part of a body that is the prompt: ids, a text or a chat; and its token ids."""
    num_tokens = round(sizes.prompt ** rng.random())  # of every order of magnitude as many
    start = rng.randrange(len(tokens) - num_tokens)
    some = list(tokens[start : start + num_tokens])
    text = llm.tokenizer.decode(some)
    match rng.choice(("ids", "text", "chat")):
        case "text" if text:
            return {"prompt": text}, llm.tokenize(text, raw=True)
        case "chat":
            messages = [{"role": "user", "content": text}]
            return {"messages": messages}, llm.tokenize(messages)
        case _:
            return {"prompt": some}, some


def _alone(llm: LLM, quiet: Service, request: GenerationRequest) -> tuple[Answer, int]:
    """The answer, and its tokens' number."""
    is_plain = request.json_format is None and request.num_logprobs is None
    if is_plain and not quiet.config.strict:
        alone = llm.generate(
            request.token_ids, max_tokens=request.max_tokens, sampling=_GREEDY, stop=request.stop
        )
        return Answer(alone.text, alone.finish_reason), alone.usage.completion_tokens
    *events, end = quiet.run(request)
    assert isinstance(end, Finished), end
    chosen = [event for event in events if isinstance(event, TokenGenerated)]
    answer = Answer(
        "".join(event.text for event in chosen) + end.text,
        end.reason,
        None
        if request.num_logprobs is None
        # The token that ends a text is not among them.
        else tuple(
            event.logprobs.logprob
            for event in chosen
            if event.logprobs is not None and event.token not in llm.eos_ids
        ),
    )
    return answer, end.usage.completion_tokens
