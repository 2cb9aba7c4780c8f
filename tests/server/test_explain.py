"""GET /explain/{id}: each chunk of a request and why it is as long as it is, over a real socket."""

import uuid
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest

from penstock.engine.batcher import ENDED_EXPLAINED
from penstock.engine.events import Finished, GenerationRequest, Listener
from penstock.engine.llm import LLM
from penstock.engine.service import Service, ServiceConfig
from penstock.frontends.server.explain import RULES, AnswerIds, size_lines, size_settings, started_lines
from penstock.frontends.server.settings import ServerSettings
from penstock.plan.policy import ScheduleConfig, SchedulePolicy
from penstock.plan.sizing import SizeRule
from tests.engine.listening import Pausing
from tests.server.running import NAME, Running, running, wait_for

TARGET_MS = 60_000  # however slow the machine is, and whatever it waits for


@pytest.fixture(scope="module")
def auto(model_folder: Path) -> Iterator[Running]:
    """A server that follows a target and a budget, with a key."""
    llm = LLM(
        model_folder,
        dtype="float32",
        chunk="auto",
        target_itl_ms=TARGET_MS,
        max_activation="64MiB",
        threads=1,
    )
    with running(llm, ServerSettings(NAME, api_keys=("secret",))) as started:
        yield started


def submit(server: Running, num_prompt: int, max_tokens: int, listener: Listener = lambda event: None) -> str:
    """A request that shares nothing with others, so that all of it is read."""
    request = GenerationRequest([1] * num_prompt, max_tokens, ignore_eos=True, cache_salt=uuid.uuid4().hex)
    return server.service.submit(request, listener)


def explained(server: Running, name: str, key: str = "secret") -> dict[str, Any]:
    reply = server.ask("GET", f"/explain/{name}", headers={"Authorization": f"Bearer {key}"})
    assert reply.status == 200, reply.body
    assert reply.json["id"] == name
    content: dict[str, Any] = reply.json
    return content


def check_chunks(chunks: list[dict[str, Any]], num_prompt: int, num_cached: int = 0) -> None:
    """The chunks are the prompt after what was cached, whole and in order, and each has all its figures."""
    assert [chunk["start"] for chunk in chunks] == [num_cached, *(chunk["end"] for chunk in chunks[:-1])]
    assert chunks[-1]["end"] == num_prompt
    for chunk in chunks:
        assert chunk["size"] == chunk["end"] - chunk["start"] > 0
        assert chunk["past"] == chunk["start"]
        assert chunk["reason"].startswith(RULES[chunk["rule"]])
        assert chunk["measured_s"] > 0
        assert chunk["predicted_s"] is None or chunk["predicted_s"] > 0
        assert chunk["predicted_bytes"] > 0


def test_an_answer_is_explained_by_every_name_that_its_client_knows(server: Running) -> None:
    prompt = "p" * 200
    reply = server.ask(
        "POST",
        "/v1/completions",
        {"model": NAME, "prompt": prompt, "max_tokens": 3, "ignore_eos": True, "cache_salt": "names"},
        headers={"x-request-id": "my.own:name"},
    )
    by_answer = explained(server, reply.json["id"])
    (request,) = by_answer["requests"]
    check_chunks(request["chunks"], 200)
    assert [(chunk["size"], chunk["rule"]) for chunk in request["chunks"]] == [(64, "fixed")] * 3 + [
        (8, "end")
    ]
    assert (request["index"], request["phase"]) == (0, "ended")
    # The answer comes before what is known of its end.
    wait_for(lambda: explained(server, request["id"])["requests"][0]["outcome"] == "length")
    assert explained(server, request["id"])["requests"][0]["num_prompt_tokens"] == 200
    assert by_answer["settings"]["chunk"]["requested"] == "64"
    assert by_answer["rules"] == {rule: RULES[rule] for rule in ("fixed", "end")}
    for name in ("my.own:name", request["id"]):
        assert explained(server, name)["requests"][0]["chunks"] == request["chunks"]
    # The live page shows a request by the end of its name: the answer's ends so, too.
    assert reply.json["id"][-6:] == request["id"][-6:]


