"""Penstock of any checkout, for a benchmark: only names that all of them have are used."""

import hashlib
import os
import time
from typing import Any

from penstock import LLM


class Engine:
    def load(self, model: str, **options: Any) -> dict[str, Any]:
        self._llm = LLM(model, **options)
        return {}

    def measure(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        """Seconds until the prompt was read, and for each token after the first."""
        with self._llm.stream(prompt, max_tokens=num_tokens) as stream:
            for _ in stream:
                pass
        timings, num_done = stream.result.timings, stream.result.usage.completion_tokens
        return {"prefill_s": timings.prefill_s, "decode_s": timings.decode_s / max(num_done - 1, 1)}

    def pin(self, processors: list[int]) -> dict[str, Any]:
        """This process, before it loads anything."""
        os.sched_setaffinity(0, processors)
        return {}

    def processor_times(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        """Seconds of processors until the first token, and for each after it, without what is kept of a prompt."""
        stamps = [time.process_time()]
        with self._llm.stream(prompt, max_tokens=num_tokens, ignore_eos=True) as stream:
            for _ in stream:
                stamps.append(time.process_time())
        return {"prefill_s": stamps[1] - stamps[0], "decode_s": (stamps[-1] - stamps[1]) / (num_tokens - 1)}

    def digest(self, prompt: list[int], chunks: list[int], num_tokens: int) -> dict[str, Any]:
        """By chunk size: a hash of the logits after the prompt and at the end, of tokens, keys and values."""
        from penstock.engine.run import Run
        from penstock.plan import ChunkedPrefillConfig

        found = {}
        for chunk in chunks:
            config, canon = ChunkedPrefillConfig(chunk), self._llm.canon
            run = Run(self._llm.model, prompt, config=config, canon=canon, max_tokens=num_tokens)
            hashed = hashlib.sha256()
            while run.logits is None:
                run.step()
            hashed.update(_bytes(run.logits))
            for _ in range(num_tokens - 2):
                run.step()
            hashed.update(_bytes(run.logits))
            hashed.update(str(list(run.generated)).encode())
            tensors = run.space.tensors
            for index in range(self._llm.model.config.num_layers):
                layer = tensors.layer(0, index) if hasattr(tensors, "layer") else tensors.kv.layer(index)
                for tensor in (layer.keys, layer.values):
                    blocks = tensor.view(-1, 64, *tensor.shape[1:])
                    hashed.update(_bytes(blocks[list(run.cache.blocks.block_ids)]))
            run.cancel()
            found[str(chunk)] = hashed.hexdigest()
        return found


def _bytes(tensor: Any) -> bytes:
    import torch

    data: bytes = tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()
    return data
