"""The command `penstock generate`."""

import json
from dataclasses import asdict, fields

from penstock.frontends import options
from penstock.frontends.exits import INTERRUPTED, reported

_prompt = options.in_panel("Prompt")
_answer = options.in_panel("Answer")


def generate(
    prompt: str | None = _prompt(
        None,
        "The prompt. With --prompt-file it follows the file's text and a blank line: "
        "a document, then a question about it.",
        metavar="TEXT",
    ),
    prompt_file: str | None = _prompt(
        None,
        "A file with the prompt, or - for standard input. Standard input is read too where there is "
        "neither this nor --prompt.",
        metavar="PATH",
    ),
    system: str | None = _prompt(None, "The system message.", metavar="TEXT"),
    raw: bool = _prompt(False, "Take the prompt as it is, without the chat template.", "--raw"),
    chunk: str | None = options.CHUNK,
    max_activation: str | None = options.MAX_ACTIVATION,
    target_itl_ms: str | None = options.TARGET_ITL_MS,
    target_ttft_ms: str | None = options.TARGET_TTFT_MS,
    align: bool | None = options.ALIGN,
    cache_dir: str | None = options.CACHE_DIR,
    cache_size: str | None = options.CACHE_SIZE,
    overlap: int = options.on_chunks(0, "Tokens at a chunk's end that the next runs again.", min=0),
    model: str = options.MODEL,
    dtype: options.Dtype = options.DTYPE,
    weights: str | None = options.WEIGHTS,
    activations: str | None = options.ACTIVATIONS,
    model_impl: str | None = options.MODEL_IMPL,
    device: str | None = options.DEVICE,
    threads: int | None = options.THREADS,
    stages: str | None = options.STAGES,
    layers: str | None = options.LAYERS,
    stage_timeout: float | None = options.STAGE_TIMEOUT,
    mixed: bool = options.MIXED,
    token_file: str | None = options.TOKEN_FILE,
    max_tokens: int | None = _answer(
        None, "Tokens to generate at most: 512, or what the context has left, by default.", min=0
    ),
    temperature: float = _answer(0.0, "0 takes the likeliest token; above 0, tokens are drawn."),
    top_k: int = _answer(0, "Draw from so many of the likeliest tokens; 0 is all."),
    top_p: float = _answer(1.0, "Draw from the likeliest tokens that make up this probability."),
    min_p: float = _answer(0.0, "Leave out tokens below this fraction of the likeliest one's probability."),
    repetition_penalty: float = _answer(1.0, "Above 1, tokens that were there before are less likely."),
    presence_penalty: float = _answer(
        0.0, "Above 0, tokens that the answer has had are less likely, however often."
    ),
    frequency_penalty: float = _answer(
        0.0, "Above 0, tokens are less likely the more often the answer has had them."
    ),
    seed: int | None = _answer(None, "Makes what is drawn repeatable."),
    logit_bias: list[str] | None = _answer(
        None, "Add this to a token's logit. May be given several times.", metavar="ID=BIAS"
    ),
    min_tokens: int = _answer(0, "Do not end the answer before it has so many tokens.", min=0),
    stop_token_ids: list[int] | None = _answer(
        None, "End the answer at this token. May be given several times.", "--stop-token", metavar="ID"
    ),
    allowed_token_ids: list[int] | None = _answer(
        None, "Only tokens that are named so. May be given several times.", "--allowed-token", metavar="ID"
    ),
    bad_sequences: list[str] | None = _answer(
        None,
        "Tokens that never come in a row, such as 12,7. May be given several times.",
        "--bad-tokens",
        metavar="IDS",
    ),
    stop: list[str] | None = _answer(
        None, "End the answer before this text. May be given several times.", metavar="TEXT"
    ),
    json_schema: str | None = _answer(
        None, "Answer with JSON of this schema: its text, or a file with it.", metavar="FILE|JSON"
    ),
    regex: str | None = _answer(None, "Answer with what this regular expression matches.", metavar="PATTERN"),
    choice: list[str] | None = _answer(
        None, "Answer with one of these texts. May be given several times.", metavar="TEXT"
    ),
    grammar: str | None = _answer(
        None, "Answer by this grammar of Lark or GBNF: its text, or a file with it.", metavar="FILE|TEXT"
    ),
    num_logprobs: int | None = _answer(
        None,
        "Log-probabilities of each token and of the N likeliest in its place, in the output of --json.",
        "--logprobs",
        min=0,
        metavar="N",
    ),
    prompt_logprobs: int | None = _answer(
        None, "The same of the prompt's own tokens, which are all read for it.", min=0, metavar="N"
    ),
    ignore_eos: bool = _answer(False, "Go on to --max-tokens, whatever tokens come.", "--ignore-eos"),
    as_json: bool = options.on_output(False, "Print one JSON object instead of the text.", "--json"),
    explain: bool = options.on_output(
        False, "Tell on standard error of each chunk why it was as long, and how long it took.", "--explain"
    ),
    quiet: bool = options.on_output(False, "Nothing on standard error but errors.", "--quiet"),
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
            read_grammar,
            read_prompt,
            read_schema,
            read_sequences,
            write,
        )
        from penstock.frontends.display import explain_lines, make_display

        settings = options.engine_settings(given)
        if explain and quiet:
            raise SettingError("explain", True, contradicts={"quiet": True})
        for name in ("num_logprobs", "prompt_logprobs"):
            if given[name] is not None and not as_json:
                raise SettingError(name, given[name], needs=("as_json",))
        if raw and system is not None:
            raise SettingError("system", ..., because="put it into the prompt itself", beside={"raw": True})
        for option, text in [("--system", system or ""), *(("--stop", text) for text in stop or ())]:
            check_text(option, text)
        formats = [name for name in ("json_schema", "regex", "choice", "grammar") if given[name]]
        if len(formats) > 1:
            raise SettingError(formats[0], ..., contradicts={formats[1]: ...})
        schema = None if json_schema is None else read_schema(json_schema)
        rules = None if grammar is None else read_grammar(grammar)
        whole_prompt = read_prompt(prompt, prompt_file)

        display = make_display(quiet)
        with display.busy("starting"):
            from penstock.engine.events import Grammar
            from penstock.engine.sampler import SamplingParams, StopMatcher
            from penstock.kernels.device import find_devices

            settings = settings.on(find_devices())
            given["logit_bias"] = read_bias(logit_bias or ())
            given["stop_token_ids"] = stop_token_ids or ()
            given["allowed_token_ids"] = allowed_token_ids or None
            given["bad_sequences"] = read_sequences(bad_sequences or ())
            sampling = SamplingParams(**{field.name: given[field.name] for field in fields(SamplingParams)})
            StopMatcher(stop or ())
            held = Grammar.regex(regex) if regex else Grammar.choice(choice) if choice else rules
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
                grammar=held,
                num_logprobs=num_logprobs,
                prompt_logprobs=prompt_logprobs,
                ignore_eos=ignore_eos,
            )
            if explain:
                for line in explain_lines(result.prefill.records):
                    display.note(line)
            if as_json:
                write(json.dumps({**result.to_dict(), "kernels": asdict(llm.kernels)}) + "\n")
        if result.finish_reason == "cancelled":
            raise SystemExit(INTERRUPTED)