def test_every_choice_is_explained(server: Running) -> None:
    reply = server.completion(prompt=["a" * 70, "b" * 130], n=2, max_tokens=1, cache_salt="choices")
    requests = explained(server, reply.json["id"])["requests"]
    assert [request["index"] for request in requests] == [choice["index"] for choice in reply.json["choices"]]
    # A prompt is read for its first choice, or for both at once; for the other it may be there.
    for request, num_prompt in zip(requests, (70, 70, 130, 130), strict=True):
        start = request["chunks"][0]["start"]
        assert start == 0 or request["index"] % 2
        check_chunks(request["chunks"], num_prompt, start)
    assert len({request["id"] for request in requests}) == 4


def test_a_stream_is_explained_while_it_runs(server: Running) -> None:
    stream = server.client().completions.create(
        model=NAME,
        prompt="s" * 100,
        max_tokens=5800,
        stream=True,
        extra_body={"ignore_eos": True, "cache_salt": "stream"},
    )
    name = next(stream).id
    (request,) = explained(server, name)["requests"]
    assert (request["phase"], request["outcome"]) == ("decode", None)
    check_chunks(request["chunks"], 100)
    stream.close()
    wait_for(lambda: explained(server, name)["requests"][0]["outcome"] == "cancelled")
    assert explained(server, name)["requests"][0]["chunks"] == request["chunks"]


def test_a_refused_request_has_nothing_to_explain_and_takes_no_name(server: Running) -> None:
    first = server.chat().json["id"]
    engine_name = explained(server, first)["requests"][0]["id"]
    for name in (first, engine_name):  # of another's request
        body = {"model": NAME, "prompt": "x" * 90, "max_tokens": 1}
        server.ask("POST", "/v1/completions", body, headers={"x-request-id": name})
        assert explained(server, name)["requests"][0]["id"] == engine_name
    refused = server.completion(max_tokens=-2)
    assert refused.status == 400
    assert server.ask("GET", f"/explain/{refused.headers['x-request-id']}").status == 404


@pytest.mark.parametrize("name", ["cmpl-none", "req-0123456789abcdef", "%E2%98%83", "a" * 3000])
def test_an_unknown_name_is_not_found(server: Running, name: str) -> None:
    reply = server.ask("GET", f"/explain/{name}")
    assert reply.status == 404
    assert (reply.error["code"], reply.error["param"]) == ("request_not_found", "id")
    assert len(reply.error["message"]) < 300
    assert server.ask("POST", f"/explain/{name}").status == 405


def test_what_ended_long_ago_is_forgotten_and_what_runs_is_not(server: Running) -> None:
    stream = server.client().completions.create(
        model=NAME, prompt="r", max_tokens=5000, stream=True, extra_body={"ignore_eos": True}
    )
    running_name = next(stream).id
    ended_name = server.completion(max_tokens=1).json["id"]
    explained(server, ended_name)
    names = AnswerIds(server.service)
    (known,) = (request["id"] for request in explained(server, running_name)["requests"])
    names.add([known], answer="kept", header="kept too")
    for index in range(3 * names._most):
        names.add([f"req-{index}"], answer=f"answer-{index}", header=f"header-{index}")
    assert names.find("kept") == names.find("kept too") == (known,)
    assert len(names._answers) <= 2 * names._most
    assert len(names._headers) <= 2 * names._most
    for _ in range(ENDED_EXPLAINED):
        submit(server, 1, 1)
    wait_for(lambda: server.service.status().num_running + server.service.status().num_waiting == 1)
    assert server.ask("GET", f"/explain/{ended_name}").status == 404
    explained(server, running_name)
    stream.close()
    server.wait_until_idle()


def test_it_asks_for_the_key_as_all_else_does(auto: Running) -> None:
    assert auto.ask("GET", "/explain/x").error["code"] == "invalid_api_key"
    with pytest.raises(AssertionError, match="invalid_api_key"):
        explained(auto, "x", key="wrong")
    with pytest.raises(AssertionError, match="request_not_found"):
        explained(auto, "x")


