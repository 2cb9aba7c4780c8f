"""Engines under load, each in a process of its own: requests arrive at given times, and every token is stamped.

    {"do": "load", "model": "8B", "settings": {...}, "budget": 2048, ...}
    {"do": "run", "requests": [[0.0, 1024, 128], [null, 32768, 16]], "seed": 1, "settle_tokens": 100}
        {"ok": {"requests": [{"arrived_s": 0.0, "stamps_s": [...]}, ...]}}

A request is when it arrives, tokens of its prompt, tokens of its answer; null is when all before it have so many.
Prompts are random, the same for every engine by the seed. Answers have all their tokens; they are greedy, and nothing
is found in a cache. Nothing of an engine is imported before it is loaded: others' environments have not ours.
"""

import asyncio
import gc
import json
import tempfile
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any

_SETTLE_S = 0.002
_TIMEOUT_S = 240.0


class Watch:
    """One request."""

    def __init__(self) -> None:
        self.arrived = time.perf_counter()
        self.stamps: list[float] = []
        self.ended = threading.Event()
        self.error: str | None = None

    def token(self, count: int = 1) -> None:
        self.stamps.extend([time.perf_counter()] * count)

    def end(self, error: str | None) -> None:
        self.error = error
        self.ended.set()


class Engine:
    """What all have in common. `load` makes one ready; `submit` begins a request."""

    vocab_size = 0

    def submit(self, prompt: list[int], num_tokens: int) -> Watch:
        raise NotImplementedError

    def run(
        self, requests: list[tuple[float | None, int, int]], seed: int, settle_tokens: int = 1
    ) -> dict[str, Any]:
        numbers = import_module("numpy").random.default_rng(seed)
        prompts = [numbers.integers(3, self.vocab_size, length).tolist() for _, length, _ in requests]
        gc.collect()
        until = time.monotonic() + _TIMEOUT_S
        started = time.perf_counter()
        watches: list[Watch] = []
        for (at, _, num_tokens), prompt in zip(requests, prompts, strict=True):
            while at is None and any(
                len(each.stamps) < settle_tokens and not each.ended.is_set() for each in watches
            ):
                if time.monotonic() > until:
                    raise TimeoutError("requests do not go on")
                time.sleep(_SETTLE_S)
            if at is not None:
                time.sleep(max(started + at - time.perf_counter(), 0.0))
            watches.append(self.submit(prompt, num_tokens))
        for watch, (_, _, num_tokens) in zip(watches, requests, strict=True):
            if not watch.ended.wait(max(until - time.monotonic(), 0.0)):
                raise TimeoutError("a request did not end")
            if watch.error or len(watch.stamps) != num_tokens:
                raise RuntimeError(watch.error or f"{len(watch.stamps)} tokens of {num_tokens}")
        return {
            "requests": [
                {
                    "arrived_s": watch.arrived - started,
                    "stamps_s": [stamp - started for stamp in watch.stamps],
                }
                for watch in watches
            ]
        }


class Vllm(Engine):
    """Its asynchronous engine; what it computes with is a process of its own."""

    def load(
        self,
        settings: dict[str, Any],
        budget: int,
        max_running: int,
        memory_share: float,
        max_len: int,
        **_: Any,
    ) -> dict[str, Any]:
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        self._loop, self._num_requests = loop, 0
        self.vocab_size = settings["vocab_size"]
        folder = Path(tempfile.mkdtemp(prefix="load_"))
        rest = {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "torch_dtype": "bfloat16",
            "eos_token_id": 2,
            "bos_token_id": 1,
        }
        (folder / "config.json").write_text(json.dumps(rest | settings))
        options = {
            "model": str(folder),
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "generation_config": "vllm",
            "dtype": "bfloat16",
            "max_model_len": max_len,
            "max_num_seqs": max_running,
            "max_num_batched_tokens": budget,
            "enable_prefix_caching": False,
            "gpu_memory_utilization": memory_share,
            "attention_config": {"backend": "FLASH_ATTN", "flash_attn_version": 3},
            "disable_log_stats": True,
            "seed": 0,
        }

        async def make() -> Any:
            arguments = import_module("vllm.engine.arg_utils").AsyncEngineArgs(**options)
            return import_module("vllm.v1.engine.async_llm").AsyncLLM.from_engine_args(arguments)

        self._engine = asyncio.run_coroutine_threadsafe(make(), loop).result()
        scheduler = self._engine.vllm_config.scheduler_config
        mode = self._engine.vllm_config.compilation_config.cudagraph_mode
        version = import_module("vllm").__version__
        return {
            "about": f"vLLM {version}, async scheduling {scheduler.async_scheduling}, graphs {mode}, budget {budget}"
        }

    def submit(self, prompt: list[int], num_tokens: int) -> Watch:
        watch = Watch()
        self._num_requests += 1
        follow = self._follow(watch, prompt, num_tokens, f"r{self._num_requests}")
        asyncio.run_coroutine_threadsafe(follow, self._loop)
        return watch

    async def _follow(self, watch: Watch, prompt: list[int], num_tokens: int, name: str) -> None:
        params = import_module("vllm.sampling_params")
        wanted = params.SamplingParams(
            temperature=0.0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=params.RequestOutputKind.DELTA,
        )
        try:
            async for output in self._engine.generate({"prompt_token_ids": prompt}, wanted, name):
                watch.token(len(output.outputs[0].token_ids))
            watch.end(None)
        except BaseException as error:
            watch.end(repr(error))
            raise
