"""Penstock: language models on long prompts, chunk by chunk."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.engine.events import Grammar as Grammar
    from penstock.engine.events import JsonFormat as JsonFormat
    from penstock.engine.llm import LLM as LLM
    from penstock.engine.sampler import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "Grammar", "JsonFormat", "SamplingParams", "__version__"]

# Late, so that `penstock.plan` can be imported where torch is absent.
_HOMES = {
    "Grammar": "penstock.engine.events",
    "JsonFormat": "penstock.engine.events",
    "LLM": "penstock.engine.llm",
    "SamplingParams": "penstock.engine.sampler",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
