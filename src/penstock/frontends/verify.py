"""The command `penstock verify`."""

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from penstock.errors import PenstockError, SettingError
from penstock.files import require_outputs
from penstock.frontends import options
from penstock.frontends.exits import FAILED, INTERRUPTED, MISTAKE, NO_MODEL, NO_READER, complain, reported

MEANINGS = (
    f"Exit status: 0 all laws hold; {MISTAKE} an option or a prompt that is not accepted; {NO_MODEL} a model that "
    f"cannot be found, downloaded or read; {FAILED} a law is broken, with --memory a bar is missed, or any other "
    f"failure; {INTERRUPTED} interrupted; {NO_READER} whoever read standard output has gone."
)
_prompt = options.in_panel("Prompt")
_memory = options.in_panel("Memory")
# Of one kind of verification alone.
_OF_LAWS = [
    "prompt_file",
    "tokens",
    "max_tokens",
    "overlap",
    "strict",
    "reference",
    "tolerance",
    "json",
    "plot",
]
_NOT_OF_STAGES = ["memory", "max_tokens", "overlap", "strict", "reference", "tolerance", "plot"]
_OF_MEMORY = ["families", "prompts", "kernels", "quick", "full", "output"]


def verify(
    prompt_file: Path | None = _prompt(None, "A text to read, as it is.", metavar="FILE"),
    tokens: int | None = _prompt(
        None, "So many tokens of a text that every Python has: 600 by default.", min=1, metavar="N"
    ),
    max_tokens: int | None = _prompt(None, "Generated after the prompt: 16 by default.", min=1, metavar="N"),
    chunks: str | None = _prompt(
        None,
        "Chunk sizes: 1,7,64,100,512 by default; 1 is token by token, as chunks and as decodes. Two random "
        "schedules are run in any case.",
        metavar="N,N",
    ),
    overlap: int | None = _prompt(
        None, "Tokens that chunks have in common: 64 by default; 0 is none.", min=0, metavar="N"
    ),
    strict: bool = _prompt(
        False,
        "Requests run side by side as in `penstock serve --strict`: generated tokens keep their bits, too.",
        "--strict",
    ),
    reference: Literal["transformers"] | None = _prompt(None, "Compare with it, too, in float32."),
    tolerance: float | None = _prompt(
        None,
        "The largest difference in parts of the largest value, where the same bits are not promised: "
        "0.0001 in float32, 0.1 in bfloat16, 0.3 there with recurrent states, 0.5 with experts.",
        metavar="X",
    ),
    model: str | None = options.on_model(
        None,
        "smollm2 (the default), a folder with safetensors, a GGUF file or a Hugging Face name. With "
        "--memory random models of several families by default.",
        metavar="NAME",
    ),
    dtype: Literal["auto", "bfloat16", "float32"] | None = options.on_model(
        None, "What to compute in: auto by default, with --memory bfloat16."
    ),
    device: str | None = options.DEVICE,
    threads: int | None = options.THREADS,
    stages: str | None = options.on_model(
        None,
        "Compare these numbers of stages instead, such as 1,2,4: keys, values, states and logits of all layers must "
        "be the same bits, in chunks of 64, 100, 256 and whole by default.",
        metavar="N,N",
    ),
    json: Path | None = options.on_output(None, "Write everything that was found, as JSON.", metavar="FILE"),
    plot: Path | None = options.on_output(
        None, "Draw the differences by token (needs matplotlib).", metavar="FILE"
    ),
    memory: bool = _memory(
        False, "Compare predicted memory with the growth of fresh processes instead.", "--memory"
    ),
    families: str | None = _memory(None, "Random models, by family, such as qwen3-0.6b.", metavar="F,F"),
    prompts: str | None = _memory(None, "Prompt lengths, each with each of --chunks.", metavar="N,N"),
    kernels: Literal["auto", "torch", "native"] | None = _memory(None, "auto by default."),
    quick: bool = _memory(False, "One short case of each model.", "--quick"),
    full: bool = _memory(False, "All chunk sizes with all lengths, and larger layers too.", "--full"),
    output: Path | None = _memory(
        None, "The results as JSON: bench-results/memory.json by default.", metavar="FILE"
    ),
) -> None:
    """Prove on a model that chunks, other requests and the machine change no result.

    Runs one prompt in many ways (whole, in chunks of several sizes, token by token, beside other requests, with
    overlapping chunks) and compares what they leave behind: logits, keys and values, recurrent states, greedy tokens.
    Where the machine was found to give the same bits, they must be the same bit for bit; elsewhere, within a
    tolerance.
    """
    given = locals()
    with reported(verify), _crashes_reported():
        for name in _OF_LAWS if memory else _OF_MEMORY:
            if given[name] is None or given[name] is False:
                continue
            if memory:
                raise SettingError(name, ..., contradicts={"memory": True})
            raise SettingError(name, ..., needs=("memory",))
        sizes = _counts("chunks", chunks)
        if tolerance is not None and not (tolerance > 0 and math.isfinite(tolerance)):
            raise SettingError("tolerance", tolerance, "a number above 0")
        if prompt_file is not None and tokens is not None:
            raise SettingError("prompt_file", ..., contradicts={"tokens": tokens})

        from penstock.frontends.answer import loaded, read_text, write
        from penstock.frontends.display import make_display

        counts = _counts("stages", stages)
        for name in _NOT_OF_STAGES if counts else ():
            if given[name] is not None and given[name] is not False:
                raise SettingError(name, ..., contradicts={"stages": stages})
        settings = options.engine_settings(
            {**given, "chunk": 0, "dtype": dtype or "auto", "overlap": 0, "stages": None}
        )
        text = None if prompt_file is None else read_text(str(prompt_file))
        display = make_display()
        with display.busy("starting"):
            from penstock.measure import plots, report
            from penstock.measure.memory import memory_json, plan_jobs, verify_memory
            from penstock.measure.verify import DEFAULT_CHUNKS, DEFAULT_MAX_TOKENS, Checks, prompt_of
            from penstock.measure.verify import verify as prove

        if memory:
            started, json = time.perf_counter(), output or Path("bench-results/memory.json")
            require_outputs({"output": json})
            jobs = plan_jobs(
                model=model,
                families=None if families is None else families.split(","),
                chunks=sizes,
                prompts=_counts("prompts", prompts),
                quick=quick,
                full=full,
                dtype=dtype,
                kernels=kernels,
                device=device,
                threads=threads,
            )
            cases = verify_memory(jobs, display.note)
            passed, page = all(case.is_met for case in cases), report.render_memory(cases)
            found = memory_json(cases, time.perf_counter() - started)
        elif counts:
            from penstock.engine.llm import LLM
            from penstock.frontends.answer import fetch
            from penstock.measure.stages import DEFAULT_STAGE_CHUNKS, TOKENS_AT_ONCE, verify_stages

            require_outputs({"json": json})
            path = fetch(model or options.DEFAULT_MODEL, display)
            compared = verify_stages(
                lambda engine: LLM(path, settings=engine),
                settings,
                counts,
                lambda llm: prompt_of(llm, text, tokens, TOKENS_AT_ONCE),
                (*sizes, 0) if sizes else DEFAULT_STAGE_CHUNKS,
                display.note,
            )
            passed, page, found = compared.passed, compared.render(), compared.to_json()
        else:
            require_outputs({"json": json, "plot": plot})
            checks = Checks(
                chunks=sizes or DEFAULT_CHUNKS,
                overlap=overlap,
                max_tokens=max_tokens or DEFAULT_MAX_TOKENS,
                strict=strict,
                tolerance=tolerance,
                with_transformers=reference is not None,
            )
            with loaded(model or options.DEFAULT_MODEL, display, settings) as llm:
                results = prove(llm, prompt_of(llm, text, tokens, checks.max_tokens), checks, display.note)
            passed, page, found = results.passed, report.render_verify(results), results.to_json()
        write(f"\n{page}\n\n")
        if json is not None:
            json.write_text(found)
            write(f"results: {json}\n")
        if plot is not None:
            plots.draw_verify(results, plot)
            write(f"plot:    {plot}\n")
        if not passed:
            raise SystemExit(FAILED)


@contextlib.contextmanager
def _crashes_reported() -> Iterator[None]:
    """A line says that no law is broken: the exit status does not."""
    try:
        yield
    except (PenstockError, BrokenPipeError):
        raise
    except Exception as error:
        complain(f"it could not be run: {type(error).__name__}: {error}")
        raise SystemExit(FAILED) from None


def _counts(setting: str, text: str | None) -> tuple[int, ...] | None:
    """Whole numbers of 1 or more with commas between, each once, ascending."""
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise SettingError(setting, text, "whole numbers of 1 or more, with commas between")
    return tuple(sorted({int(part) for part in parts}))
