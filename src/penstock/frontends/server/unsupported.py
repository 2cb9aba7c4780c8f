"""Parameters of OpenAI's API that this server knows and does not have."""

from collections.abc import Mapping
from typing import Any

from penstock.frontends.server.problems import ApiError

# What each would need, and the values that ask for nothing, besides null: those are accepted.
_PARAMETERS: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "tools": ("calling tools", ([],)),
    "tool_choice": ("calling tools", ("none", "auto")),
    "parallel_tool_calls": ("calling tools", (True, False)),
    "functions": ("calling functions", ([],)),
    "function_call": ("calling functions", ("none", "auto")),
    "audio": ("sound", ()),
    "modalities": ("anything but text", (["text"],)),
    "prediction": ("predicted output", ()),
    "reasoning_effort": ("a choice of reasoning effort", ()),
    "verbosity": ("a choice of verbosity", ()),
    "web_search_options": ("searching the web", ()),
    "moderation": ("moderation", ()),
    "service_tier": ("service tiers", ("auto", "default")),
    "best_of": ("choosing among answers; give n and choose", (1,)),
    "echo": ("answers that repeat the prompt", (False,)),
    "suffix": ("filling in before a suffix", ("",)),
}
_IN_MESSAGES: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "tool_calls": ("calling tools", ([],)),
    "function_call": ("calling functions", ()),
    "audio": ("sound", ()),
    "refusal": ("refusals", ()),
    "annotations": ("annotations", ([],)),
}


def without_unsupported(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body without parameters that ask for nothing; an error where one asks for something."""
    return _without(body, _PARAMETERS, "")


def without_unsupported_in_message(message: Mapping[str, Any]) -> dict[str, Any]:
    return _without(message, _IN_MESSAGES, "messages.")


def _without(
    values: Mapping[str, Any], table: Mapping[str, tuple[str, tuple[Any, ...]]], prefix: str
) -> dict[str, Any]:
    kept = {}
    for name, value in values.items():
        if name not in table:
            kept[name] = value
            continue
        what, neutral = table[name]
        # Of the same type too: 1 is no True, and true is no 1.
        if value is not None and not any(type(value) is type(item) and value == item for item in neutral):
            raise ApiError(
                400,
                f"{prefix}{name} is not supported: this server does not do {what}; leave it away",
                code="unsupported_parameter",
                param=f"{prefix}{name}",
            )
    return kept
