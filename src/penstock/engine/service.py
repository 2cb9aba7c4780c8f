"""A model that serves many requests at once: one thread runs the steps, any thread may ask."""

import logging
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import torch

from penstock.cache import BLOCK_TOKENS, SequenceCache
from penstock.cache.space import CacheSpace
from penstock.engine.batcher import Batcher, Notice
from penstock.engine.capacity import cache_tokens_elsewhere, cache_tokens_that_fit, measured_step_bytes
from penstock.engine.events import ChunkRecord, Event, Failed, Finished, GenerationRequest, Listener
from penstock.engine.job import Job
from penstock.engine.llm import LLM
from penstock.engine.preparations import preparations
from penstock.engine.reuse import MAX_SNAPSHOTS, Prefix, Reuse, kept_windows
from penstock.engine.status import Observer, ServiceStatus
from penstock.errors import (
    ContextLengthError,
    RequestFailedError,
    ServiceClosedError,
    SettingError,
    StageError,
)
from penstock.models.decoder import activation_model
from penstock.plan.admission import WindowRoom
from penstock.plan.checks import check_int
from penstock.plan.grids import RowLaw
from penstock.plan.policy import ScheduleConfig, SchedulePolicy
from penstock.plan.settings import check_schedule
from penstock.plan.sizing import ChunkSizer, SizeRules
from penstock.plan.step import RequestId

if TYPE_CHECKING:
    pass

_log = logging.getLogger("penstock.engine")
# Nobody who waits until it is ready waits for longer than this after the model was loaded.
MOST_PREPARING_S = 8.0
# From one look for a stage that is gone to the next.
_RETRY_S = 0.5


@dataclass(frozen=True)
class ServiceConfig:
    """How a service runs. Without a schedule, its chunk size and grid are the model's; with one, its chunk size is
    fixed, unless it says that it is automatic."""

    schedule: ScheduleConfig | None = None
    cache_tokens: int | None = None  # places for keys and values; None: by the memory that is free
    # Decodes have bits that do not depend on what runs beside them; None: where that costs nothing. Where it is asked
    # for, what an answer left in the cache does not serve other requests, either.
    strict: bool | None = None
    reuse: bool = True  # what was read of a prompt serves others that begin alike
    max_snapshots: int = MAX_SNAPSHOTS  # recurrent states that are kept for that, where the model has them


