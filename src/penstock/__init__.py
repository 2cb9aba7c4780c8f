"""Penstock: language models on long prompts, chunk by chunk."""

__version__ = "0.1.0"
