"""The Python interface: a model, and text in and out of it."""

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypedDict, TypeVar, Unpack

import torch

from penstock.cache.store.block_store import BlockStore
from penstock.engine.batcher import steps_in_flight
from penstock.engine.cache_choice import RequestSpaces
from penstock.engine.events import AnswerFormat, Generation, GenerationRequest, Grammar, JsonFormat
from penstock.engine.fingerprint import cache_fingerprint
from penstock.engine.graphs import record_passes
from penstock.engine.profile import load_profile
from penstock.engine.prompt_rows import Pooling
from penstock.engine.run import ProgressCallback, Run, TextStream
from penstock.engine.sampler import SamplingParams, stop_strings
from penstock.engine.self_check import check_chunks
from penstock.errors import (
    ContextLengthError,
    MemoryExhaustedError,
    PenstockError,
    SettingError,
    is_out_of_memory,
)
from penstock.kernels.device import DeviceKind, device_kind, find_devices
from penstock.kernels.interface import KernelsReport, select_kernels
from penstock.kernels.probe import ProbeResult, probe
from penstock.models.decoder import Decoder, activation_model, workspace_of
from penstock.models.hub import DEFAULT_MODEL, resolve_model
from penstock.models.loading import computing_dtype, load_decoder, settled_weights
from penstock.models.opened import open_model
from penstock.models.source import WeightSource
from penstock.plan import (
    AlignSetting,
    ChunkSetting,
    ChunkSizer,
    EngineKeywords,
    EngineSettings,
    PrefillMemoryEstimate,
    SizeRules,
    SizeSettings,
    StepTimeModel,
    WeightsSetting,
    peak_memory_estimate,
)
from penstock.plan.checks import check_bool, check_type
from penstock.plan.model import ModelConfig
from penstock.plan.settings import DeviceSetting, StoreSettings, ThreadsSetting
from penstock.plan.settings import Dtype as Dtype
from penstock.process_memory import trim_heap

_Result = TypeVar("_Result")
_log = logging.getLogger("penstock.kernels")


def in_own_thread(work: Callable[[], _Result]) -> _Result:
    """Run on a thread that ends with the work, and its workers with it.

    Workers spin while they wait for each other, but only as long as there are no more of them than processors. A pool
    that an idle thread keeps would make those of the thread that runs steps sleep between any two operations, which
    costs a decode a third of its speed.
    """
    num_threads = torch.get_num_threads()
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        torch.set_num_threads(num_threads)  # each thread has a number of its own
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="penstock-work", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


if TYPE_CHECKING:
    from penstock.engine.constraint import ConstraintFactory
    from penstock.engine.stages.caches import WorkerCaches
    from penstock.engine.stages.pipeline import Pipeline

# How many tokens are generated where the caller names no number: this many, or what the context has left.
DEFAULT_MAX_TOKENS = 512
# What torch computes with as long as nobody tells it otherwise.
_OWN_THREADS = torch.get_num_threads()

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


class GenerateSettings(TypedDict, total=False):
    """What `LLM.generate` and `LLM.stream` take beside a prompt."""

    system: str | None
    raw: bool
    max_tokens: int | None
    sampling: SamplingParams | None
    stop: Sequence[str]
    json_format: AnswerFormat | Mapping[str, Any] | None
    grammar: Grammar | str | None
    num_logprobs: int | None
    prompt_logprobs: int | None
    ignore_eos: bool
    on_progress: ProgressCallback | None


