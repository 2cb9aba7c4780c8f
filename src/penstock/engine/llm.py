"""The Python interface: a model, and text in and out of it."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import torch

from penstock.engine.batch import settle
from penstock.engine.memory import peak_resident_bytes, reset_peak
from penstock.engine.results import Generation, MemoryReport, PrefillReport, Timings, Usage
from penstock.engine.run import Run, is_out_of_memory
from penstock.engine.sampler import SamplingParams
from penstock.engine.stop import StopMatcher
from penstock.engine.threads import in_own_thread
from penstock.errors import ContextLengthError, MemoryExhaustedError, SettingError
from penstock.kernels.probe import ProbeResult, probe
from penstock.kernels.protocol import select_kernels
from penstock.models.config import ModelConfig
from penstock.models.decoder import Decoder
from penstock.models.detokenize import StreamDecoder
from penstock.models.hub import DEFAULT_MODEL, resolve_model
from penstock.models.loading import load_decoder
from penstock.models.opened import open_model
from penstock.models.shape import model_shape
from penstock.models.source import WeightSource
from penstock.plan import (
    STATE_GRID,
    AlignSetting,
    ChunkedPrefillConfig,
    ChunkSetting,
    PrefillMemoryEstimate,
    PrefillScheduler,
    peak_memory_estimate,
    resolve_align,
    resolve_chunk_size,
)
from penstock.plan.progress import PrefillClock, Progress

# How many tokens are generated where the caller names no number: this many, or what the context has left.
DEFAULT_MAX_TOKENS = 512
MAX_THREADS = 1024

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
ProgressCallback = Callable[[Progress], None]
Dtype = Literal["auto", "bfloat16", "float32"]
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class LLM:
    """A loaded model. One request runs at a time.

    `model` is `smollm2`, a folder of safetensors, a GGUF file or a Hugging Face name. `chunk` is a number of
    tokens, 0 (the whole prompt in one chunk) or "auto"; without it `PENSTOCK_PREFILL_CHUNK` applies. On a model
    with recurrent state it is rounded up to a multiple of 64, unless `align` is False; without that
    `PENSTOCK_PREFILL_ALIGN` (0 or 1) applies. `chunk` says afterwards what was asked for, what applies and why;
    `skipped` names the weights in the model's files that it has no use for, None where there are none.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        dtype: Dtype = "auto",
        chunk: int | str | None = None,
        overlap: int = 0,
        align: bool | None = None,
        threads: int | None = None,
    ) -> None:
        started = time.perf_counter()
        # What can be refused is refused before anything slow; rounding comes when the model is known.
        self.align: AlignSetting = resolve_align(align)
        ChunkedPrefillConfig(resolve_chunk_size(chunk).effective, overlap)
        torch_dtype = resolve_dtype(dtype)
        if threads is not None:
            _set_threads(threads)
        device = torch.device("cpu")
        opened = open_model(resolve_model(str(model)))
        try:
            grid = self.align.grid(has_state=opened.source.config.has_state)
            self.chunk: ChunkSetting = _with_overlap(resolve_chunk_size(chunk, grid=grid), overlap)
            self._config = ChunkedPrefillConfig(self.chunk.effective, overlap)
            self.tokenizer = opened.tokenizer
            self.skipped = opened.skipped.describe()
            with _memory_for(opened.source.describe()):
                self.model, self.probe = in_own_thread(lambda: _load(opened.source, torch_dtype, device))
        finally:
            opened.source.close()
        self.eos_ids = frozenset(self.model.config.eos_token_ids) | frozenset(self.tokenizer.eos_ids)
        self.canon = settle(self.model.kernels, self.probe)
        self.load_s = time.perf_counter() - started

    @property
    def overlap(self) -> int:
        return self._config.overlap

    @property
    def context_length(self) -> int:
        """The most tokens that a prompt and its answer may have together."""
        return self.model.config.max_position

    def memory_estimate(self, prompt_tokens: int) -> PrefillMemoryEstimate:
        """The peak memory of a prompt of so many tokens, besides the weights, by arithmetic."""
        return peak_memory_estimate(
            model_shape(self.model.config),
            prompt_tokens,
            self._config,
            dtype_bytes=self.model.dtype.itemsize,
        )

    def tokenize(self, prompt: Prompt, *, system: str | None = None, raw: bool = False) -> list[int]:
        """The token ids of a prompt: a text (put into the chat template unless `raw`), chat messages, or ids."""
        if isinstance(prompt, str):
            if raw or not self.tokenizer.has_chat_template:
                if system is not None:
                    why = "with a raw prompt" if raw else "by a model without a chat template"
                    raise SettingError(f"system is not accepted {why}: put it into the prompt itself")
                return self.tokenizer.encode(prompt, add_special_tokens=True)
            messages: list[Mapping[str, str]] = [{"role": "user", "content": prompt}]
            if system is not None:
                messages.insert(0, {"role": "system", "content": system})
            return self.tokenizer.encode_chat(messages)
        if system is not None or raw:
            raise SettingError("system and raw are accepted only with a prompt that is text")
        token_ids = [item for item in prompt if isinstance(item, int)]
        chat = [item for item in prompt if isinstance(item, Mapping)]
        if len(token_ids) == len(prompt):
            return token_ids
        if len(chat) == len(prompt):
            return self.tokenizer.encode_chat(chat)
        raise SettingError(
            "prompt: give a text, a list of token ids, or a list of messages with role and content"
        )

    def stream(
        self,
        prompt: Prompt,
        *,
        system: str | None = None,
        raw: bool = False,
        max_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        on_progress: ProgressCallback | None = None,
    ) -> "TextStream":
        """Text as it is generated. `on_progress` is called after each chunk of the prompt. What cannot be run is
        refused here, before any work."""
        started = time.perf_counter()
        token_ids = self.tokenize(prompt, system=system, raw=raw)
        tokenize_s = time.perf_counter() - started
        if max_tokens is None:
            room = self.context_length - len(token_ids)
            if room < 1:
                raise ContextLengthError(
                    f"the prompt has {len(token_ids)} tokens, which leaves no room for an answer in the "
                    f"model's context of {self.context_length} tokens: shorten the prompt"
                )
            max_tokens = min(DEFAULT_MAX_TOKENS, room)
        run = Run(
            self.model,
            token_ids,
            config=self._config,
            canon=self.canon,
            max_tokens=max_tokens,
            sampling=sampling,
            eos_ids=self.eos_ids,
        )
        return TextStream(self, run, StopMatcher(stop), on_progress, tokenize_s)

    def generate(
        self,
        prompt: Prompt,
        *,
        system: str | None = None,
        raw: bool = False,
        max_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        on_progress: ProgressCallback | None = None,
    ) -> Generation:
        """The whole answer."""
        with self.stream(
            prompt,
            system=system,
            raw=raw,
            max_tokens=max_tokens,
            sampling=sampling,
            stop=stop,
            on_progress=on_progress,
        ) as stream:
            for _ in stream:
                pass
            return stream.result


