"""Text as it is generated, and what became of it."""

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

from penstock.engine.explain import auto_reason, usual_size
from penstock.engine.results import Generation, MemoryReport, PrefillReport, Timings, Usage
from penstock.engine.run import Run
from penstock.engine.stop import StopMatcher
from penstock.errors import SettingError
from penstock.kernels.device import device_kind
from penstock.models.config import ModelConfig
from penstock.models.text.detokenize import StreamDecoder
from penstock.plan import STATE_GRID, PrefillScheduler
from penstock.plan.progress import PrefillClock, Progress

if TYPE_CHECKING:
    from penstock.engine.llm import LLM

ProgressCallback = Callable[[Progress], None]


class TextStream:
    """An iterator over pieces of text. `result` is there once it has ended; closing it early frees its cache."""

    def __init__(
        self,
        llm: "LLM",
        run: Run,
        stops: StopMatcher,
        on_progress: ProgressCallback | None,
        before_s: float,
    ) -> None:
        self._llm = llm
        self._run = run
        self._stops = stops
        self._on_progress = on_progress
        self._wants_cancel = False
        self._clock = PrefillClock(run.prompt_length, run.prefill.total_chunks)
        self._clock.skip(run.num_cached)
        self._num_noted = 0  # of the run's chunks
        self._prefill_s = 0.0
        self._decode_s = 0.0
        self._before_s = before_s  # what it took to tokenize the prompt and to find what is known of it
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
        """How far the prompt has been read, and how many chunks that takes as things stand now."""
        return replace(self._clock.progress(), num_chunks=self._run.prefill.total_chunks)

    @property
    def result(self) -> Generation:
        """The finished request; an error before its end."""
        run = self._run
        if run.finish_reason is None:
            raise SettingError("the stream has not ended: read it to its end, or close it")
        generated, progress = run.generated, self.progress
        num_decoded = len(generated) - 1
        chunk, caches = self._llm.chunk, run.space.tensors
        return Generation(
            text="".join(self._text),
            token_ids=tuple(generated),
            finish_reason=run.finish_reason,
            usage=Usage(run.prompt_length, len(generated), run.num_cached),
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
                effective=usual_size(run.chunks, chunk.effective) if chunk.is_auto else chunk.effective,
                source=chunk.source,
                reason=(auto_reason(run.chunks, chunk.reason) if chunk.is_auto else chunk.reason)
                + _shrink_reason(run.num_shrinks),
                overlap=run.prefill.config.overlap,
                chunks=progress.chunks_done,
                same_bits=self._llm.probe.same_bits and keeps_bits(self._llm.model.config, run.prefill),
                records=tuple(run.chunks),
            ),
            memory=MemoryReport(
                weights_bytes=self._llm.model.num_weight_bytes,
                kv_cache_bytes=caches.num_bytes - caches.state_bytes,
                recurrent_bytes=caches.state_bytes,
                peak_resident_bytes=self._peak_bytes,
            ),
        )

    def _generate(self) -> Generator[str, None, None]:
        run, stops = self._run, self._stops
        decoder = StreamDecoder(self._llm.tokenizer)
        started = time.perf_counter()
        device_kind(run.model.device).reset_peak()
        try:
            while run.finish_reason is None:
                if self._wants_cancel:
                    run.cancel()
                    break
                token = self._step()
                if token is not None and self._first_token_s is None:
                    self._first_token_s = self._before_s + time.perf_counter() - started
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
            self._peak_bytes = device_kind(run.model.device).peak_bytes()
            run.cancel()

    def _step(self) -> int | None:
        started = time.perf_counter()
        step = self._run.step()
        seconds = time.perf_counter() - started
        if step.is_prompt:
            self._prefill_s += seconds
            self._note_chunks()
        else:
            self._decode_s += seconds
        return step.token

    def _note_chunks(self) -> None:
        """Tell of the chunks that are known to be done. A GPU may still be at the last one."""
        records = self._run.chunks[self._num_noted :]
        self._num_noted += len(records)
        for record in records:
            self._clock.record(record.start, record.end, record.measured_s)
            if self._on_progress is not None:
                self._on_progress(self.progress)


def keeps_bits(config: ModelConfig, prefill: PrefillScheduler) -> bool:
    """Whether the way a prompt is cut has no part in its bits: always, but where a state is cut inside a block."""
    return not config.has_state or prefill.lies_on(STATE_GRID)


def _shrink_reason(num_shrinks: int) -> str:
    return f"; halved {num_shrinks}x when memory ran out" if num_shrinks else ""