class LLM:
    """A loaded model. One request runs at a time. `settings` is in place of all other arguments but the model.

    `model` is `smollm2`, a folder of safetensors, a GGUF file or a Hugging Face name. `chunk` is a number of
    tokens, 0 (the whole prompt in one chunk) or "auto"; without it `PENSTOCK_PREFILL_CHUNK` applies, else "auto". On
    a model with recurrent state it is rounded up to a multiple of 64, unless `align` is False; without that
    `PENSTOCK_PREFILL_ALIGN` (0 or 1) applies.

    `max_activation`, in bytes or as text such as "512MiB", is the most that a step may need beside weights and cache.
    Automatic chunks also follow `target_itl_ms`, the longest step, for the sake of those who wait for a token while
    it runs, and `target_ttft_ms`, the time to a prompt's first token. Without these `PENSTOCK_MAX_ACTIVATION`,
    `PENSTOCK_TARGET_ITL` and `PENSTOCK_TARGET_TTFT` apply.

    `model_impl` is whose code runs the model: "penstock", "transformers", or "auto", which is Penstock's where it has
    the family, else transformers', if the family was tried with it; without it `PENSTOCK_MODEL_IMPL` applies.

    `weights` says how matrices lie in memory: "auto" leaves them as quantised as the file has them where the kernels
    can compute with that; "int8" and "int4" quantise them, "bf16" and "f32" do not; without it `PENSTOCK_WEIGHTS`
    applies, else "auto". `weights` says afterwards what was taken, and why.

    `activations`, "plain" or "int8", says how rows go into products with quantised weights. "int8" rounds them to 8
    bits, by group, on a processor with native kernels: prompts are read faster, and answers are a little less exact.
    Where nothing would be rounded it is an error. Without it `PENSTOCK_ACTIVATIONS` applies, else "plain".

    `device` is where the model runs: "cpu", "cuda" (or "cuda:1", and so on), "mps", or "auto", which is the first GPU
    of NVIDIA's that torch sees, else the processor; without it `PENSTOCK_DEVICE` applies, else "auto". One that is
    absent is an error. `device` says afterwards which it is, and why.

    `threads` is how many threads compute; without it `PENSTOCK_THREADS` applies, else what `OMP_NUM_THREADS` or torch
    was told, else the number of physical cores that the process may use.

    `cache_dir` is a folder in which what was read of prompts is kept, up to `cache_size` (bytes, or text such as
    "10GiB"), so that no prompt is read twice, even by another process; without them `PENSTOCK_CACHE_DIR` and
    `PENSTOCK_CACHE_SIZE` apply. `reuse_tokens` is how many tokens are kept in memory from one request to the next.
    `close` (or a `with` block) waits until what was read is on disk.

    `stages` cuts the model into so many parts, with workers on this machine; or it is the addresses of workers
    (`penstock worker`), such as "10.0.0.2:7070,10.0.0.3:7070", which know the token in `token_file`. This process has
    the last layers. `layers`, such as "10,20", says how many each stage has. A worker that is silent for
    `stage_timeout` seconds counts as lost; with `mixed`, workers with other bits are let in. `close` ends them.

    `settings` says afterwards what applies and why (`chunk`, `device`, `weights` and others are its parts); `skipped`
    names what in the model's files has no use here, weights and settings; None where there is nothing.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        settings: EngineSettings | None = None,
        **keywords: Unpack[EngineKeywords],
    ) -> None:
        started = time.perf_counter()
        check_type("model", model, str | os.PathLike, "a name or a path")
        # What can be refused is refused before anything slow; rounding comes when the model is known.
        if settings is None:
            settings = EngineSettings.resolve(**keywords)
        elif not isinstance(settings, EngineSettings):
            raise SettingError("settings", settings, "an EngineSettings")
        elif keywords:
            raise SettingError("settings", ..., contradicts=dict.fromkeys(keywords, ...))
        if not settings.device.is_settled:
            settings = settings.on(find_devices())
        torch_device = torch.device(settings.device.name)
        _set_threads(settings.threads)
        self.stages: Pipeline | None = None
        self.path = resolve_model(str(model))
        opened = open_model(self.path, settings.model_impl.effective)
        try:
            settings = settings.for_model(has_state=opened.source.config.has_state)
            self.tokenizer = opened.tokenizer
            ignored = opened.tokenizer.ignored and f"ignored: {opened.tokenizer.ignored}"
            with _memory_for(opened.source.describe(), settings.device.name):
                if settings.stages is not None:
                    _check_stages(opened.source.config)
                    from penstock.engine.stages.pipeline import open_pipeline  # loads torch.distributed

                    self.stages = open_pipeline(self.path, opened.source.config, settings, settings.stages)
                    weakref.finalize(self, self.stages.close)
                self.model, self.probe, weights = in_own_thread(
                    partial(_load, opened.source, torch_device, settings, self.stages)
                )
            self.skipped = "; ".join(filter(None, (opened.skipped.describe(), ignored))) or None
            trim_heap()  # what loading and probing had for a while
            device_kind(torch_device).release()
        except BaseException:
            if self.stages is not None:
                self.stages.close()
            raise
        finally:
            opened.source.close()
        self.eos_ids = frozenset(self.model.config.eos_token_ids) | frozenset(self.tokenizer.eos_ids)
        self.canon = self.probe.bind(self.model.kernels)
        if self.model.config.by_transformers:
            self.probe = in_own_thread(partial(check_chunks, self.model, self.canon, self.probe))
        record_passes(self.model)
        if self.stages is not None:
            self.canon = self.model.kernels.law = self.stages.begin(self.canon)
        # A profile is of one process that has all layers.
        self._profile = load_profile(self) if self.stages is None else None
        best = None if self._profile is None else self._profile.best_chunk
        self.settings = replace(settings, weights=weights).tuned(best, self.device_kind.default_chunk)
        self._config = self.settings.config
        # What is known of step times, from a profile and from every step that ran.
        self.times = StepTimeModel(self._profile.coefficients if self._profile else None)
        self.activations = activation_model(self.model)
        self.store: BlockStore | None = None
        self.fingerprint: bytes | None = None
        if settings.store is not None:
            self._open_store(str(model), settings.store)
        self._spaces = RequestSpaces(
            self.model,
            self.store,
            self.fingerprint,
            num_slots=self._config.num_state_slots + self.steps_in_flight - 1,
            step_tokens=self.steps_in_flight * self.most_chunk + self._config.overlap,
            reuse_tokens=settings.reuse_tokens,
            stages=self.stage_caches,
        )
        self.kernels = KernelsReport.of(
            self.model.kernels, self.model.dtype, self.model.config, self.settings.weights
        )
        if self.kernels.slower:
            _log.warning("slower than it could be: %s", self.kernels.slower)
        self.load_s = time.perf_counter() - started

    def _open_store(self, model: str, setting: StoreSettings) -> None:
        """Let blocks be found and kept in a folder; each stage has a part of its own there."""
        about = {
            "model": model,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "kernels": self.model.kernels.name,
        }
        self.fingerprint = own = cache_fingerprint(self)
        if self.stage_caches is not None:
            own = self.stage_caches.open_store(setting.folder, own, max_bytes=setting.max_bytes, about=about)
        self.store = BlockStore(
            setting.folder, own, self.model.cache_spec, max_bytes=setting.max_bytes, about=about
        )
        weakref.finalize(self, self.store.close)  # at the latest when the interpreter ends

    @property
    def chunk(self) -> ChunkSetting:
        return self.settings.chunk

    @property
    def size(self) -> SizeSettings:
        return self.settings.size

    @property
    def align(self) -> AlignSetting:
        return self.settings.align

    @property
    def weights(self) -> WeightsSetting:
        return self.settings.weights

    @property
    def device(self) -> DeviceSetting:
        return self.settings.device

    @property
    def threads(self) -> ThreadsSetting:
        return self.settings.threads

    @property
    def overlap(self) -> int:
        return self.settings.overlap

    @property
    def context_length(self) -> int:
        """The most tokens that a prompt and its answer may have together."""
        return self.model.config.max_position

    @property
    def most_chunk(self) -> int:
        """The most tokens of a chunk, 0 for whole prompts."""
        return self.size_rules(None).most if self.chunk.is_auto else self.chunk.effective

    def size_rules(self, free_bytes: int | None) -> SizeRules:
        """What chunks' sizes follow from, where so much memory is free."""
        tuned = self.chunk.effective if self._profile and self.chunk.is_auto else None
        return self.size.rules(free_bytes=free_bytes, tuned=tuned, default=self.device_kind.default_chunk)

    @property
    def same_bits(self) -> bool:
        """Whether a prompt's bits depend neither on its chunks nor on the stages that ran them."""
        return self.probe.same_bits and (self.stages is None or self.stages.same_bits)

    @property
    def steps_in_flight(self) -> int:
        return steps_in_flight(self.model, self.stages)

    @property
    def stage_caches(self) -> "WorkerCaches | None":
        """What the other stages have beside this one's cache."""
        return None if self.stages is None else self.stages.caches

    @property
    def device_kind(self) -> DeviceKind:
        return device_kind(self.model.device)

    def memory_estimate(self, prompt_tokens: int) -> PrefillMemoryEstimate:
        """The peak memory of a prompt of so many tokens, besides the weights, by arithmetic."""
        return peak_memory_estimate(
            self.model.config,
            prompt_tokens,
            self._config,
            dtype_bytes=self.model.dtype.itemsize,
            workspace=workspace_of(self.model),
        )

    def tokenize(self, prompt: Prompt, *, system: str | None = None, raw: bool = False) -> list[int]:
        """The token ids of a prompt: a text (put into the chat template unless `raw`), chat messages, or ids."""
        check_bool("raw", raw)
        if system is not None:
            check_type("system", system, str, "a text")
        if isinstance(prompt, str):
            if raw or not self.tokenizer.has_chat_template:
                if system is not None:
                    why = "with a raw prompt" if raw else "by a model without a chat template"
                    raise SettingError("system", ..., where=why, because="put it into the prompt itself")
                return self.tokenizer.encode(prompt, add_special_tokens=True)
            messages: list[Mapping[str, str]] = [{"role": "user", "content": prompt}]
            if system is not None:
                messages.insert(0, {"role": "system", "content": system})
            return self.tokenizer.encode_chat(messages)
        if system is not None or raw:
            raise SettingError(
                "system" if raw is False else "raw", ..., "a prompt that is text", where="here"
            )
        if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray | memoryview):
            token_ids = [item for item in prompt if isinstance(item, int) and not isinstance(item, bool)]
            chat = [item for item in prompt if isinstance(item, Mapping)]
            if len(token_ids) == len(prompt):
                return token_ids
            if len(chat) == len(prompt):
                return self.tokenizer.encode_chat(chat)
        raise SettingError(
            "prompt", ..., "a text, a list of token ids, or a list of messages with role and content"
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
        json_format: AnswerFormat | Mapping[str, Any] | None = None,
        grammar: Grammar | str | None = None,
        num_logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        ignore_eos: bool = False,
        on_progress: ProgressCallback | None = None,
    ) -> TextStream:
        """Text as it is generated. `on_progress` is called after each chunk of the prompt. What cannot be run is
        refused here, before any work.

        `json_format` makes the answer JSON: of a schema, or any object with `JsonFormat()`. `grammar` holds it to
        rules of Lark or GBNF; `Grammar.regex` and `Grammar.choice` make some. `num_logprobs` asks for
        log-probabilities in the result: of each token, and of so many of the most likely; `prompt_logprobs` asks for
        those of the prompt's own tokens, which are all read for it. With `ignore_eos` the answer goes on to
        `max_tokens`, which may be 0: the prompt is read and not answered."""
        started = time.perf_counter()
        if on_progress is not None and not callable(on_progress):
            raise SettingError("on_progress", on_progress, "what can be called")
        token_ids = self.tokenize(prompt, system=system, raw=raw)
        if json_format is not None and not isinstance(json_format, AnswerFormat):
            check_type("json_format", json_format, Mapping, "a JSON schema or a JsonFormat")
            json_format = JsonFormat(dict(json_format))
        if grammar is not None:
            if json_format is not None:
                raise SettingError("grammar", ..., contradicts={"json_format": ...})
            check_type("grammar", grammar, str | Grammar, "a text or a Grammar")
            json_format = Grammar(grammar) if isinstance(grammar, str) else grammar
        request = GenerationRequest(
            token_ids,
            self._default_max_tokens(len(token_ids)) if max_tokens is None else max_tokens,
            SamplingParams() if sampling is None else sampling,
            stop_strings(stop),
            num_logprobs,
            json_format,
            ignore_eos,
            prompt_logprobs=prompt_logprobs,
        )
        return self._start(request, on_progress, started)

    def embed(self, prompt: Prompt, *, pooling: Pooling = "mean") -> list[float]:
        """The prompt as one vector of length 1: the mean of its tokens' last hidden states, or the last one's. A text
        is taken as it is, without the chat template."""
        request = GenerationRequest(self.tokenize(prompt, raw=isinstance(prompt, str)), 0, pooling=pooling)
        with self._start(request, None, time.perf_counter()) as stream:
            for _ in stream:
                pass
            assert stream.vector is not None
            return list(stream.vector)

    def _start(
        self, request: GenerationRequest, on_progress: ProgressCallback | None, started: float
    ) -> TextStream:
        request.check(self.model.config)
        token_ids, json_format = request.token_ids, request.json_format
        if self.overlap and request.rows() is not None:
            because = "each token of the prompt is read once"
            raise SettingError("overlap", self.overlap, "0", where="with prompt_logprobs", because=because)
        self.device_kind.use()
        constraint = None if json_format is None else self.constraints.new(json_format)
        taken = self._spaces.take(token_ids, max(request.max_tokens, 1))
        rules = self.size_rules(self.device_kind.free_bytes())
        self.activations.check(rules, max(len(token_ids), 1))
        run = Run(
            self.model,
            request,
            config=self._config,
            canon=self.canon,
            eos_ids=self.eos_ids,
            sizer=ChunkSizer(rules, self.times, self.activations.step_bytes),
            space=taken.space,
            reuse=taken.reuse,
            tokenizer=self.tokenizer,
            constraint=constraint,
            stages=self.stages,
        )
        taken.enter(run)
        return TextStream(self, run, on_progress, time.perf_counter() - started)

    def generate(self, prompt: Prompt, **settings: Unpack[GenerateSettings]) -> Generation:
        """The whole answer; takes what `stream` takes."""
        with self.stream(prompt, **settings) as stream:
            for _ in stream:
                pass
            return stream.result

    @cached_property
    def constraints(self) -> "ConstraintFactory":
        """Makes what holds an answer to a schema or a grammar."""
        from penstock.engine.constraint import ConstraintFactory  # loads what compiles grammars

        return ConstraintFactory(self.tokenizer, self.model.config.vocab_size, self.eos_ids)

    def prepare_answers(self) -> None:
        """Do what a first chat, and a first answer that is held to something, would wait for."""
        with suppress(PenstockError):  # who asks for it is told
            self.constraints.prepare()
        if self.tokenizer.has_chat_template:
            with suppress(PenstockError):
                self.tokenizer.chat.prepare()

    def _default_max_tokens(self, num_prompt: int) -> int:
        room = self.context_length - num_prompt
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens, which leaves no room for an answer in the "
                f"model's context of {self.context_length} tokens: shorten the prompt"
            )
        return min(DEFAULT_MAX_TOKENS, room)

    def close(self) -> None:
        """Wait until what was read is on disk. Requests may still be run; what they read is not kept there. Workers
        that hold layers end, and with them all requests."""
        if self.store is not None:
            self.store.close()
        if self.stages is not None:
            self.stages.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_stages(config: ModelConfig) -> None:
    if config.by_transformers:
        raise SettingError(
            "stages", ..., "one machine", because=f"transformers' code runs {config.family}, without stages"
        )


