"""llama.cpp's own endpoints: its names, whole and streamed, and the gap that is filled."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from penstock.engine.llm import LLM
from penstock.frontends.server.settings import ServerSettings
from tests.byte_models import model_of_bytes
from tests.server.running import NAME, Running, running
from tests.server.scripted import scripted

MARKS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = model_of_bytes("llama", tmp_path_factory.mktemp("marked") / NAME)
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    # The model has rows for 256 tokens: three of the bytes that no text has give their places up.
    content = json.loads(tokenizer.to_str())
    unused = sorted(content["model"]["vocab"].items(), key=lambda item: item[1])[-3:]
    for (name, token), mark in zip(unused, MARKS, strict=True):
        del content["model"]["vocab"][name]
        content["model"]["vocab"][mark] = token
        content["added_tokens"].append(
            {
                "id": token,
                "content": mark,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        )
    file.write_text(json.dumps(content))
    with running(LLM(folder, dtype="float32", chunk=64, threads=1), ServerSettings(NAME)) as started:
        yield started


def test_a_completion_whole_and_streamed(server: Running, llm: LLM) -> None:
    body: dict[str, Any] = {"prompt": "say", "temperature": 0, "n_predict": 20}
    more = {"n_probs": 2, "return_tokens": True, "cache_prompt": True}
    with scripted(llm, "one two"):
        whole = server.ask("POST", "/completion", {**body, **more, "stop": ["wo"]}).json
        streamed = server.ask("POST", "/completion", {**body, **more, "stop": ["wo"], "stream": True}).events
        several = server.ask("POST", "/completion", {**body, "prompt": ["a", [98]], "n_predict": 3}).json
        either = server.ask("POST", "/completion", {**body, "stop": ["zero", "two"]}).json
    assert (whole["content"], whole["stop_type"], whole["stopping_word"]) == ("one t", "word", "wo")
    assert (whole["tokens_evaluated"], whole["tokens_predicted"], whole["stop"]) == (3, 7, True)
    with scripted(llm, "one two"):
        asked = {**body, "n_predict": 2, "stream": True, "return_progress": True}
        begun = server.ask("POST", "/completion", asked).events[0]
    assert (begun["prompt_progress"]["processed"], begun["content"], begun["stop"]) == (3, "", False)
    assert (either["content"], either["stop_type"], either["stopping_word"]) == ("one ", "word", "two")
    assert llm.tokenizer.decode(whole["tokens"]) == "one two"
    assert [len(each["top_logprobs"]) for each in whole["completion_probabilities"]] == [2] * 7
    timings = whole["timings"]
    assert (timings["prompt_n"] + timings["cache_n"], timings["predicted_n"]) == (3, 7)
    assert timings["predicted_per_second"] > 0
    *parts, last = streamed
    assert "".join(part["content"] for part in parts) == "one t"
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert {part["stop"] for part in parts} == {False}
    assert {**last, "timings": 0, "content": whole["content"], "tokens": whole["tokens"]} == {
        name: 0 if name == "timings" else value
        for name, value in whole.items()
        if name != "completion_probabilities"
    }
    assert [(each["content"], each["stop_type"]) for each in several] == [("one", "limit")] * 2


def test_a_gap_is_filled_between_its_marks(marked: Running) -> None:
    llm = marked.service.llm
    seen: list[int] = []
    submit = marked.service.submit

    def noted(request: Any, listener: Any) -> str:
        seen[:] = request.token_ids
        return submit(request, listener)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(marked.service, "submit", noted)
        fields = {"input_prefix": "ab", "input_suffix": "ef", "prompt": "c", "n_predict": 1}
        assert marked.ask("POST", "/infill", fields).status == 200
    text = llm.tokenizer.decode(seen, skip_special=False)
    assert text == "<fim_prefix>ab<fim_suffix>ef<fim_middle>c"
    assert len(seen) == 8


def test_a_model_without_marks_fills_no_gap(server: Running) -> None:
    reply = server.ask("POST", "/infill", {"input_prefix": "a", "input_suffix": "b"})
    assert (reply.status, reply.error["param"]) == (400, "input_prefix")