class TextStream:
    """An iterator over pieces of text. `result` is there once it has ended; closing it early frees its cache."""

    def __init__(
        self,
        llm: LLM,
        run: Run,
        stops: StopMatcher,
        on_progress: ProgressCallback | None,
        tokenize_s: float,
    ) -> None:
        self._llm = llm
        self._run = run
        self._stops = stops
        self._on_progress = on_progress
        self._wants_cancel = False
        self._clock = PrefillClock(run.prompt_length, run.prefill.total_chunks)
        self._prefill_s = 0.0
        self._decode_s = 0.0
        self._tokenize_s = tokenize_s
        self._first_token_s: float | None = None
        self._text: list[str] = []
        self._peak_bytes = 0
        self._pieces = self._generate()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def cancel(self) -> None:
        """End the request before its next step. May be called from a signal handler or a progress callback."""
        self._wants_cancel = True

    def close(self) -> None:
        """End the request now, if it has not ended, and free its cache."""
        self._pieces.close()
        self._run.cancel()

    @property
    def num_prompt_tokens(self) -> int:
        return self._run.prompt_length

    @property
    def progress(self) -> Progress:
        """How far the prompt has been read."""
        return self._clock.progress()

    @property
    def result(self) -> Generation:
        """The finished request; an error before its end."""
        run = self._run
        if run.finish_reason is None:
            raise SettingError("the stream has not ended: read it to its end, or close it")
        generated, progress = run.generated, self._clock.progress()
        num_decoded = len(generated) - 1
        chunk, caches = self._llm.chunk, run.space.tensors
        return Generation(
            text="".join(self._text),
            token_ids=tuple(generated),
            finish_reason=run.finish_reason,
            usage=Usage(run.prompt_length, len(generated)),
            timings=Timings(
                load_s=self._llm.load_s,
                prefill_s=self._prefill_s,
                time_to_first_token_s=self._first_token_s,
                decode_s=self._decode_s,
                prefill_tokens_per_s=progress.tokens_per_s,
                decode_tokens_per_s=num_decoded / self._decode_s if num_decoded > 0 else None,
            ),
            prefill=PrefillReport(
                requested=chunk.requested,
                effective=chunk.effective,
                source=chunk.source,
                reason=chunk.reason + _shrink_reason(run.num_shrinks),
                overlap=run.prefill.config.overlap,
                chunks=progress.chunks_done,
                same_bits=self._llm.probe.same_bits and keeps_bits(self._llm.model.config, run.prefill),
            ),
            memory=MemoryReport(
                weights_bytes=self._llm.model.num_weight_bytes,
                kv_cache_bytes=caches.kv.num_bytes,
                recurrent_bytes=caches.recurrent.num_bytes if caches.recurrent else 0,
                peak_resident_bytes=self._peak_bytes,
            ),
        )

    def _generate(self) -> Generator[str, None, None]:
        run, stops = self._run, self._stops
        decoder = StreamDecoder(self._llm.tokenizer)
        started = time.perf_counter()
        reset_peak()
        try:
            while run.finish_reason is None:
                if self._wants_cancel:
                    run.cancel()
                    break
                token = self._step()
                if token is not None and self._first_token_s is None:
                    self._first_token_s = self._tokenize_s + time.perf_counter() - started
                if token is None or token in self._llm.eos_ids:
                    continue
                piece = stops.push(decoder.push(token))
                if stops.has_stopped:
                    run.finish("stop")
                if piece:
                    self._text.append(piece)
                    yield piece
            rest = stops.push(decoder.finish()) + stops.finish()
            if rest:
                self._text.append(rest)
                yield rest
        finally:
            self._peak_bytes = peak_resident_bytes()
            run.cancel()

    def _step(self) -> int | None:
        started = time.perf_counter()
        step = self._run.step()
        seconds = time.perf_counter() - started
        if step.is_prompt:
            self._prefill_s += seconds
            self._clock.record(step.span.start, step.span.end, seconds)
            if self._on_progress is not None:
                self._on_progress(self._clock.progress())
        else:
            self._decode_s += seconds
        return step.token