class Service:
    """Requests in, events out. Every request ends with Finished or Failed, whatever happens to the others."""

    def __init__(
        self, llm: LLM, config: ServiceConfig | None = None, *, observers: Sequence[Observer] = ()
    ) -> None:
        self.llm = llm
        llm.device_kind.use()
        config = config or ServiceConfig()
        self.schedule = _resolve_schedule(config.schedule, llm)
        max_snapshots = check_int("max_snapshots", config.max_snapshots, 0) if config.reuse else 0
        # A step reads a state and writes another; each further step in flight writes one more. The few that run ahead
        # on one device have what nobody else needs.
        num_slots = (
            1 + (llm.steps_in_flight if llm.stages else 1)
        ) * self.schedule.max_running + max_snapshots
        windows = WindowRoom(
            self.schedule.max_running,
            llm.steps_in_flight * self.schedule.chunk_size,
            kept_windows(llm.model.cache_spec, max_snapshots),
        )
        cache_tokens = _resolve_cache_tokens(config.cache_tokens, llm, self.schedule, num_slots, windows)
        most, asked = self.schedule.max_running, config.strict
        strict = llm.canon.frees(most) if asked is None else asked
        self.strict_reason = _strict_reason(asked, llm.canon, most)
        # What an answer left may have other bits than a prompt has. A processor takes long to read it anew.
        clean_only = strict and (asked is not None or not llm.device_kind.is_host)
        self.config = replace(config, schedule=self.schedule, cache_tokens=cache_tokens, strict=strict)
        free_bytes = llm.device_kind.free_bytes()
        space = CacheSpace.for_tokens(llm.model, cache_tokens, num_slots=num_slots, windows=windows)
        # The cache has taken its part, though the system may not have given it yet.
        if free_bytes is not None:
            free_bytes = max(free_bytes - space.tensors.num_bytes, 0)
        self.rules = llm.size_rules(free_bytes)
        if self.schedule.policy is SchedulePolicy.PREFILL_FIRST:  # decodes wait for many chunks anyway
            self.rules = replace(self.rules, decode_gap_s=None)
        if not self.schedule.auto_chunk:
            self.rules = SizeRules(
                fixed=self.schedule.chunk_size,
                max_activation_bytes=llm.size.max_activation_bytes,
                grid=self.schedule.grid,
            )
        self._activations = activation_model(llm.model, joins_past=True)
        # The last token of an answer is never run, so it needs no place.
        self.max_request_tokens = min(llm.context_length, space.blocks.num_blocks * BLOCK_TOKENS + 1)
        self._reuse = (
            Reuse(
                space,
                fingerprint=llm.fingerprint,
                store=llm.store,
                clean_only=clean_only,
                max_snapshots=max_snapshots,
                stages=llm.stage_caches,
            )
            if config.reuse
            else None
        )
        # Guards the batcher. It is not held while a step runs.
        self._changed = threading.Condition()
        self._batcher = Batcher(
            llm.model,
            llm.canon,
            space,
            self.schedule,
            strict=strict,
            observers=observers,
            sizer=ChunkSizer(self.rules, llm.times, self._activations.step_bytes),
            reuse=self._reuse,
            lock=self._changed,
            stages=llm.stages,
        )
        if llm.stages is not None:
            llm.stages.on_lost = self._wake
        self._is_stepping = False
        self._closes_at: float | None = None  # when what still runs is cancelled; None: not closing
        self._death: Exception | None = None
        self._has_logged_observer = False
        # None: all is prepared.
        self._preparations: Iterator[None] | None = preparations(
            llm.model, llm.canon, space, self.schedule, strict=strict
        )
        self._num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._serve, name="penstock-engine", daemon=True)
        self._thread.start()

    @property
    def is_healthy(self) -> bool:
        """Whether the engine's thread lives, or ended because it was told to."""
        return self._death is None

    @property
    def missing(self) -> StageError | None:
        """Why nothing can be run at the moment, though the engine lives: a stage that is waited for."""
        return None if self.llm.stages is None else self.llm.stages.lost

    @property
    def is_closing(self) -> bool:
        return self._closes_at is not None

    def wait_until_ready(self) -> None:
        """Wait until all is prepared that the first requests would wait for. What would take too long is prepared
        later, while there are none."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._preparations is None or self._death is not None, MOST_PREPARING_S
            )

    def check(self, request: GenerationRequest) -> None:
        """Refuse what cannot be run here, whatever else runs."""
        request.check(self.llm.model.config)
        num_tokens = len(request.token_ids) + request.max_tokens
        if num_tokens > self.max_request_tokens:
            raise ContextLengthError(
                f"the prompt has {len(request.token_ids)} tokens and max_tokens is {request.max_tokens}, together "
                f"{num_tokens}, but the cache holds {self.max_request_tokens} tokens: shorten the prompt, ask for "
                f"fewer tokens, or serve with a larger cache"
            )
        self._activations.check(self.rules, len(request.token_ids), num_decodes=self.schedule.max_running - 1)

    def submit(self, request: GenerationRequest, listener: Listener) -> RequestId:
        """Put a request into the queue. What cannot be run is refused here."""
        self.check(request)
        json_format = request.json_format
        constraint = None if json_format is None else self.llm.constraints.new(json_format)
        cache = self._batcher.new_sequence(request)
        prefix = None if self._reuse is None else self._open_prefix(self._reuse, request, cache)
        name = f"req-{uuid.uuid4().hex[:16]}"
        job = Job(name, request, cache, self.llm.tokenizer, self.llm.eos_ids, constraint, listener, prefix)
        try:
            with self._changed:
                if self._death is not None:
                    raise ServiceClosedError(f"the engine has stopped: {self._death}")
                if self.is_closing:
                    raise ServiceClosedError("the service is closing and takes no more requests")
                self._batcher.add(job)
                self._changed.notify_all()
        except BaseException:
            if prefix is not None:
                prefix.close()
            raise
        return job.id

    def _open_prefix(self, reuse: Reuse, request: GenerationRequest, cache: SequenceCache) -> Prefix:
        """What may be there of a prompt. Looking on disk takes a while: it is done by whoever asks, not by the
        engine's thread, nor with the lock."""
        reads_all = request.rows() is not None
        prefix = reuse.open(request.token_ids, cache, request.cache_salt, reads_all=reads_all)
        if self.llm.store is not None:
            with self._changed:
                num_known = prefix.num_in_memory()
            prefix.search(num_known)
        return prefix

    def run(self, request: GenerationRequest) -> list[Event]:
        """Submit a request and wait for its end: all its events."""
        events: list[Event] = []
        is_over = threading.Event()

        def listen(event: Event) -> None:
            events.append(event)
            if isinstance(event, Finished | Failed):
                is_over.set()

        self.submit(request, listen)
        is_over.wait()
        return events

    def cancel(self, request_id: RequestId) -> None:
        """End a request between steps and free all it holds. Nothing happens if it has ended."""
        with self._changed:
            self._batcher.cancel(request_id)
            self._changed.notify_all()

    def status(self) -> ServiceStatus:
        stages = () if self.llm.stages is None else self.llm.stages.status()
        with self._changed:
            return replace(self._batcher.status(), stages=stages, kernels=self.llm.kernels)

    def explain(self, request_id: RequestId) -> tuple[ChunkRecord, ...] | None:
        """Each chunk of a request's prompt that ran: how long it is and why, what was expected of it and what came.
        None of a request that is not known, or ended too long ago."""
        with self._changed:
            return self._batcher.explain(request_id)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the cache holds just what the requests do. Waits for the step at hand."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_stepping)
            self._batcher.check_integrity()

    def close(self, grace_s: float = 0.0) -> None:
        """Take no more requests, give those at hand so much time to finish, cancel the rest, end the thread."""
        self.drain(grace_s)
        self._thread.join()

    def drain(self, grace_s: float) -> None:
        """Begin to close, and return at once. A second call may only shorten the time."""
        with self._changed:
            closes_at = time.monotonic() + max(grace_s, 0.0)
            self._closes_at = closes_at if self._closes_at is None else min(closes_at, self._closes_at)
            self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        """The engine's thread."""
        # Each thread has a number of its own, which the first one was told.
        torch.set_num_threads(self._num_threads)
        try:
            self.llm.device_kind.use()
            while self._step():
                self._deliver()
        except BaseException as error:
            # Nothing that a request can do leads here. Nobody must wait forever for what it has broken.
            _log.critical("the engine has stopped", exc_info=error)
            with self._changed:
                self._death = error if isinstance(error, Exception) else RuntimeError(repr(error))
                self._is_stepping = False
                self._batcher.fail_all(RequestFailedError(f"the engine has stopped: {error!r}"))
                self._changed.notify_all()
        finally:
            self._deliver()

    def _step(self) -> bool:
        """Run a step, or prepare for the next, or wait for something to do. False: the service is closed, and nothing
        runs any more."""
        with self._changed:
            is_idle = not self._batcher.has_work and not self._batcher.notices
            if is_idle and self.is_closing:
                return False
            if is_idle and self._preparations is None and self.missing is None:
                self._changed.wait()
            if self._closes_at is not None and time.monotonic() >= self._closes_at:
                self._batcher.cancel_all()
            self._is_stepping = is_wanted = self._batcher.has_work or self.missing is not None
        if is_wanted:
            missing: StageError | None = None
            try:
                self._batcher.step()
            except StageError as error:  # a stage that is not back yet
                _log.info("%s", error)
                missing = error
            with self._changed:
                self._is_stepping = False
                self._changed.notify_all()
                if missing is not None and not self._batcher.notices:
                    self._changed.wait(_RETRY_S)
        elif is_idle:
            self._prepare()
        return True

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _prepare(self) -> None:
        """A piece of what the first requests would wait for, while there are none."""
        if self._preparations is None:
            return
        try:
            next(self._preparations)
            return
        except StopIteration:
            pass
        except Exception as error:  # a request that needs it meets it, too
            _log.warning("preparing for requests failed", exc_info=error)
        with self._changed:
            self._preparations = None
            self._changed.notify_all()

    def _deliver(self) -> None:
        """Tell what there is to tell, in order, without the lock: a listener may ask the service things."""
        notices = self._batcher.notices
        while notices:
            notice: Notice = notices.popleft()
            try:
                notice.tell()
            except Exception as error:
                if notice.job is not None:  # whoever listened is gone
                    self.cancel(notice.job.id)
                elif not self._has_logged_observer:
                    self._has_logged_observer = True
                    _log.error("an observer failed; its later errors are not told", exc_info=error)


