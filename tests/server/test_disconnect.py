"""A client that goes away takes its requests with it."""

import pytest

from penstock.engine.llm import LLM
from tests.server.running import NAME, Running, wait_for

LONG = {"model": NAME, "max_tokens": 3000, "temperature": 0, "prompt": "x" * 2000}


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("streams", [False, True])
def test_leaving_cancels(server: Running, streams: bool, num_choices: int) -> None:
    import json

    connection = server.connect()
    body = {**LONG, "stream": streams, "n": num_choices}
    connection.request("POST", "/v1/completions", json.dumps(body).encode())
    wait_for(lambda: len(server.service.status().requests) == num_choices)
    if streams:
        wait_for(lambda: any(request.num_generated for request in server.service.status().requests))
    connection.close()
    wait_for(lambda: not server.service.status().requests)
    server.wait_until_idle()


def test_a_stream_that_is_left_early_cancels(server: Running, llm: LLM) -> None:
    client = server.client()
    with client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "hello"}], max_tokens=5000, stream=True
    ) as stream:
        for _, chunk in zip(range(5), stream, strict=False):
            assert chunk.choices
    wait_for(lambda: not server.service.status().requests)
    server.wait_until_idle()


def test_others_go_on_when_one_leaves(server: Running, llm: LLM) -> None:
    client = server.client()
    expected = llm.generate("others", raw=True, max_tokens=40).text
    with client.completions.create(model=NAME, prompt="leaves", max_tokens=5000, stream=True) as leaving:
        stays = client.completions.create(
            model=NAME, prompt="others", max_tokens=40, temperature=0, stream=True
        )
        text = next(stays).choices[0].text
        next(leaving)
    text += "".join(chunk.choices[0].text for chunk in stays)
    assert text == expected
    server.wait_until_idle()