def keeps_bits(config: ModelConfig, prefill: PrefillScheduler) -> bool:
    """Whether the way a prompt is cut has no part in its bits: always, but where a state is cut inside a block."""
    return not config.has_state or prefill.lies_on(STATE_GRID)


def _with_overlap(chunk: ChunkSetting, overlap: int) -> ChunkSetting:
    if overlap % chunk.grid == 0:
        return chunk
    why = f"; an overlap of {overlap} is no multiple of {chunk.grid}, so bits may differ from those of other sizes"
    return replace(chunk, reason=chunk.reason + why)


def _load(source: WeightSource, dtype: torch.dtype, device: torch.device) -> tuple[Decoder, ProbeResult]:
    model = load_decoder(source, select_kernels(device), dtype, device)
    return model, probe(model.kernels, model.probe_shapes, dtype, device)


@contextmanager
def _memory_for(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise MemoryExhaustedError(
                f"there is not enough memory to load {what}: free some, or use a smaller or quantised model"
            ) from error
        raise


def _shrink_reason(num_shrinks: int) -> str:
    return f"; halved {num_shrinks}x when memory ran out" if num_shrinks else ""


def resolve_dtype(name: str) -> torch.dtype:
    """The dtype of a name; `auto` is bfloat16 on CPUs that compute it natively, else float32."""
    if name == "auto":
        return torch.bfloat16 if _has_native_bfloat16() else torch.float32
    if name not in _DTYPES:
        raise SettingError(f"dtype={name!r} is not accepted: give one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _has_native_bfloat16() -> bool:
    if hasattr(torch.cpu, "get_capabilities"):
        capabilities = torch.cpu.get_capabilities()
        return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _set_threads(threads: object) -> None:
    if not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= MAX_THREADS:
        raise SettingError(
            f"threads={threads!r} is not accepted: give a whole number from 1 to {MAX_THREADS}"
        )
    torch.set_num_threads(threads)
