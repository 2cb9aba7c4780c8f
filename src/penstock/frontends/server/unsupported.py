"""Parameters of OpenAI's API that this server knows and does not have."""

from collections.abc import Collection, Mapping
from typing import Any

from pydantic_core import PydanticCustomError

# What each would need, and the values that ask for nothing, besides null: those are accepted.
Unsupported = Mapping[str, tuple[str, tuple[Any, ...]]]

IN_BODIES: Unsupported = {
    "tools": ("calling tools", ([],)),
    "tool_choice": ("calling tools", ("none", "auto")),
    "parallel_tool_calls": ("calling tools", (True, False)),
    "functions": ("calling functions", ([],)),
    "function_call": ("calling functions", ("none", "auto")),
    "audio": ("sound", ()),
    "modalities": ("anything but text", (["text"],)),
    "prediction": ("predicted output", ()),
    "reasoning_effort": ("a choice of reasoning effort", ("none",)),
    "verbosity": ("a choice of verbosity", ("medium",)),
    "web_search_options": ("searching the web", ()),
    "moderation": ("moderation", ()),
    "service_tier": ("service tiers", ("auto", "default")),
    "best_of": ("choosing among answers; give n and choose", (1,)),
    "echo": ("answers that repeat the prompt", (False,)),
    "suffix": ("filling in before a suffix", ("",)),
}
IN_MESSAGES: Unsupported = {
    "tool_calls": ("calling tools", ([],)),
    "function_call": ("calling functions", ()),
    "audio": ("sound", ()),
    "refusal": ("refusals", ()),
    "annotations": ("annotations", ([],)),
}


def only_known(values: Mapping[str, Any], known: Collection[str], unsupported: Unsupported) -> dict[str, Any]:
    """The values without those that ask for nothing. The first that is not known, or asks for something that is not
    supported, is an error of the object that they are in, with the name in its context: whoever sends a million of
    them is told of one."""
    kept = {}
    for name, value in values.items():
        if name in known:
            kept[name] = value
        elif name in unsupported:
            what, neutral = unsupported[name]
            # Of the same type too: 1 is no True, and true is no 1.
            if value is not None and not any(type(value) is type(item) and value == item for item in neutral):
                reason = f"this server does not do {what}; leave it away"
                raise PydanticCustomError(
                    "unsupported_parameter", "{reason}", {"name": name, "reason": reason}
                )
        else:
            raise PydanticCustomError("unknown_parameter", "it is not known", {"name": name})
    return kept
