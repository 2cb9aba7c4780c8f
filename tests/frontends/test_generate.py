"""`penstock generate`, in this process, on a tiny random model."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.cache import BLOCK_TOKENS
from penstock.frontends import answer as answers
from penstock.frontends.display import LineDisplay
from penstock.plan.settings import KERNELS_VARIABLE
from tests.byte_models import CONTEXT
from tests.frontends.conftest import Generate

DOCUMENT = "Seven sluices, and none of them leaks. " * 8


def one_object(stdout: str) -> dict[str, Any]:
    assert stdout.endswith("}\n")
    assert stdout.count("\n") == 1
    loaded = json.loads(stdout)
    assert isinstance(loaded, dict)
    return loaded


def test_json_is_one_object_with_everything_in_it(generate: Generate) -> None:
    done = generate("--prompt", DOCUMENT, "--max-tokens", "5", "--chunk", "100", "--json")
    assert done.exit_code == 0, done.stderr
    result = one_object(done.stdout)
    assert {"text", "token_ids", "finish_reason", "usage", "timings", "prefill", "memory"} <= result.keys()
    assert len(result["token_ids"]) == 5
    assert result["finish_reason"] == "length"
    usage = result["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == 5
    prefill = result["prefill"]
    assert (prefill["requested"], prefill["effective"]) == ("100", 100)
    assert prefill["chunks"] == -(-usage["prompt_tokens"] // 100)
    assert prefill["reason"] == "set by --chunk"
    assert result["memory"]["peak_resident_bytes"] > result["memory"]["kv_cache_bytes"] > 0
    assert result["timings"]["time_to_first_token_s"] > 0


def test_slower_kernels_are_told_once(generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNELS_VARIABLE, "torch")
    arguments = ("--prompt", DOCUMENT, "--max-tokens", "1", "--json")
    told, quiet = generate(*arguments), generate(*arguments, "--quiet")
    kernels = one_object(told.stdout)["kernels"]
    assert kernels == one_object(quiet.stdout)["kernels"]
    assert (kernels["name"], kernels["instructions"]) == ("torch", None)
    assert f"{KERNELS_VARIABLE}=torch" in kernels["slower"]
    assert told.stderr.count(kernels["slower"]) == 1
    assert quiet.stderr == ""


@pytest.mark.parametrize("chunk", ["1", "7", "64", "100", "512", "auto"])
def test_the_answer_does_not_depend_on_the_chunk(generate: Generate, chunk: str) -> None:
    arguments = ("--prompt", DOCUMENT, "--max-tokens", "12", "--json")
    whole = one_object(generate(*arguments, "--chunk", "0").stdout)
    chunked = one_object(generate(*arguments, "--chunk", chunk).stdout)
    assert (chunked["text"], chunked["token_ids"]) == (whole["text"], whole["token_ids"])


def test_the_text_is_that_of_the_json(generate: Generate) -> None:
    arguments = ("--prompt", DOCUMENT, "--max-tokens", "12")
    text = one_object(generate(*arguments, "--json").stdout)["text"]
    assert generate(*arguments).stdout.removesuffix("\n") == text.removesuffix("\n")


def test_a_prompt_comes_from_an_option_a_file_or_standard_input(generate: Generate, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(DOCUMENT + "\n")
    tail = ("--max-tokens", "6", "--json")
    answers = [
        generate("--prompt", DOCUMENT, *tail),
        generate("--prompt-file", str(file), *tail),
        generate("--prompt-file", "-", *tail, input=DOCUMENT),
        generate(*tail, input=DOCUMENT + "\n"),
    ]
    assert len({tuple(one_object(done.stdout)["token_ids"]) for done in answers}) == 1


def test_a_file_and_a_prompt_are_a_document_and_a_question(generate: Generate, tmp_path: Path) -> None:
    file = tmp_path / "document.txt"
    file.write_text("The document.\n")
    both = generate("--prompt-file", str(file), "--prompt", "The question?", "--max-tokens", "6", "--json")
    one = generate("--prompt", "The document.\n\nThe question?", "--max-tokens", "6", "--json")
    assert one_object(both.stdout)["token_ids"] == one_object(one.stdout)["token_ids"]


def test_the_chat_template_applies_unless_raw(generate: Generate) -> None:
    def num_tokens(*arguments: str) -> int:
        done = generate("--prompt", "hello", "--max-tokens", "1", "--json", *arguments)
        return int(one_object(done.stdout)["usage"]["prompt_tokens"])

    assert num_tokens("--raw") == len("hello")
    assert num_tokens() == len("<user>hello\n<assistant>")
    assert num_tokens("--system", "Be brief.") == len("<system>Be brief.\n<user>hello\n<assistant>")


def test_a_seed_makes_draws_repeatable(generate: Generate) -> None:
    def draw(seed: str) -> list[int]:
        arguments = ["--temperature", "1.5", "--top-k", "100", "--top-p", "0.99", "--min-p", "0.001"]
        arguments += ["--repetition-penalty", "1.1", "--seed", seed, "--max-tokens", "20", "--json"]
        return list(one_object(generate("--prompt", DOCUMENT, *arguments).stdout)["token_ids"])

    assert draw("1") == draw("1") != draw("2")


def test_a_stop_text_ends_the_answer_before_it(generate: Generate) -> None:
    arguments = ("--prompt", DOCUMENT, "--max-tokens", "40", "--json")
    text = one_object(generate(*arguments).stdout)["text"]
    stop = text[len(text) // 2]
    result = one_object(generate(*arguments, "--stop", "never there", "--stop", stop).stdout)
    assert result["finish_reason"] == "stop"
    assert result["text"] == text.split(stop)[0]


def test_the_environment_sets_the_chunk_and_the_option_overrules_it(
    generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--prompt", DOCUMENT, "--max-tokens", "1", "--json")
    monkeypatch.setenv("PENSTOCK_PREFILL_CHUNK", "96")
    prefill = one_object(generate(*arguments).stdout)["prefill"]
    assert prefill["effective"] == 96
    assert "PENSTOCK_PREFILL_CHUNK" in prefill["reason"]
    assert one_object(generate(*arguments, "--chunk", "50").stdout)["prefill"]["effective"] == 50
    monkeypatch.setenv("PENSTOCK_PREFILL_CHUNK", "ninety")
    done = generate(*arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("penstock: PENSTOCK_PREFILL_CHUNK='ninety' is not accepted")


@pytest.mark.parametrize("option", [(), ("--align",), ("--no-align",)])
def test_alignment_is_not_a_matter_of_models_without_recurrent_state(
    generate: Generate, option: tuple[str, ...]
) -> None:
    done = generate("--prompt", DOCUMENT, "--max-tokens", "1", "--chunk", "100", "--json", *option)
    assert done.exit_code == 0, done.stderr
    prefill = one_object(done.stdout)["prefill"]
    assert (prefill["effective"], prefill["reason"]) == (100, "set by --chunk")
    assert "align" not in done.stderr


def test_a_bad_alignment_in_the_environment_is_refused_before_the_model_unless_overruled(
    generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_PREFILL_ALIGN", "yes")
    done = generate("--model", "no such model", "--prompt", "hello")
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("penstock: PENSTOCK_PREFILL_ALIGN='yes' is not accepted: give 1 to ")
    assert generate("--prompt", "hello", "--max-tokens", "1", "--no-align").exit_code == 0


def test_overlap_is_honoured(generate: Generate) -> None:
    arguments = ("--prompt", DOCUMENT, "--max-tokens", "4", "--chunk", "64", "--json")
    plain, overlapping = (one_object(generate(*arguments, "--overlap", n).stdout) for n in ("0", "32"))
    assert overlapping["prefill"]["chunks"] > plain["prefill"]["chunks"]
    assert overlapping["token_ids"] == plain["token_ids"]


def test_what_was_read_is_not_read_again(generate: Generate, tmp_path: Path) -> None:
    arguments = ("--prompt", DOCUMENT, "--max-tokens", "6", "--json", "--chunk", "50")
    alone = one_object(generate(*arguments).stdout)
    total = alone["usage"]["prompt_tokens"]
    found = (total - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    for num_cached in (0, found):
        done = generate(*arguments, "--cache-dir", str(tmp_path / "kept"), "--cache-size", "64MiB")
        assert done.exit_code == 0, done.stderr
        result = one_object(done.stdout)
        assert result["token_ids"] == alone["token_ids"]
        assert result["usage"]["cached_tokens"] == num_cached
        first, *_, closing = done.stderr.splitlines()
        said = f"{found} of {total} tokens were in the cache: reading goes on from there"
        assert (first == said) == (num_cached > 0)
        assert (f"{total} prompt tokens, {found} of them cached, " in closing) == (num_cached > 0)
    assert result["prefill"]["records"][0]["start"] == found
    quiet = generate(*arguments, "--cache-dir", str(tmp_path / "kept"), "--quiet")
    assert (quiet.stderr, one_object(quiet.stdout)["usage"]["cached_tokens"]) == ("", found)


def test_the_folder_may_come_from_the_environment(
    generate: Generate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    arguments = ("--prompt", DOCUMENT, "--max-tokens", "1", "--json")
    numbers = [one_object(generate(*arguments).stdout)["usage"]["cached_tokens"] for _ in range(2)]
    assert numbers[0] == 0 < numbers[1]
    monkeypatch.setenv("PENSTOCK_CACHE_SIZE", "much")
    done = generate("--model", "no such model", "--prompt", "hello")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("penstock: PENSTOCK_CACHE_SIZE='much' is not accepted")


def test_a_folder_that_cannot_be_used_is_a_warning(generate: Generate, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    arguments = ("--prompt", DOCUMENT, "--max-tokens", "3", "--json")
    done = generate(*arguments, "--cache-dir", str(tmp_path / "file" / "kept"))
    assert done.exit_code == 0
    assert one_object(done.stdout)["token_ids"] == one_object(generate(*arguments).stdout)["token_ids"]
    warning, *others = done.stderr.splitlines()
    assert warning.startswith("penstock: warning: ")
    assert not any("warning" in line for line in others)


def test_progress_and_closing_line_are_plain_lines_on_standard_error(
    generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LineDisplay, "_EVERY_S", math.inf)  # by what was read alone, however long it took
    done = generate("--prompt", DOCUMENT * 4, "--max-tokens", "3", "--chunk", "8")
    lines = done.stderr.splitlines()
    *progress, closing = lines
    assert 3 <= len(progress) <= 13
    assert all(line.startswith("prefill ") and "tok/s, chunk " in line for line in progress)
    assert not any(ord(character) < 32 for line in lines for character in line)
    total = int(progress[-1].split()[1].split("/")[1])
    assert progress[-1].startswith(f"prefill {total}/{total} tokens")
    for part in (f"{total} prompt tokens", "first token after", "prefill", "decode", "peak memory"):
        assert part in closing
    assert "chunk 8 (set by --chunk)" in closing


def test_weights_that_are_skipped_are_named(generate: Generate, tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    file = folder / "model.safetensors"
    with_more = {**load_file(file), "mtp.fc.weight": torch.zeros(2, 2), "model.visual.a.bias": torch.zeros(2)}
    save_file(with_more, file, metadata={"format": "pt"})
    arguments = ("--prompt", "hello", "--max-tokens", "3", "--model", str(folder))
    done = generate(*arguments)
    assert done.exit_code == 0, done.stderr
    assert done.stderr.splitlines()[0] == "skipped: 1 multi-token-prediction weight, 1 vision weight"
    assert generate(*arguments, "--quiet").stderr == ""
    assert done.stdout == generate("--prompt", "hello", "--max-tokens", "3").stdout


def test_quiet_leaves_only_the_answer(generate: Generate) -> None:
    arguments = ("--prompt", DOCUMENT, "--max-tokens", "3")
    quiet = generate(*arguments, "--quiet")
    assert quiet.stderr == ""
    assert quiet.stdout == generate(*arguments).stdout
    both = generate(*arguments, "--quiet", "--json")
    assert both.stderr == ""
    one_object(both.stdout)


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(generate: Generate) -> None:
    done = generate("--prompt", "x" * CONTEXT, "--raw", "--max-tokens", "7")
    assert done.exit_code == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert str(CONTEXT + 7) in line
    assert f"{CONTEXT} tokens" in line
    assert "max_tokens is 7" in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--chunk", "-1"), "--chunk '-1' is not accepted"),
        (("--chunk", "many"), "--chunk 'many' is not accepted"),
        (("--chunk", "8", "--overlap", "8"), "--overlap 8 is not accepted with --chunk 8"),
        (("--temperature", "-1"), "--temperature -1.0 is not accepted"),
        (("--temperature", "nan"), "--temperature nan is not accepted"),
        (("--top-k", "-1"), "--top-k -1 is not accepted"),
        (("--top-p", "0"), "--top-p 0.0 is not accepted"),
        (("--min-p", "1"), "--min-p 1.0 is not accepted"),
        (("--repetition-penalty", "0"), "--repetition-penalty 0.0 is not accepted"),
        (("--threads", "100000000"), "--threads 100000000 is not accepted"),
        (("--device", "gpu"), "--device 'gpu' is not accepted: give auto, cpu, cuda"),
        (("--device", "cuda:99"), "--device 'cuda:99' is not accepted here: torch sees cpu"),
        (("--seed", "-1"), "--seed -1 is not accepted"),
        (("--stop", ""), "--stop '' is not accepted"),
        (("--cache-dir", "x", "--cache-size", "0"), "--cache-size '0' is not accepted"),
        (
            ("--cache-size", "1GiB"),
            "--cache-size '1GiB' needs --cache-dir or PENSTOCK_CACHE_DIR",
        ),
        (("--cache-dir", "x", "--overlap", "8"), "--overlap 8 contradicts --cache-dir"),
        (("--raw", "--system", "x"), "--system is not accepted with --raw"),
        (("--target-itl", "soon"), "--target-itl 'soon' is not accepted"),
        (("--explain", "--quiet"), "--explain contradicts --quiet"),
        (("--system", "\udcff"), "--system is not accepted: it is not UTF-8 text"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_option(
    generate: Generate, arguments: tuple[str, ...], said: str
) -> None:
    done = generate("--prompt", "hello", *arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"penstock: {said}")


def test_an_answer_of_a_schema_from_text_or_file(generate: Generate, tmp_path: Path) -> None:
    schema = '{"type": "boolean"}'
    (tmp_path / "schema.json").write_text(schema)
    for given in (schema, str(tmp_path / "schema.json")):
        done = generate("--prompt", "hello", "--json-schema", given, "--quiet")
        assert done.exit_code == 0, done.stderr
        assert json.loads(done.stdout) in (True, False)


@pytest.mark.parametrize("given", ["{", "[1]", "no-such-file.json", '{"type": "nonsense"}'])
def test_what_is_no_schema_is_refused(generate: Generate, given: str) -> None:
    done = generate("--prompt", "hello", "--json-schema", given)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("penstock: --json-schema ")


@pytest.mark.parametrize("option", ["--json-schema", "--grammar"])
def test_a_file_without_an_end_is_not_read_to_it(
    generate: Generate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr(answers, "MAX_TEXT_BYTES", 1000)
    (tmp_path / "large").write_text(" " * 1001)
    done = generate("--prompt", "hello", option, str(tmp_path / "large"))
    assert (done.exit_code, done.stdout) == (2, "")
    assert "it has more than 1000 bytes" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (("--regex", "[xy]{3}/"), "[xy]{3}/"),
        (("--choice", "up", "--choice", "down"), "up|down"),
        (("--grammar", 'root ::= "x" [0-9]'), "x[0-9]"),
        (("--grammar", "FILE"), "zz"),
    ],
    ids=str,
)
def test_an_answer_by_a_grammar(
    generate: Generate, tmp_path: Path, arguments: tuple[str, ...], pattern: str
) -> None:
    file = tmp_path / "grammar.lark"
    file.write_text('start: "z" "z"\n')
    given = [str(file) if argument == "FILE" else argument for argument in arguments]
    result = generate("--prompt", "x", "--max-tokens", "20", *given)
    assert re.fullmatch(pattern + "\n", result.stdout), result.stdout
    assert generate("--prompt", "x", *given, "--json-schema", "{}").exit_code == 2
    assert generate("--prompt", "x", "--grammar", str(tmp_path / "none")).exit_code == 2


def test_log_probabilities_are_in_the_json(generate: Generate) -> None:
    arguments = ("--prompt", "hello", "--max-tokens", "3", "--logprobs", "2")
    told = one_object(generate(*arguments, "--ignore-eos", "--json", "--quiet").stdout)
    assert len(told["logprobs"]) == told["usage"]["completion_tokens"] == 3
    refused = generate(*arguments)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr == "penstock: --logprobs 2 needs --json\n"


def test_a_bias_decides(generate: Generate) -> None:
    arguments = ("--prompt", "hello", "--max-tokens", "3", "--ignore-eos", "--quiet", "--json")
    told = one_object(generate(*arguments, "--logit-bias", "65=100", "--logit-bias", "66=-100").stdout)
    assert told["token_ids"] == [65, 65, 65]
    for bias in ("65", "a=1", "65=much", "65=101", "-1=1"):
        refused = generate(*arguments, "--logit-bias", bias)
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert refused.stderr.startswith("penstock: --logit-bias ")


def test_penalties_change_the_answer(generate: Generate) -> None:
    arguments = ("--prompt", DOCUMENT, "--max-tokens", "12", "--ignore-eos", "--quiet", "--json")
    plain = one_object(generate(*arguments).stdout)["token_ids"]
    for penalty in ("--presence-penalty", "--frequency-penalty"):
        other = one_object(generate(*arguments, penalty, "2").stdout)["token_ids"]
        assert len(set(other)) >= len(set(plain))
        refused = generate(*arguments, penalty, "3")
        assert refused.exit_code == 2
        assert f"{penalty} 3.0 is not accepted" in refused.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--bogus",),
        ("--max-tokens", "-1"),
        ("--threads", "0"),
        ("--overlap", "-1"),
        ("--dtype", "int8"),
        ("word",),
    ],
)
def test_an_unknown_option_or_value_is_a_usage_error(generate: Generate, arguments: tuple[str, ...]) -> None:
    done = generate("--prompt", "hello", *arguments)
    assert done.exit_code == 2
    assert "Usage: " in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_home_folder_it_says_what_to_set(
    generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", "~no-such-user/x")
    done = generate("--model", "smollm2", "--prompt", "hello")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "penstock: PENSTOCK_HOME='~no-such-user/x' is not accepted: it names no user's home folder"
    )

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("PENSTOCK_HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    done = generate("--model", "smollm2", "--prompt", "hello")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("penstock: this user has no home folder: set PENSTOCK_HOME to ")


def test_a_model_that_is_not_there_has_a_status_of_its_own(generate: Generate, tmp_path: Path) -> None:
    done = generate("--model", str(tmp_path / "none"), "--prompt", "hello")
    assert done.exit_code == 3
    (line,) = done.stderr.splitlines()
    assert line.startswith("penstock: ")
    assert str(tmp_path / "none") in line