def _strict_reason(asked: bool | None, law: RowLaw, max_running: int) -> str:
    """Why decodes are strict, or are not."""
    if asked is not None:
        return "asked for" if asked else "turned off"
    if law.frees(max_running):
        return "it costs nothing here"
    several = f"more than {law.free_decodes}" if law.free_decodes else "several"
    return (
        f"{several} answers at once have the bits of one alone only with more work, so an answer may differ in the "
        "last place by what runs beside it"
    )


def _resolve_schedule(schedule: ScheduleConfig | None, llm: LLM) -> ScheduleConfig:
    if llm.overlap:
        raise SettingError("overlap", llm.overlap, "0, which loses nothing", where="by a service")
    if schedule is None:
        schedule = ScheduleConfig(
            chunk_size=llm.most_chunk, grid=llm.chunk.grid, auto_chunk=llm.chunk.is_auto
        )
    check_schedule(llm.size, schedule)
    return schedule if schedule.grid >= llm.chunk.grid else replace(schedule, grid=llm.chunk.grid)


def _resolve_cache_tokens(
    cache_tokens: int | None, llm: LLM, schedule: ScheduleConfig, num_slots: int, windows: WindowRoom
) -> int:
    if cache_tokens is not None:
        return check_int("cache_tokens", cache_tokens, 1)
    most = schedule.max_running * llm.context_length
    model = llm.model
    beside = () if llm.stages is None else llm.stages.stages
    if llm.settings.stages is not None and llm.settings.stages.addresses:
        most, beside = cache_tokens_elsewhere(beside, num_slots, most, windows), ()
    step_bytes = _step_bytes(llm, schedule)
    return cache_tokens_that_fit(model.cache_spec, num_slots, most, model.device, step_bytes, beside, windows)


def _step_bytes(llm: LLM, schedule: ScheduleConfig) -> int:
    """What the largest step needs on a GPU: measured, and a layer's past of the longest sequence in one piece."""
    model, longest = llm.model, llm.context_length
    if not llm.device_kind.has_own_memory:
        return 0
    num_tokens = min(schedule.chunk_size or longest, schedule.step_tokens or longest)
    measured = measured_step_bytes(model, llm.canon, num_tokens, schedule.max_running)
    llm.device_kind.release()
    kv = model.cache_spec.kv
    return measured + longest * kv.bytes_per_token // max(kv.num_layers, 1)
