"""What a person is told, as plain text."""

from typing import TYPE_CHECKING

from penstock.plan import format_bytes
from penstock.plan.progress import Progress

if TYPE_CHECKING:  # torch comes with it, and a message on the screen should not wait for that
    from penstock.engine.llm import LLM
    from penstock.engine.results import Generation


def format_seconds(seconds: float) -> str:
    """0.8 s, 12 s, 1 min 5 s, 2 h 3 min."""
    return f"{seconds:.1f} s" if seconds < 9.95 else format_whole_seconds(seconds)


def format_whole_seconds(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def format_rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.0f} tok/s" if tokens_per_s >= 99.5 else f"{tokens_per_s:.1f} tok/s"


def progress_facts(progress: Progress, since_s: float = 0.0) -> str:
    """How far the prompt was read, `since_s` seconds ago, and how long the rest will take from now."""
    facts = [f"{progress.num_done}/{progress.num_tokens} tokens"]
    if progress.chunks_done:
        facts.append(format_rate(progress.tokens_per_s))
    facts.append(f"chunk {progress.chunks_done}/{progress.num_chunks}")
    if is_complete(progress):
        facts.append(format_seconds(progress.elapsed_s))
    elif progress.eta_s is not None:
        facts.append(f"ETA {format_whole_seconds(max(progress.eta_s - since_s, 0.0))}")
    return ", ".join(facts)


def cached_line(progress: Progress) -> str:
    """How much of a prompt need not be read."""
    return f"{progress.num_cached:,} of {progress.num_tokens:,} tokens were in the cache: reading goes on from there"


def device_line(llm: "LLM") -> str:
    """Where a model runs, what it computes in, and how its weights lie there, where that was chosen."""
    dtype = str(llm.model.dtype).removeprefix("torch.")
    weights = f"; weights {llm.weights.reason}" if llm.weights.reason else ""
    return (
        f"device {llm.device.name} ({llm.device.reason}), {llm.model.kernels.name} kernels, {dtype}{weights}"
    )


def is_complete(progress: Progress) -> bool:
    return progress.num_done == progress.num_tokens


def closing_line(result: "Generation", progress: Progress) -> str:
    """What a finished or cancelled request did, and at what cost."""
    timings, prefill = result.timings, result.prefill
    facts = []
    if is_complete(progress):
        cached = f", {progress.num_cached} of them cached" if progress.num_cached else ""
        facts += [_count(result.usage.prompt_tokens, "prompt token") + cached, _answer(result)]
        if timings.time_to_first_token_s is not None:
            facts += [f"first token after {format_seconds(timings.time_to_first_token_s)}"]
    else:
        facts += [f"cancelled after {progress.num_done} of {progress.num_tokens} prompt tokens"]
    if progress.chunks_done:
        facts.append(f"prefill {format_rate(timings.prefill_tokens_per_s)}")
    if timings.decode_tokens_per_s is not None:
        facts.append(f"decode {format_rate(timings.decode_tokens_per_s)}")
    facts.append(f"chunk {prefill.effective} ({prefill.reason})")
    facts.append(f"peak memory {format_bytes(result.memory.peak_resident_bytes)}")
    return ", ".join(facts)


def _answer(result: "Generation") -> str:
    count = _count(result.usage.completion_tokens, "answer token")
    if result.finish_reason == "cancelled":
        return f"cancelled after {count}"
    return f"{count} (the limit)" if result.finish_reason == "length" else count


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
