"""What the lengths of chunks follow from, on a server: for its answers and for people."""

from typing import Any

from penstock.engine.service import Service
from penstock.plan import format_bytes


def size_settings(service: Service) -> dict[str, Any]:
    """`effective` is what a chunk has where nothing speaks for less or more, `most` what it has at most; 0 is the
    whole prompt. `budget_bytes` is what a step may need: `max_activation_bytes`, or half of the memory that was free
    at the start, or None where that is not known."""
    size, chunk, schedule = service.llm.size, service.llm.chunk, service.schedule
    is_own = schedule.auto_chunk or schedule.chunk_size == chunk.effective
    return {
        "chunk": {
            "requested": chunk.requested,
            "effective": chunk.effective if schedule.auto_chunk else schedule.chunk_size,
            "most": schedule.chunk_size,
            "is_auto": schedule.auto_chunk,
            "reason": chunk.reason if is_own else "set by the service's schedule",
        },
        "target_itl_s": size.target_itl_s,
        "target_ttft_s": size.target_ttft_s,
        "max_activation_bytes": size.max_activation_bytes,
        "budget_bytes": service.rules.budget_bytes,
    }


def size_lines(service: Service) -> list[str]:
    """The same in words."""
    settings = size_settings(service)
    chunk, budget = settings["chunk"], settings["max_activation_bytes"]
    memory = None if budget is None else f"a step may need {format_bytes(budget)} beside weights and cache"
    if not chunk["is_auto"]:
        size = "whole prompts" if chunk["effective"] == 0 else f"chunk {chunk['effective']}"
        reason = chunk["reason"].replace("set by argument", "set by --chunk")
        reason = reason.replace("align=False or --no-align", "--no-align")
        line = f"{size} (requested {chunk['requested']}: {reason})"
        return [line] if memory is None else [line, memory]
    targets = [
        f"{what} within {settings[name] * 1000:g} ms"
        for what, name in (("next token", "target_itl_s"), ("first token", "target_ttft_s"))
        if settings[name] is not None
    ]
    aim = f"targets: {', '.join(targets)}" if targets else "no latency target"
    return [
        f"chunk auto: {chunk['effective']} tokens ({chunk['reason'].removeprefix('auto: ')}) unless a target or "
        f"memory says otherwise, at most {chunk['most']}",
        f"{aim}; {memory or 'a step may need half of the free memory'}",
    ]
