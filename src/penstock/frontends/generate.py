"""The command `penstock generate`."""

import json
from dataclasses import fields
from functools import partial
from typing import Annotated

import typer

from penstock.frontends import options
from penstock.frontends.exits import INTERRUPTED, reported

_prompt = partial(typer.Option, rich_help_panel="Prompt")
_answer = partial(typer.Option, rich_help_panel="Answer")


def generate(
    prompt: Annotated[
        str | None,
        _prompt(
            metavar="TEXT",
            help="The prompt. With --prompt-file it follows the file's text and a blank line: "
            "a document, then a question about it.",
        ),
    ] = None,
    prompt_file: Annotated[
        str | None,
        _prompt(
            metavar="PATH",
            help="A file with the prompt, or - for standard input. Standard input is read too where there is "
            "neither this nor --prompt.",
        ),
    ] = None,
    system: Annotated[str | None, _prompt(metavar="TEXT", help="The system message.")] = None,
    raw: Annotated[
        bool, _prompt("--raw", help="Take the prompt as it is, without the chat template.")
    ] = False,
    chunk: options.Chunk = None,
    max_activation: options.MaxActivation = None,
    target_itl_ms: options.TargetItl = None,
    target_ttft_ms: options.TargetTtft = None,
    align: options.Align = None,
    cache_dir: options.CacheDir = None,
    cache_size: options.CacheSize = None,
    overlap: Annotated[
        int, options.on_chunks(min=0, help="Tokens at a chunk's end that the next runs again.")
    ] = 0,
    model: options.Model = options.DEFAULT_MODEL,
    dtype: options.Dtype = "auto",
    weights: options.Weights = None,
    device: options.Device = None,
    threads: options.Threads = None,
    max_tokens: Annotated[
        int | None,
        _answer(min=1, help="Tokens to generate at most: 512, or what the context has left, by default."),
    ] = None,
    temperature: Annotated[
        float, _answer(help="0 takes the likeliest token; above 0, tokens are drawn.")
    ] = 0.0,
    top_k: Annotated[int, _answer(help="Draw from so many of the likeliest tokens; 0 is all.")] = 0,
    top_p: Annotated[
        float, _answer(help="Draw from the likeliest tokens that make up this probability.")
    ] = 1.0,
    min_p: Annotated[
        float, _answer(help="Leave out tokens below this fraction of the likeliest one's probability.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, _answer(help="Above 1, tokens that were there before are less likely.")
    ] = 1.0,
    presence_penalty: Annotated[
        float, _answer(help="Above 0, tokens that the answer has had are less likely, however often.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, _answer(help="Above 0, tokens are less likely the more often the answer has had them.")
    ] = 0.0,
    seed: Annotated[int | None, _answer(help="Makes what is drawn repeatable.")] = None,
    logit_bias: Annotated[
        list[str] | None,
        _answer(metavar="ID=BIAS", help="Add this to a token's logit. May be given several times."),
    ] = None,
    stop: Annotated[
        list[str] | None,
        _answer(metavar="TEXT", help="End the answer before this text. May be given several times."),
    ] = None,
    json_schema: Annotated[
        str | None,
        _answer(metavar="FILE|JSON", help="Answer with JSON of this schema: its text, or a file with it."),
    ] = None,
    num_logprobs: Annotated[
        int | None,
        _answer(
            "--logprobs",
            min=0,
            metavar="N",
            help="Log-probabilities of each token and of the N likeliest in its place, in the output of --json.",
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, _answer("--ignore-eos", help="Go on to --max-tokens, whatever tokens come.")
    ] = False,
    as_json: Annotated[
        bool, options.on_output("--json", help="Print one JSON object instead of the text.")
    ] = False,
    explain: Annotated[
        bool,
        options.on_output(
            "--explain", help="Tell on standard error of each chunk why it was as long, and how long it took."
        ),
    ] = False,
    quiet: Annotated[
        bool, options.on_output("--quiet", help="Nothing on standard error but errors.")
    ] = False,
) -> None:
    """Read a prompt in chunks, answer it on standard output.

    Ctrl-C ends it after the chunk or token at hand and keeps what there is; a second Ctrl-C ends it at once.
    """
    given = locals()
    with reported(generate):
        # What can be refused is refused before anything slow: first without torch, then without the model.
        from penstock.errors import SettingError
        from penstock.frontends.answer import (
            answer,
            check_text,
            loaded,
            read_bias,
            read_prompt,
            read_schema,
            write,
        )
        from penstock.frontends.display import explain_lines, make_display

        settings = options.engine_settings(given)
        if explain and quiet:
            raise SettingError("explain", True, contradicts={"quiet": True})
        if num_logprobs is not None and not as_json:
            raise SettingError("num_logprobs", num_logprobs, needs=("as_json",))
        if raw and system is not None:
            raise SettingError("system", ..., because="put it into the prompt itself", beside={"raw": True})
        for option, text in [("--system", system or ""), *(("--stop", text) for text in stop or ())]:
            check_text(option, text)
        schema = None if json_schema is None else read_schema(json_schema)
        whole_prompt = read_prompt(prompt, prompt_file)

        display = make_display(quiet)
        with display.busy("starting"):
            from penstock.engine.sampler import SamplingParams, StopMatcher
            from penstock.kernels.device import find_devices

            settings = settings.on(find_devices())
            given["logit_bias"] = read_bias(logit_bias or ())
            sampling = SamplingParams(**{field.name: given[field.name] for field in fields(SamplingParams)})
            StopMatcher(stop or ())
        with loaded(model, display, settings) as llm:
            result = answer(
                llm,
                whole_prompt,
                display,
                shows_text=not as_json,
                system=system,
                raw=raw,
                max_tokens=max_tokens,
                sampling=sampling,
                stop=stop or (),
                json_format=schema,
                num_logprobs=num_logprobs,
                ignore_eos=ignore_eos,
            )
            if explain:
                for line in explain_lines(result.prefill.records):
                    display.note(line)
            if as_json:
                write(json.dumps(result.to_dict()) + "\n")
        if result.finish_reason == "cancelled":
            raise SystemExit(INTERRUPTED)
