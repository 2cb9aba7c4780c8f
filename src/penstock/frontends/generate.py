"""The command `penstock generate`."""

import json
from functools import partial
from typing import Annotated, Literal

import typer

from penstock.frontends.exits import INTERRUPTED, reported

_model = partial(typer.Option, rich_help_panel="Model")
_prompt = partial(typer.Option, rich_help_panel="Prompt")
_answer = partial(typer.Option, rich_help_panel="Answer")
_output = partial(typer.Option, rich_help_panel="Output")


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
    chunk: Annotated[
        str | None,
        _prompt(
            metavar="TOKENS",
            help="Read the prompt in chunks of so many tokens; 0 is the whole prompt in one, auto leaves it "
            "to Penstock. Without it $PENSTOCK_PREFILL_CHUNK applies, else auto.",
        ),
    ] = None,
    max_activation: Annotated[
        str | None,
        _prompt(
            metavar="BYTES",
            help="The most memory that a step may need beside weights and cache, such as 512MiB: chunks are as long "
            "as that allows. Without it $PENSTOCK_MAX_ACTIVATION applies, else half of what is free.",
        ),
    ] = None,
    target_itl: Annotated[
        str | None,
        _prompt(
            metavar="MS",
            help="Milliseconds that a step may take at most, as others may wait for it: automatic chunks follow it. "
            "Without it $PENSTOCK_TARGET_ITL applies.",
        ),
    ] = None,
    target_ttft: Annotated[
        str | None,
        _prompt(
            metavar="MS",
            help="Milliseconds to a prompt's first token: automatic chunks are as long as that takes, within "
            "--target-itl. Without it $PENSTOCK_TARGET_TTFT applies.",
        ),
    ] = None,
    align: Annotated[
        bool | None,
        _prompt(
            "--align/--no-align",
            help="On a model with recurrent state, round the chunk up to a multiple of 64, which gives the same "
            "bits and runs faster; --no-align keeps any size. Without either $PENSTOCK_PREFILL_ALIGN (0 or 1) "
            "applies, else --align.",
        ),
    ] = None,
    cache_dir: Annotated[
        str | None,
        _prompt(
            metavar="PATH",
            help="Keep what was read in this folder: a prompt that begins alike, or was interrupted, goes on from "
            "there. Without it $PENSTOCK_CACHE_DIR applies, else nothing is kept.",
        ),
    ] = None,
    cache_size: Annotated[
        str | None,
        _prompt(
            metavar="BYTES",
            help="The most that the folder may hold, such as 20GiB; what was used longest ago goes first. Without it "
            "$PENSTOCK_CACHE_SIZE applies, else 10GiB.",
        ),
    ] = None,
    overlap: Annotated[int, _prompt(min=0, help="Tokens at a chunk's end that the next runs again.")] = 0,
    model: Annotated[
        str,
        _model(
            metavar="NAME", help="smollm2, a folder with safetensors, a GGUF file or a Hugging Face name."
        ),
    ] = "smollm2",
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"],
        _model(help="What to compute in; auto is bfloat16 where the device does it natively."),
    ] = "auto",
    weights: Annotated[
        str | None,
        _model(
            metavar="FORM",
            help="How weights lie in memory: auto (as quantised as the file has them), int8, int4, bf16 or f32. "
            "Without it $PENSTOCK_WEIGHTS applies, else auto.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        _model(
            metavar="NAME",
            help="Where it runs: cpu, cuda, cuda:1 and so on, mps, or auto, the first GPU of NVIDIA's, else the "
            "processor. Without it $PENSTOCK_DEVICE applies, else auto.",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        _model(
            min=1,
            metavar="NUMBER",
            help="Threads that compute. Without it $PENSTOCK_THREADS applies, else $OMP_NUM_THREADS, else as many as "
            "there are physical cores that the process may use.",
        ),
    ] = None,
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
    seed: Annotated[int | None, _answer(help="Makes what is drawn repeatable.")] = None,
    stop: Annotated[
        list[str] | None,
        _answer(metavar="TEXT", help="End the answer before this text. May be given several times."),
    ] = None,
    as_json: Annotated[bool, _output("--json", help="Print one JSON object instead of the text.")] = False,
    explain: Annotated[
        bool,
        _output(
            "--explain", help="Tell on standard error of each chunk why it was as long, and how long it took."
        ),
    ] = False,
    quiet: Annotated[bool, _output("--quiet", help="Nothing on standard error but errors.")] = False,
) -> None:
    """Read a prompt in chunks, answer it on standard output.

    Ctrl-C ends it after the chunk or token at hand and keeps what there is; a second Ctrl-C ends it at once.
    """
    with reported(generate):
        # What can be refused is refused before anything slow: first without torch, then without the model.
        from penstock.errors import SettingError
        from penstock.frontends.prompt import check_text, read_prompt
        from penstock.plan import EngineSettings

        settings = EngineSettings.resolve(
            dtype=dtype,
            weights=weights,
            device=device,
            chunk=chunk,
            max_activation=max_activation,
            target_itl_ms=target_itl,
            target_ttft_ms=target_ttft,
            overlap=overlap,
            align=align,
            threads=threads,
            cache_dir=cache_dir,
            cache_size=cache_size,
        )
        if explain and quiet:
            raise SettingError("explain", True, contradicts={"quiet": True})
        if raw and system is not None:
            raise SettingError("system", ..., because="put it into the prompt itself", beside={"raw": True})
        for option, text in [("--system", system or ""), *(("--stop", text) for text in stop or ())]:
            check_text(option, text)
        whole_prompt = read_prompt(prompt, prompt_file)

        from penstock.frontends.answer import answer, loaded, write
        from penstock.frontends.explain import explain_lines
        from penstock.frontends.present import make_display

        display = make_display(quiet)
        with display.busy("starting"):
            from penstock.engine.sampler import SamplingParams
            from penstock.engine.stop import StopMatcher
            from penstock.kernels.device import find_devices

            settings = settings.on(find_devices())
            sampling = SamplingParams(temperature, top_k, top_p, min_p, repetition_penalty, seed)
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
            )
            if explain:
                for line in explain_lines(result.prefill.records):
                    display.note(line)
            if as_json:
                write(json.dumps(result.to_dict()) + "\n")
        if result.finish_reason == "cancelled":
            raise SystemExit(INTERRUPTED)
