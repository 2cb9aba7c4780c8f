"""`python -m penstock.bench.tune`: measure a model on this machine and keep what `--chunk auto` starts from."""

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from penstock.bench.options import add_device, count
from penstock.bench.plot import can_plot
from penstock.bench.tune_measure import fit_error, measure_profile, measure_speed
from penstock.bench.tune_plan import plan_tuning
from penstock.bench.tune_plot import draw
from penstock.bench.tune_report import render
from penstock.engine.llm import LLM
from penstock.engine.profile import TuneProfile, load_profile, profile_key, profile_path, save_profile
from penstock.errors import PenstockError, SettingError
from penstock.measure.prompts import text_tokens
from penstock.models.hub import DEFAULT_MODEL, resolve_model
from penstock.models.opened import open_weights

_SECONDS = 240.0
_QUICK_SECONDS = 40.0


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0; 1 where --show found no profile; 2 where nothing could be measured or kept."""
    try:
        return _run(_parser().parse_args(arguments))
    except PenstockError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped: nothing was kept", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock tune",
        description="Time steps of this model on this machine, whole prompts in chunks of several sizes, and "
        "memory; print what was found and keep it in the cache folder, for --chunk auto to start from. Best with "
        "nothing else running.",
    )
    add = parser.add_argument
    add(
        "--model",
        default=DEFAULT_MODEL,
        help="smollm2, a folder, a GGUF file or a Hugging Face name (%(default)s)",
    )
    add("--quick", action="store_true", help="fewer sizes, one length, no measured memory")
    add(
        "--seconds",
        type=_positive,
        metavar="S",
        help=f"about how long to take, loading and memory aside ({_SECONDS:.0f}; {_QUICK_SECONDS:.0f} with --quick)",
    )
    add("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="(%(default)s)")
    add_device(parser)
    add("--threads", type=count, metavar="N", help="threads that torch computes with (torch's own choice)")
    add("--plot", type=Path, metavar="FILE", help="draw a picture")
    add("--json", type=Path, metavar="FILE", help="write what was found as JSON, too")
    add("--show", action="store_true", help="print the stored profile, and measure nothing")
    return parser


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def _run(options: argparse.Namespace) -> int:
    if options.plot is not None and not can_plot():
        raise SettingError("--plot needs matplotlib, which is not installed: pip install matplotlib")
    for name, path in (("--plot", options.plot), ("--json", options.json)):
        if path is not None:
            _require_writable(name, path)
    model_path = resolve_model(options.model)
    llm = LLM(model_path, dtype=options.dtype, device=options.device, threads=options.threads)
    stored_at = profile_path(profile_key(llm))
    if options.show:
        stored = load_profile(llm)
        if stored is None:
            _say(f"there is no profile of this model on this machine in {stored_at}: penstock tune makes one")
            return 1
        profile = stored
    else:
        profile = _measure(llm, model_path, options)
        stored_at = save_profile(profile)
    print(f"{render(profile)}\n\nprofile: {stored_at}")
    if options.json is not None:
        options.json.write_text(_as_json(profile))
        print(f"json:    {options.json}")
    if options.plot is not None:
        draw(profile, options.plot)
        print(f"plot:    {options.plot}")
    return 0


def _measure(llm: LLM, model_path: Path, options: argparse.Namespace) -> TuneProfile:
    with contextlib.closing(open_weights(model_path)) as source:
        name = source.describe()
    prompt = text_tokens(llm.tokenizer, llm.context_length)
    tokens_per_s = measure_speed(llm, prompt[: llm.context_length - 2])
    seconds = options.seconds or (_QUICK_SECONDS if options.quick else _SECONDS)
    plan = plan_tuning(llm.context_length, tokens_per_s, seconds, quick=options.quick)
    if not options.quick and not plan.memory_tokens:
        _say(f"{seconds:g} s are too few for all sizes on this machine: fewer are measured, as with --quick")
    _say(
        f"{name}: {tokens_per_s:,.0f} tokens/s; {len(plan.steps)} kinds of steps, {plan.step_rounds} rounds: "
        f"about {plan.num_tokens / tokens_per_s:.0f} s"
    )
    return measure_profile(llm, model_path, name, prompt, plan, _say)


def _as_json(profile: TuneProfile) -> str:
    error = fit_error(profile.coefficients, profile.measurements.steps)
    return json.dumps({**asdict(profile), "fit_error": asdict(error)}, indent=1) + "\n"


def _require_writable(name: str, path: Path) -> None:
    """Better to know now than after the measurements."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise SettingError(
            f"{name} {path}: {error.strerror or error}; give a file in a folder of yours"
        ) from error


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
