"""What it costs that an answer does not depend on what runs beside it: single steps, strict and plain in turns."""

import argparse
import time
from collections.abc import Sequence

from benchmarks.harness import Bar, Bench, Results, bar_of, rotated, take_turns
from benchmarks.models import pieces, text_subject
from benchmarks.suite import Suite, number
from benchmarks.suites.serve import cache_places
from penstock.engine.events import GenerationRequest
from penstock.engine.llm import LLM
from penstock.engine.service import ServiceConfig
from penstock.measure.stages import tokens_at_once
from penstock.measure.steps import StepSpec, StepTimer
from penstock.plan.policy import ScheduleConfig

STRICT, PLAIN = "strict", "plain"
COST, TURNS_COST = "processor time, strict over plain", "time, strict over plain"
MOST_COST = 1.08
_REPEATS, _WARM_UPS = 7, 1
_SHORT_STEPS = 8  # of a turn without a chunk


def _measure(options: argparse.Namespace, bench: Bench) -> None:
    subject, past = text_subject(options.model), options.past
    subject.require_room(past + max(options.chunks), 0, "smaller --past or --chunks")
    llm = LLM(
        options.model,
        device=options.device,
        threads=options.threads,
        weights=options.weights,
        activations=options.activations,
    )
    bench.describe(
        subject.description,
        options,
        *("decodes", "chunks", "past", "weights", "activations"),
        free_decodes=llm.canon.free_decodes,
        few_rows=llm.canon.few_rows,
    )
    _time_steps(llm, subject.prompt(past + max(options.chunks)), options, bench)
    _compare_answers(llm, pieces(subject, [past] * options.requests), options.request_tokens, bench)


def _time_steps(llm: LLM, prompt: Sequence[int], options: argparse.Namespace, bench: Bench) -> None:
    specs = {
        f"{decodes} decode{'s' * (decodes > 1)}{f' beside a chunk of {chunk}' if chunk else ''}": StepSpec(
            chunk, options.past if chunk else 0, decodes, options.past
        )
        for chunk in (0, *options.chunks)
        for decodes in options.decodes
    }
    timer = StepTimer(llm.model, llm.canon, prompt, list(specs.values()))
    for name, spec in specs.items():
        repeats = (options.repeats or _REPEATS) + _WARM_UPS
        for index, way in take_turns(rotated((PLAIN, STRICT), repeats)):
            num_steps = 1 if spec.num_tokens else _SHORT_STEPS
            started = time.process_time()
            with llm.model.threads:
                seconds = sum(timer.seconds(spec, strict=way == STRICT) for _ in range(num_steps))
            spent = time.process_time() - started
            if index >= _WARM_UPS:
                for what, total in (("processor time", spent), ("time", seconds)):
                    value = 1e3 * total / num_steps
                    bench.results.add(what, name, "ms", value, system=way, round_index=index - _WARM_UPS)
        for label, what in ((COST, "processor time"), (TURNS_COST, "time")):
            bench.results.add_ratio(label, what, name, STRICT, PLAIN)
        bench.say(name)


def _compare_answers(llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int, bench: Bench) -> None:
    """What a service does by default."""
    requests = [GenerationRequest(prompt, num_tokens, ignore_eos=True) for prompt in prompts]
    lengths = [len(prompt) + num_tokens for prompt in prompts]
    config = ServiceConfig(ScheduleConfig(max_running=len(requests)), cache_places(lengths))
    at_once = tokens_at_once(llm, requests, config)
    alone = [tokens_at_once(llm, [request], config)[0] for request in requests]
    equal = sum(one == other for one, other in zip(at_once, alone, strict=True))
    bench.results.notes.append(f"{equal} of {len(requests)} requests have the same tokens at once as alone")
    if llm.canon.frees(len(requests)):
        what = "by default all requests have the same tokens at once as alone"
        bench.results.require("answers", what, equal == len(requests))


def _bars(results: Results) -> list[Bar]:
    return [
        bar_of(figure.name, figure, MOST_COST, is_lower_limit=False)
        for figure in results.figures
        if figure.system == COST
    ]


STRICT_SUITE = Suite(
    "What it costs that an answer does not depend on what runs beside it: steps of several decodes, alone and beside "
    "a chunk of a prompt, strict and plain in turns, by processor time and by the clock; then requests at once and "
    "alone, as a service runs them by default.",
    _measure,
    _bars,
    repeats=f"turns of each ({_REPEATS})",
    takes=("--model", "--device", "--threads"),
    options={
        "--decodes": number((1, 4, 8, 16), "answers that have a token each"),
        "--chunks": number((256, 512), "tokens of a prompt beside them"),
        "--past": number(512, "tokens before each"),
        "--weights": {"default": None, "help": "as `penstock generate` takes it (auto)"},
        "--activations": {"default": None, "help": "as `penstock generate` takes it (plain)"},
        "--requests": number(16, "requests at once, and alone"),
        "--request-tokens": number(16, "tokens that each generates"),
    },
)