def _load(
    source: WeightSource,
    device: torch.device,
    settings: EngineSettings,
    stages: "Pipeline | None" = None,
) -> tuple[Decoder, ProbeResult, WeightsSetting]:
    """The model, or the last of its stages while the others load theirs."""
    device_kind(device).use()
    kernels = select_kernels(device, settings.kernels.effective, settings.activations.effective)
    dtype = computing_dtype(source, kernels, device, settings.computes_in, settings.weights.effective)
    weights = settled_weights(source, kernels, dtype, device, settings.weights)
    if stages is None:
        model = load_decoder(source, kernels, dtype, device, weights.name)
        return model, probe(kernels, model.probe_shapes, dtype, device), weights
    stages.load(
        dtype=str(dtype).removeprefix("torch."), weights=weights.name, activations=kernels.activations
    )
    model = load_decoder(source, kernels, dtype, device, weights.name, stages.layers[-1])
    return model, probe(kernels, stages.loaded(model), dtype, device), weights


@contextmanager
def _memory_for(what: str, device: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise MemoryExhaustedError(
                f"there is not enough memory on {device} to load {what}: free some, or use a smaller or quantised "
                f"model{'' if device == 'cpu' else ', or --device cpu'}"
            ) from error
        raise


def _set_threads(setting: ThreadsSetting) -> None:
    """A default is no reason to change what a caller has told torch."""
    own = torch.get_num_threads()
    if setting.count is None or (setting.source == "default" and own != _OWN_THREADS):
        return
    torch.set_num_threads(setting.within(own))
