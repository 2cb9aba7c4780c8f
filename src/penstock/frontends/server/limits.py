"""How much of anything a body may hold: so that no body takes long to refuse, or much memory."""

import re
from itertools import islice

from pydantic import BeforeValidator

# The largest number, where none of its own is given: no count comes near it.
MAX_INT = 2**31 - 1
MAX_SEED = 2**63 - 1
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
MAX_SALT_CHARACTERS = 256
MAX_MESSAGES = 10_000
MAX_PROMPTS = 1024
MAX_ENTRIES = 1024  # of logit_bias, and of metadata
# Lists and objects of a whole body: the smallest take three bytes as JSON, and a hundred as values of Python.
MAX_CONTAINERS = 2**16
# What comes before a bracket outside of strings, and the bracket, or the end. It never goes back, and always matches.
_TO_BRACKET = re.compile(
    rb"""(?: [^"\[{]++ | "[^"\\]*+ (?:\\.[^"\\]*+)*+ (?:"|\\?\Z) )*+ (?:([\[{])|\Z)""", re.VERBOSE | re.DOTALL
)


def has_too_many_containers(raw: bytes) -> bool:
    """Of bytes that may be JSON, without parsing them."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_CONTAINERS:
        return False
    # Most may be in texts, such as programs.
    found = islice(_TO_BRACKET.finditer(raw), MAX_CONTAINERS + 1)
    return sum(match[1] is not None for match in found) > MAX_CONTAINERS


def at_most(limit: int) -> BeforeValidator:
    """Refuses lists and objects that have more, before anything in them is looked at."""

    def check(value: object) -> object:
        if isinstance(value, list | dict) and len(value) > limit:
            raise ValueError(f"give up to {limit} of them, not {len(value)}")
        return value

    return BeforeValidator(check)
