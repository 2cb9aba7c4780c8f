"""`penstock verify`: prove the laws on a model of the user's, end to end, and say where they break."""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from penstock.bench.plot import can_plot
from penstock.bench.verify_laws import Checks, default_tolerance, resolve_overlap, run_checks
from penstock.bench.verify_options import DEFAULT_TOKENS, parse_verify_options
from penstock.bench.verify_report import render
from penstock.bench.verify_results import VerifyResults
from penstock.bench.verify_runs import Subject, run_chunks
from penstock.engine.llm import LLM
from penstock.errors import ContextLengthError, PenstockError, PromptError, SettingError
from penstock.measure.machine import this_machine
from penstock.measure.prompts import text_tokens
from penstock.models.hub import resolve_model
from penstock.models.opened import open_weights
from penstock.models.reading import first_line


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 where all laws hold, 1 where one is broken, 2 where that could not be found out."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if "--memory" in arguments:
            from penstock.bench.verify_memory import main as verify_memory

            return verify_memory([argument for argument in arguments if argument != "--memory"])
        options = parse_verify_options(arguments)
        _check_outputs(options)
        results = _verify(options)
        print(f"\n{render(results)}\n")
        _write(results, options)
        return 0 if results.passed else 1
    except PenstockError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped: nothing was written", file=sys.stderr)
        return 130
    except Exception as error:  # 1 would say that a law is broken
        print(f"error: it could not be run: {type(error).__name__}: {first_line(error)}", file=sys.stderr)
        return 2


def _verify(options: argparse.Namespace) -> VerifyResults:
    started = time.perf_counter()
    text = None if options.prompt_file is None else _read(options.prompt_file)
    path = resolve_model(options.model)
    llm = LLM(path, dtype=options.dtype, chunk=0, device=options.device, threads=options.threads)
    prompt = _prompt(llm, text, options)
    model = llm.model
    checks = Checks(
        chunks=options.chunks,
        overlap=resolve_overlap(options.overlap, len(prompt)),
        strict=options.strict,
        tolerance=options.tolerance or default_tolerance(model.dtype, model.config),
        same_bits=llm.probe.same_bits,
    )
    subject = Subject(model, llm.canon, llm.tokenizer, tuple(prompt), options.max_tokens)
    _say("the whole prompt in one chunk ...")
    whole = run_chunks(subject)
    comparisons = list(run_checks(subject, whole, checks, _say))
    if options.reference is not None:
        from penstock.bench.verify_reference import compare_with_transformers

        _say("transformers ...")
        comparisons.append(compare_with_transformers(subject, whole, path, checks.tolerance))
    token_ids = (*prompt, *whole.generated)
    firsts = [each.greedy.first for each in comparisons if each.greedy is not None]
    named = {*token_ids, *(token for first in firsts if first for token in (first.token, first.expected))}
    with contextlib.closing(open_weights(path)) as source:
        description = source.describe()
    return VerifyResults(
        machine=this_machine(),
        model=description,
        dtype=str(model.dtype).removeprefix("torch."),
        kernels=model.kernels.name,
        probe=llm.probe,
        token_ids=token_ids,
        texts={token: llm.tokenizer.decode([token], skip_special=False) for token in sorted(named)},
        num_prompt=len(prompt),
        num_positions=len(subject.positions),
        tolerance=checks.tolerance,
        strict=options.strict,
        comparisons=tuple(comparisons),
        duration_s=time.perf_counter() - started,
    )


def _prompt(llm: LLM, text: str | None, options: argparse.Namespace) -> list[int]:
    """At least two tokens, so that there is something to cut; with what follows, no more than the context holds."""
    room = llm.context_length - options.max_tokens - 1
    if text is not None:
        prompt = llm.tokenize(text, raw=True)
    else:
        prompt = text_tokens(llm.tokenizer, options.tokens or max(min(DEFAULT_TOKENS, room), 2))
    if len(prompt) < 2:
        raise PromptError(f"a prompt of {len(prompt)} tokens cannot be cut: give at least 2")
    if len(prompt) > room:
        raise ContextLengthError(
            f"{len(prompt)} tokens and {options.max_tokens} generated after them do not fit into the model's context "
            f"of {llm.context_length}: give a shorter prompt or fewer --max-tokens"
        )
    return prompt


def _read(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        raise PromptError(f"--prompt-file {path}: {error.strerror or error}; give a text file") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"--prompt-file {path} is not UTF-8 text: convert it first") from error


def _check_outputs(options: argparse.Namespace) -> None:
    """Better to know now than after the work."""
    if options.plot is not None and not can_plot():
        raise SettingError("--plot needs matplotlib, which is not installed: pip install matplotlib")
    for name, path in (("--json", options.json), ("--plot", options.plot)):
        if path is None:
            continue
        folder = path.resolve().parent
        if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise SettingError(f"{name} {path} cannot be written: give a file in a folder that is there")


def _write(results: VerifyResults, options: argparse.Namespace) -> None:
    if options.json is not None:
        options.json.write_text(results.to_json())
        print(f"results: {options.json}")
    if options.plot is not None:
        from penstock.bench.verify_plot import draw

        draw(results, options.plot)
        print(f"plot:    {options.plot}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
