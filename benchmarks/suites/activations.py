"""What 8-bit activations change: how likely a text is, which tokens are the likeliest, and how fast it is read."""

import argparse
import math
from collections.abc import Sequence
from functools import partial

from benchmarks.harness import Bench, rotated
from benchmarks.models import pieces, text_subject
from benchmarks.suite import Suite, number, value
from penstock.engine.llm import LLM

PERPLEXITY = "perplexity of a text"
LIKELIEST = "the same likeliest token"
SPEED = "speed"
PLAIN, ROUNDED, UNPACKED = "plain", "int8", "weights of bfloat16"
_ROUNDS = 5


def measure_text(llms: dict[str, LLM], windows: Sequence[Sequence[int]], bench: Bench) -> None:
    """Each window of the text is a prompt: the tokens' log-probabilities, and the likeliest token at each place."""
    logprobs: dict[str, list[float]] = {name: [] for name in llms}
    likeliest: dict[str, list[int]] = {name: [] for name in llms}
    for window in windows:
        for name, llm in llms.items():
            found = llm.generate(window, max_tokens=0, prompt_logprobs=1).prompt_logprobs or ()
            logprobs[name] += [each.logprob for each in found if each is not None]
            likeliest[name] += [each.most_likely[0].token for each in found if each is not None]
    for name, values in logprobs.items():
        bench.results.add(PERPLEXITY, "all windows", "", math.exp(-sum(values) / len(values)), system=name)
    for one, other in ((ROUNDED, PLAIN), (ROUNDED, UNPACKED), (PLAIN, UNPACKED)):
        same = [a == b for a, b in zip(likeliest[one], likeliest[other], strict=True)]
        bench.results.add(LIKELIEST, f"{one} and {other}", "share", sum(same) / len(same), system=one)


def measure_speed(
    llms: dict[str, LLM], prompts: Sequence[Sequence[int]], num_decodes: int, num_rounds: int, bench: Bench
) -> None:
    for index, names in enumerate(rotated(llms, num_rounds + 1)):
        for prompt in prompts:
            for name in names:
                timings = llms[name].generate(prompt, max_tokens=num_decodes, ignore_eos=True).timings
                after = f"after {len(prompt):,} tokens"
                row = {
                    f"{len(prompt):,} tokens read": ("tokens/s", timings.prefill_tokens_per_s),
                    f"decodes {after}": ("tokens/s", timings.decode_tokens_per_s),
                }
                if index:  # the first round warms up
                    bench.results.add_row(SPEED, row, name, index - 1)
    for figure in [each for each in bench.results.of(SPEED) if each.system == ROUNDED]:
        bench.results.add_ratio(f"{ROUNDED} over {PLAIN}", SPEED, figure.name, ROUNDED, PLAIN)


def _measure(options: argparse.Namespace, bench: Bench) -> None:
    subject = text_subject(options.model)
    subject.require_room(max(options.window, *options.lengths), options.decode_tokens, "smaller --lengths")
    load = partial(LLM, options.model, threads=options.threads)
    llms = {
        name: load(weights=options.weights, activations=activations)
        for name, activations in ((PLAIN, "plain"), (ROUNDED, "int8"))
    }
    bench.describe(subject.description, options, "weights", "window", "windows", "lengths", "decode_tokens")
    if options.windows is not None:
        all_llms = llms | {UNPACKED: load(weights="bf16", activations="plain")}
        measure_text(all_llms, pieces(subject, [options.window] * options.windows), bench)
        del all_llms
    prompts = pieces(subject, options.lengths)
    measure_speed(llms, prompts, options.decode_tokens, options.repeats or _ROUNDS, bench)


ACTIVATIONS = Suite(
    "Activations rounded to 8 bits (--activations int8) beside plain ones: speed, taking turns; with --windows also "
    "perplexity and likeliest tokens, beside weights of bfloat16, too. The text is Python's help topics.",
    _measure,
    repeats=f"rounds ({_ROUNDS})",
    takes=("--model", "--threads"),
    options={
        "--weights": value(str, "auto", "FORM", "how weights lie in memory (%(default)s)"),
        "--windows": number(None, "windows of the text to read for what is likely (none)"),
        "--window": number(512, "tokens of a window"),
        "--lengths": number((512, 2048), "tokens of the prompts that are timed"),
        "--decode-tokens": number(32, "tokens that are generated after each"),
    },
)
