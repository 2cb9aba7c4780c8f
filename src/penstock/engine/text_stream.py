"""Text as it is generated, and what became of it."""

import time
from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

from penstock.engine.events import Event, Finished, PromptProgress, TokenGenerated
from penstock.engine.explain import auto_reason, usual_size
from penstock.engine.results import Generation, MemoryReport, PrefillReport, Timings, TokenLogprobs, Usage
from penstock.engine.run import Run
from penstock.errors import SettingError
from penstock.kernels.device import device_kind
from penstock.plan import STATE_GRID
from penstock.plan.progress import Progress

if TYPE_CHECKING:
    from penstock.engine.llm import LLM

ProgressCallback = Callable[[Progress], None]


class TextStream:
    """An iterator over pieces of text. `result` is there once it has ended; closing it early frees its cache."""

    def __init__(
        self,
        llm: "LLM",
        run: Run,
        on_progress: ProgressCallback | None,
        before_s: float,
    ) -> None:
        self._llm = llm
        self._run = run
        self._on_progress = on_progress
        self._wants_cancel = False
        self._prefill_s = 0.0
        self._decode_s = 0.0
        self._before_s = before_s  # what it took to tokenize the prompt and to choose a cache
        self._first_token_s: float | None = None
        self._text: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
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
        return self._run.job.progress

    @property
    def result(self) -> Generation:
        """The finished request; an error before its end."""
        run = self._run
        if run.finish_reason is None:
            raise SettingError("the stream has not ended: read it to its end, or close it")
        generated, progress = run.generated, self.progress
        num_decoded = len(generated) - 1
        chunk, caches = self._llm.chunk, run.space.tensors
        keeps_bits = not run.model.config.has_state or run.lies_on(STATE_GRID)
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
                overlap=self._llm.overlap,
                chunks=progress.chunks_done,
                # The way a prompt is cut has no part in its bits, but where a state is cut inside a block.
                same_bits=self._llm.probe.same_bits and keeps_bits,
                records=tuple(run.chunks),
            ),
            memory=MemoryReport(
                weights_bytes=self._llm.model.num_weight_bytes,
                kv_cache_bytes=caches.num_bytes - caches.state_bytes,
                recurrent_bytes=caches.state_bytes,
                peak_resident_bytes=self._peak_bytes,
            ),
            logprobs=None if run.job.request.num_logprobs is None else tuple(self._logprobs),
        )

    def _generate(self) -> Generator[str, None, None]:
        run = self._run
        device_kind(run.model.device).reset_peak()
        self._began_s = time.perf_counter()
        try:
            while run.finish_reason is None:
                if self._wants_cancel:
                    run.cancel()
                else:
                    self._step()
                while run.events:
                    if piece := self._take(run.events.popleft()):
                        self._text.append(piece)
                        yield piece
        finally:
            self._peak_bytes = device_kind(run.model.device).peak_bytes()
            run.cancel()

    def _step(self) -> None:
        started = time.perf_counter()
        is_prompt = self._run.step().is_prompt
        seconds = time.perf_counter() - started
        if is_prompt:
            self._prefill_s += seconds
        else:
            self._decode_s += seconds

    def _take(self, event: Event) -> str:
        """The text that an event brings, if any."""
        match event:
            case PromptProgress() if self._on_progress is not None:
                self._on_progress(event.progress)
            case TokenGenerated():
                if self._first_token_s is None:
                    self._first_token_s = self._before_s + time.perf_counter() - self._began_s
                if event.logprobs is not None:
                    self._logprobs.append(event.logprobs)
                return event.text
            case Finished():
                return event.text
        return ""


def _shrink_reason(num_shrinks: int) -> str:
    return f"; halved {num_shrinks}x when memory ran out" if num_shrinks else ""