def test_settings_and_rules_are_those_in_force(auto: Running) -> None:
    running_on, read = Pausing(4), Pausing(Finished)
    waiting = submit(auto, 5, 3000, running_on)
    running_on.wait()
    reading = submit(auto, 3000, 1, read)
    running_on.go_on()
    read.wait()
    assert len(auto.service.status().requests) == 1
    content = explained(auto, reading)
    chunks = content["requests"][0]["chunks"]
    check_chunks(chunks, 3000)
    assert {chunk["num_decodes"] for chunk in chunks} == {1}
    assert set(content["rules"]) <= {"latency", "smallest", "largest", "balanced", "end"}
    assert any(chunk["predicted_s"] is not None for chunk in chunks)
    assert any(
        before["size"] < after["size"] for before, after in pairwise(chunks)
    )  # what is learned is used
    auto.service.cancel(waiting)
    read.go_on()
    settings = content["settings"]
    assert settings["chunk"]["requested"] == "auto"
    assert settings["chunk"]["is_auto"]
    assert settings["target_itl_s"] == TARGET_MS / 1000
    assert settings["target_ttft_s"] is None
    assert settings["decode_gap"] == {
        "effective_s": None,
        "source": "default",
        "reason": "a latency target is given",
    }
    assert settings["max_activation_bytes"] == 64 << 20

    def status() -> dict[str, Any]:
        shown: dict[str, Any] = auto.ask("GET", "/status", headers={"Authorization": "Bearer secret"}).json
        return shown

    shown = status()
    assert {name: shown["settings"][name] for name in settings} == settings
    auto.wait_until_idle()
    wait_for(lambda: len(status()["ended"]) == 2)
    assert [(one["id"], one["outcome"]) for one in status()["ended"]] == [
        (waiting, "cancelled"),
        (reading, "length"),
    ]
    said = "\n".join(started_lines(auto.service, ServerSettings(NAME), auto.url))
    assert "chunk auto: 512 tokens (the default)" in said
    assert "at most 2048" in said
    assert f"targets: next token within {TARGET_MS} ms; a step may need 64.0 MiB" in said


def test_a_part_of_a_fixed_size_is_called_one(llm: LLM) -> None:
    with running(llm, ServerSettings(NAME), ServiceConfig(ScheduleConfig(chunk_size=128), 20_000)) as server:
        begun = Pausing()
        names = [submit(server, 3000, 1, begun)]
        begun.wait()
        names.append(submit(server, 3000, 1))
        begun.go_on()
        server.wait_until_idle()
        content = [explained(server, name) for name in names]
        chunks = [chunk for one in content for chunk in one["requests"][0]["chunks"]]
        shared = [chunk for chunk in chunks if chunk["size"] == 64]
        assert shared
        assert all("gives others a part" in chunk["reason"] for chunk in shared)
        assert all(chunk["reason"] == RULES["fixed"] for chunk in chunks if chunk["size"] == 128)
        assert content[0]["settings"]["chunk"]["reason"] == "set by the service's schedule"
        said = "\n".join(started_lines(server.service, ServerSettings(NAME), server.url))
        assert "chunk 128 (requested 64: set by the service's schedule)" in said


@pytest.mark.parametrize("free", [0, 16])
def test_whether_answers_depend_on_others_is_said(
    llm: LLM, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm, "canon", replace(llm.canon, free_decodes=free, few_rows=0))
    with running(llm, ServerSettings(NAME)) as server:
        reason = server.service.strict_reason
        told = server.ask("GET", "/status").json["settings"]
        assert (told["strict"], told["strict_reason"]) == (free == 16, reason)
        said = started_lines(server.service, ServerSettings(NAME), server.url)
        assert any("policy mixed, strict, up to 16" in line for line in said) == (free == 16)
        assert (f"  not strict: {reason}" in said) == (free == 0)


def test_what_applies_without_a_target_is_said(model_folder: Path) -> None:
    llm = LLM(model_folder, dtype="float32", threads=1)
    for policy, gap_s in ((SchedulePolicy.MIXED, 0.5), (SchedulePolicy.PREFILL_FIRST, None)):
        schedule = ScheduleConfig(policy=policy, chunk_size=llm.most_chunk, auto_chunk=True)
        with Service(llm, ServiceConfig(schedule, 2000)) as service:
            gap = size_settings(service)["decode_gap"]
            assert (gap["effective_s"], gap["source"]) == (gap_s, "default")
            assert gap["reason"] == (
                "no latency target is given" if gap_s else "set aside by the service's schedule"
            )
            aim = size_lines(service)[1]
            assert ("while others decode a step takes up to 500 ms" in aim) == (gap_s is not None)


def test_every_rule_has_its_words() -> None:
    assert set(RULES) == set(get_args(SizeRule))
