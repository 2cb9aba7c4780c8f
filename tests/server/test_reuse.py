"""What was read for one request is found for the next, by those who may share it, and the server says so."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.cache import BLOCK_TOKENS
from penstock.engine.llm import LLM
from penstock.engine.service import ServiceConfig
from penstock.frontends.server.settings import ServerSettings
from tests.server.running import NAME, Running, running, wait_for

KEYS = ("sk-of-the-sluice", "sk-of-the-weir")
PROMPT = "Seven sluices, and none of them leaks. " * 10  # a token for each byte
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}


@pytest.fixture
def fresh(llm: LLM) -> Iterator[Running]:
    """A server that has read nothing yet."""
    with running(llm, ServerSettings(NAME)) as started:
        yield started


def shareable(num_tokens: int) -> int:
    """The full blocks before the last token, which is always read."""
    return (num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def cached(usage: dict[str, Any]) -> int:
    number = usage["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(number, int)
    assert 0 <= number < usage["prompt_tokens"]
    return number


def complete(server: Running, key: str | None = None, **fields: Any) -> dict[str, Any]:
    body = {"model": NAME, "prompt": PROMPT, **GREEDY, **fields}
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    reply = server.ask("POST", "/v1/completions", body, headers)
    assert reply.status == 200, reply.body
    content: dict[str, Any] = reply.json
    return content


def num_cached(server: Running, key: str | None = None, **fields: Any) -> int:
    return cached(complete(server, key, **fields)["usage"])


def metrics(server: Running) -> dict[str, float]:
    read = {}
    for family in text_string_to_metric_families(server.ask("GET", "/metrics").body.decode()):
        for sample in family.samples:
            labels = ",".join(sample.labels.values())
            read[sample.name.removeprefix("penstock_") + (f"{{{labels}}}" if labels else "")] = sample.value
    return read


def test_the_second_time_is_cached_and_the_same(fresh: Running) -> None:
    first, second = (complete(fresh) for _ in range(2))
    assert (cached(first["usage"]), cached(second["usage"])) == (0, shareable(len(PROMPT)))
    assert second["choices"] == first["choices"]
    assert num_cached(fresh, prompt=PROMPT + "And the eighth?") == shareable(len(PROMPT) + 1)
    assert num_cached(fresh, prompt="x" + PROMPT) == 0


def test_a_chat_that_goes_on_is_read_from_where_it_ended(fresh: Running) -> None:
    question: Any = {"role": "user", "content": PROMPT}
    first = fresh.chat(messages=[question], **GREEDY).json
    history = [question, {"role": "assistant", "content": "None."}, {"role": "user", "content": "Why?"}]
    second = fresh.chat(messages=history, **GREEDY).json
    assert cached(first["usage"]) == 0
    assert cached(second["usage"]) >= shareable(len(f"<user>{PROMPT}"))
    alone = fresh.chat(messages=history, cache_salt="alone", **GREEDY).json
    assert cached(alone["usage"]) == 0
    assert second["choices"] == alone["choices"]


def test_streams_tell_it_too(fresh: Running) -> None:
    more = {"stream": True, "stream_options": {"include_usage": True}, "return_progress": True}
    for number in (0, shareable(len(PROMPT))):
        *chunks, last, done = fresh.completion(prompt=PROMPT, **GREEDY, **more).events
        assert done == "[DONE]"
        assert cached(last["usage"]) == number
        told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
        assert {(progress["cache"], progress["total"]) for progress in told} == {(number, len(PROMPT))}
        processed = [progress["processed"] for progress in told]
        assert processed == sorted(processed)
        assert number <= processed[0]
        assert processed[-1] == len(PROMPT)


def test_a_prompt_counts_once_however_many_choices_it_has(fresh: Running) -> None:
    complete(fresh)
    other = "A prompt that nobody has sent before. " * 5
    usage = complete(fresh, prompt=[PROMPT, other], n=2)["usage"]
    assert usage["prompt_tokens"] == len(PROMPT) + len(other)
    assert cached(usage) == shareable(len(PROMPT))


def test_only_those_with_the_same_salt_share(fresh: Running) -> None:
    assert num_cached(fresh) == 0
    for salt in ("mine", "yours", "x" * 256, "\N{SNOWMAN}"):
        assert num_cached(fresh, cache_salt=salt) == 0
        assert num_cached(fresh, cache_salt=salt) == shareable(len(PROMPT))
    assert num_cached(fresh) == shareable(len(PROMPT))


@pytest.mark.parametrize("isolates", [True, False])
def test_only_with_isolation_a_key_shares_with_itself_alone(llm: LLM, isolates: bool) -> None:
    all_of_it = shareable(len(PROMPT))
    with running(llm, ServerSettings(NAME, api_keys=KEYS, isolates=isolates)) as server:
        mine, others = KEYS
        assert num_cached(server, mine) == 0
        assert num_cached(server, others) == (0 if isolates else all_of_it)
        for key in KEYS:
            assert num_cached(server, key) == all_of_it
        assert num_cached(server, mine, cache_salt="x") == 0
        assert num_cached(server, others, cache_salt="x") == (0 if isolates else all_of_it)


def test_without_reuse_every_prompt_is_read(llm: LLM) -> None:
    with running(llm, ServerSettings(NAME), ServiceConfig(cache_tokens=20_000, reuse=False)) as server:
        first, second = (complete(server) for _ in range(2))
        assert cached(first["usage"]) == cached(second["usage"]) == 0
        assert first["choices"] == second["choices"]
        status = server.ask("GET", "/status").json
        assert not status["reuse"]["is_on"]
        assert status["cache"]["blocks_idle"] == 0


def test_metrics_and_status_count_it(fresh: Running) -> None:
    def moved() -> tuple[float, ...]:
        names = ["hit_tokens_total{memory}", "hit_tokens_total{disk}", "miss_tokens_total"]
        names += ["requests_total{hit}", "requests_total{miss}"]
        return tuple(read[f"prefix_{name}"] for name in names)

    read = metrics(fresh)
    assert moved() == (0, 0, 0, 0, 0)
    complete(fresh)
    read = metrics(fresh)
    assert moved() == (0, 0, len(PROMPT), 0, 1)
    assert read["cache_blocks_idle"] >= shareable(len(PROMPT)) / BLOCK_TOKENS
    complete(fresh)
    read, found = metrics(fresh), shareable(len(PROMPT))
    assert moved() == (found, 0, 2 * len(PROMPT) - found, 1, 1)
    status = fresh.ask("GET", "/status").json
    assert status["reuse"]["is_on"]
    assert (status["reuse"]["memory_tokens"], status["reuse"]["num_hits"]) == (found, 1)
    assert status["cache"]["blocks_idle"] == read["cache_blocks_idle"]
    assert status["cache"]["blocks_used"] == 0
    assert status["settings"]["isolates"] is False


def test_space_for_others_is_given_up(llm: LLM) -> None:
    with running(llm, ServerSettings(NAME), ServiceConfig(cache_tokens=1024)) as server:
        for first in "abcdef":
            assert num_cached(server, prompt=first * 300) == 0
        assert metrics(server)["prefix_evictions_total{block}"] > 0
        server.wait_until_idle()


def test_a_client_that_leaves_and_asks_again_pays_only_for_the_rest(fresh: Running) -> None:
    body = {"model": NAME, "prompt": "x" * 5000, "max_tokens": 500, "temperature": 0}
    connection = fresh.connect()
    connection.request("POST", "/v1/completions", json.dumps(body).encode())
    wait_for(lambda: fresh.service.status().requests or fresh.service.status().cache.blocks_idle)
    # Where it was all over before anybody looked, it has left more still.
    wait_for(lambda: all(request.num_prompt_done >= 1000 for request in fresh.service.status().requests))
    connection.close()
    fresh.wait_until_idle()
    assert num_cached(fresh, prompt="x" * 5000) >= shareable(1000)


def test_the_next_server_goes_on_from_the_folder(model_folder: Path, tmp_path: Path) -> None:
    texts = []
    for expected in (0, shareable(len(PROMPT))):
        llm = LLM(model_folder, dtype="float32", chunk=64, threads=1, cache_dir=tmp_path, cache_size="64MiB")
        with running(llm, ServerSettings(NAME)) as server:
            answer = complete(server)
            texts.append(answer["choices"][0]["text"])
            assert cached(answer["usage"]) == expected
            assert llm.store is not None
            assert llm.store.flush(30)
            read = metrics(server)
            assert read["prefix_hit_tokens_total{disk}"] == expected
            assert (read["disk_cache_writes_total"] > 0) == (expected == 0)
            assert 0 < read["disk_cache_bytes"] <= read["disk_cache_limit_bytes"] == 64 << 20
            assert read["disk_cache_damaged_total"] == read["disk_cache_dropped_total"] == 0
        llm.close()
    assert texts[0] == texts[1]
