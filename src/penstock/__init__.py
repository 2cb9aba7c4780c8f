"""Penstock: language models on long prompts, chunk by chunk."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.engine.llm import LLM as LLM
    from penstock.engine.sampler import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # Late, so that `penstock.plan` can be imported where torch is absent.
    if name == "LLM":
        from penstock.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from penstock.engine.sampler import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
