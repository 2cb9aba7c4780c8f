"""What tools cost: a request that may call one of many, beside the same without them."""

import argparse
import time
from statistics import median
from typing import Any

from benchmarks.harness import Bar, Bench, Results, bar_of, rotated, take_turns
from benchmarks.models import pieces, text_subject
from benchmarks.suite import Suite, number
from benchmarks.suites.serve import Watch, cache_places, warm_service
from penstock.engine.events import GenerationRequest
from penstock.engine.grammar import CallGrammar
from penstock.engine.llm import LLM
from penstock.engine.service import ServiceConfig
from penstock.models.text.calls import HERMES

PLAIN, HELD = "without tools", "with tools"
LATER, COST = "first token later by", "next token, with tools over without"
_LATER_MS, _MOST_RATIO = 50.0, 1.03
METHOD = (
    "the same prompt with tools in `auto` and without, in turns; the tools are new in every round, so that their "
    "grammar is compiled in it. A first token's time is from before the grammar is made; a next token's is the "
    "median of an answer's"
)


def some_tools(count: int, round_index: int) -> dict[str, Any]:
    """Schemas of arguments by name, about as large as those of coding agents."""
    text: dict[str, Any] = {"type": "string", "description": "what it is about, in a sentence or two"}
    files = {
        "type": "array",
        "items": {"type": "object", "properties": {"path": text, "line": {"type": "integer"}}},
    }
    kinds = {"type": "string", "enum": ["all", "some", "none", "first", "last"]}
    properties = {"path": text, "content": text, "kind": kinds, "files": files, "limit": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["path", "kind"]}
    return {f"tool_{round_index}_{index}": schema for index in range(count)}


def _measure(options: argparse.Namespace, bench: Bench) -> None:
    num_rounds, num_tokens = options.repeats or 7, options.answer_tokens
    subject = text_subject(options.model)
    subject.require_room(options.prompt_tokens, num_tokens, "fewer --prompt-tokens")
    (prompt,) = pieces(subject, [options.prompt_tokens])
    bench.describe(subject.description, options, "dtype", "prompt_tokens", "tools", method=METHOD)
    with LLM(subject.path, dtype=options.dtype, threads=options.threads) as llm:
        llm.constraints.new(
            CallGrammar(HERMES, some_tools(1, num_rounds), llm.tokenizer).grammar(is_required=False)
        )
        config = ServiceConfig(cache_tokens=cache_places([len(prompt) + num_tokens] * 2), reuse=False)
        with warm_service(llm, config, prompt) as service:
            for index, way in take_turns(rotated((PLAIN, HELD), num_rounds)):
                started, watch, grammar = time.perf_counter(), Watch(), None
                if way == HELD:
                    rules = CallGrammar(HERMES, some_tools(options.tools, index), llm.tokenizer)
                    grammar = rules.grammar(is_required=False)
                request = GenerationRequest(prompt, num_tokens, json_format=grammar, ignore_eos=True)
                watch.request_id = service.submit(request, watch)
                watch.finish(service, num_tokens)
                gaps = [after - before for before, after in zip(watch.stamps, watch.stamps[1:], strict=False)]
                row = {
                    "first token": ("ms", 1000 * (watch.stamps[0] - started)),
                    "next token": ("ms", 1000 * median(gaps)),
                }
                bench.results.add_row("an answer", row, way, index)
    _compare(bench.results)


def _compare(results: Results) -> None:
    results.arrange((PLAIN, HELD))
    results.add_ratio(COST, "an answer", "next token", HELD, PLAIN, as_name="ratio")
    first = [results.figure("first token", way, "an answer") for way in (HELD, PLAIN)]
    if first[0] is not None and first[1] is not None:
        held, plain = first[0].by_round, first[1].by_round
        results.add("tools", LATER, "ms", *(held[index] - plain[index] for index in sorted(plain)))


def _bars(results: Results) -> list[Bar]:
    later = results.figure(LATER, section="tools")
    return [
        *results.ratio_bars({COST: (_MOST_RATIO, False)}),
        bar_of(LATER, later, _LATER_MS, is_lower_limit=False),
    ]


TOOLS = Suite(
    "What tools cost: the first and the next token of a request that may call one of 24 tools, beside the same "
    "without them, in turns. Takes about a minute on two cores.",
    _measure,
    _bars,
    options={
        "--tools": number(24, "how many tools"),
        "--prompt-tokens": number(512, "tokens of the prompt"),
        "--answer-tokens": number(64, "tokens of the answer"),
    },
)
