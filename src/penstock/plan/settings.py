"""The settings of an engine: each by its argument, else its variable, else its default; all of them as one value."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self, TypedDict, Unpack, get_args

from penstock.errors import SettingError
from penstock.machine import usable_cores
from penstock.plan.checks import check_bool, check_int
from penstock.plan.chunks import ChunkedPrefillConfig
from penstock.plan.grids import DEFAULT_CHUNK_SIZE, STATE_GRID
from penstock.plan.policy import ScheduleConfig, SchedulePolicy
from penstock.plan.setting import Environment, Resolved, Setting, SettingSource, one_of
from penstock.plan.sizing import DECODE_GAP_S, SizeRules
from penstock.plan.stage_settings import StagesSetting, resolve_stages
from penstock.plan.units import parse_bytes
from penstock.plan.weight_settings import (
    PLAIN_ACTIVATIONS,
    ActivationsName,
    WeightsSetting,
    resolve_activations,
    resolve_weights,
)

CHUNK_VARIABLE = "PENSTOCK_PREFILL_CHUNK"
ALIGN_VARIABLE = "PENSTOCK_PREFILL_ALIGN"
MAX_ACTIVATION_VARIABLE = "PENSTOCK_MAX_ACTIVATION"
TARGET_ITL_VARIABLE = "PENSTOCK_TARGET_ITL"
TARGET_TTFT_VARIABLE = "PENSTOCK_TARGET_TTFT"
MODEL_IMPL_VARIABLE = "PENSTOCK_MODEL_IMPL"
DEVICE_VARIABLE = "PENSTOCK_DEVICE"
KERNELS_VARIABLE = "PENSTOCK_KERNELS"
THREADS_VARIABLE = "PENSTOCK_THREADS"
CACHE_DIR_VARIABLE = "PENSTOCK_CACHE_DIR"
CACHE_SIZE_VARIABLE = "PENSTOCK_CACHE_SIZE"

Dtype = Literal["auto", "bfloat16", "float32"]
ModelImpl = Literal["auto", "penstock", "transformers"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
DEFAULT_CACHE_BYTES = 10 << 30
MAX_THREADS = 1024
_ACCEPTED_DEVICES = "auto, cpu, cuda, cuda:1 (and so on) or mps"
# Settings of the libraries that compute, which they follow by themselves.
_LIBRARY_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

# Digits and nothing else: no sign, space, underscore or leading zero; short enough for any int conversion.
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}", re.ASCII)
_DECIMAL = re.compile(r"[0-9]{1,12}(\.[0-9]{1,6})?", re.ASCII)
_DEVICE = re.compile(r"auto|cpu|mps|cuda(:(0|[1-9][0-9]{0,2}))?", re.ASCII)


def _tokens(value: object, name: str) -> int | None:
    """A number of tokens; None is automatic."""
    if isinstance(value, str) and value == "auto":
        return None
    number = int(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value
    if isinstance(number, int) and not isinstance(number, bool) and number >= 0:
        return number
    accepted = "a number of tokens in digits, such as 512, 0 (off: the whole prompt in one chunk) or auto"
    raise SettingError(name, value, accepted)


def _milliseconds(value: object, name: str) -> float:
    """In seconds."""
    number = float(value) if isinstance(value, str) and _DECIMAL.fullmatch(value) else value
    if isinstance(number, int | float) and not isinstance(number, bool) and 0 < number < 1e300:
        return number / 1000
    raise SettingError(name, value, "a number of milliseconds above 0, such as 200")


def _zero_or_one(value: object, name: str) -> bool:
    if value in ("0", "1"):
        return value == "1"
    models = f"to round chunk sizes up to a multiple of {STATE_GRID} on models with recurrent state"
    raise SettingError(name, value, f"1 {models}, or 0 to keep any size")


def _device(value: object, name: str) -> str:
    if isinstance(value, str) and _DEVICE.fullmatch(value):
        return value
    raise SettingError(name, value, _ACCEPTED_DEVICES)


def _threads(value: object, name: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_THREADS:
        return value
    raise SettingError(name, value, f"a whole number from 1 to {MAX_THREADS}")


def _threads_text(value: object, name: str) -> int:
    number = int(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else 0
    return _threads(number if 1 <= number <= MAX_THREADS else value, name)


def _folder(value: object, name: str) -> Path:
    accepted = "the path of a folder, which need not exist"
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise SettingError(name, value, accepted)
    try:
        os.fsencode(value)
        return Path(value).expanduser()
    except UnicodeEncodeError:
        raise SettingError(name, value, accepted) from None
    except RuntimeError:  # pathlib's answer where there is no such home folder
        because = "no such user has a home folder"
        raise SettingError(name, str(value), "another path", because=because) from None


CHUNK: Setting[int | None] = Setting("chunk_size", CHUNK_VARIABLE, None, _tokens)
ALIGN = Setting("align", ALIGN_VARIABLE, True, lambda value, name: check_bool(name, value), _zero_or_one)
MAX_ACTIVATION: Setting[int | None] = Setting("max_activation", MAX_ACTIVATION_VARIABLE, None, parse_bytes)
TARGET_ITL: Setting[float | None] = Setting("target_itl_ms", TARGET_ITL_VARIABLE, None, _milliseconds)
TARGET_TTFT: Setting[float | None] = Setting("target_ttft_ms", TARGET_TTFT_VARIABLE, None, _milliseconds)
MODEL_IMPL: Setting[ModelImpl] = Setting(
    "model_impl", MODEL_IMPL_VARIABLE, "auto", one_of(*get_args(ModelImpl))
)
_AUTO_IMPL: Resolved[ModelImpl] = Resolved("auto")
DEVICE = Setting("device", DEVICE_VARIABLE, "auto", _device)
KERNELS: Setting[str] = Setting("kernels", KERNELS_VARIABLE, "auto", lambda value, name: str(value))
THREADS: Setting[int | None] = Setting("threads", THREADS_VARIABLE, None, _threads, _threads_text)
CACHE_DIR: Setting[Path | None] = Setting("cache_dir", CACHE_DIR_VARIABLE, None, _folder, empty_is_unset=True)
CACHE_SIZE: Setting[int] = Setting(
    "cache_size", CACHE_SIZE_VARIABLE, DEFAULT_CACHE_BYTES, parse_bytes, empty_is_unset=True
)


@dataclass(frozen=True)
class ChunkSetting:
    """A chunk size: what was asked for, what applies (0: the whole prompt in one chunk), and why. It is a multiple of
    `grid`; 1 is no grid. An automatic one is what a prompt begins with if nothing speaks for less or more."""

    requested: str
    effective: int
    source: SettingSource
    reason: str
    grid: int = 1
    is_auto: bool = False

    def on_grid(self, grid: int) -> "ChunkSetting":
        """Rounded up to a multiple, and the reason says so."""
        size, effective = self.effective, -(-self.effective // check_int("grid", grid, 1)) * grid
        reason = self.reason
        if effective != size:
            reason += (
                f", rounded up from {size} to {effective}, a multiple of {grid}: on a model with recurrent state "
                f"such chunks give the same bits and run faster; align=False or --no-align keeps {size}"
            )
        return replace(self, effective=effective, reason=reason, grid=grid)


@dataclass(frozen=True)
class AlignSetting(Resolved[bool]):
    """Whether chunk sizes are rounded up to whole blocks, where a model has recurrent state."""

    @property
    def enabled(self) -> bool:
        return self.effective

    def grid(self, *, has_state: bool) -> int:
        """The grid of chunk sizes on a model with recurrent state, or without: there nothing is to be aligned."""
        return STATE_GRID if self.effective and has_state else 1


@dataclass(frozen=True)
class SizeSettings:
    """A resolved chunk size, and the bounds that it keeps to."""

    chunk: ChunkSetting
    max_activation_bytes: int | None = None
    target_itl_s: float | None = None
    target_ttft_s: float | None = None

    @property
    def decode_gap(self) -> "Resolved[float | None]":
        """What a step takes at most while others decode, where there is no latency target."""
        if not self.chunk.is_auto:
            return Resolved(None, reason="the chunk is fixed")
        if self.target_itl_s is not None or self.target_ttft_s is not None:
            return Resolved(None, reason="a latency target is given")
        return Resolved(DECODE_GAP_S, reason="no latency target is given")

    def rules(
        self, *, free_bytes: int | None = None, tuned: int | None = None, default: int = DEFAULT_CHUNK_SIZE
    ) -> SizeRules:
        """The rules for a chunk's size on a machine with so much memory free, and a profile of its best chunk;
        `default` is for want of one."""
        return SizeRules(
            fixed=None if self.chunk.is_auto else self.chunk.effective,
            max_activation_bytes=self.max_activation_bytes,
            free_bytes=free_bytes,
            target_itl_s=self.target_itl_s,
            target_ttft_s=self.target_ttft_s,
            decode_gap_s=self.decode_gap.effective,
            grid=self.chunk.grid,
            tuned=tuned,
            default=default,
        )


@dataclass(frozen=True)
class DevicesFound:
    """What there is to compute on beside the processor."""

    num_cuda: int = 0
    has_mps: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        cuda = tuple(f"cuda:{index}" for index in range(self.num_cuda))
        return ("cpu", *cuda, *(("mps",) if self.has_mps else ()))


@dataclass(frozen=True)
class DeviceSetting(Resolved[str]):
    """A device by torch's name for it; `auto`, or `cuda` without a number, until it is settled."""

    is_settled: bool = field(default=False, compare=False)

    @property
    def name(self) -> str:
        return self.effective


@dataclass(frozen=True)
class ThreadsSetting(Resolved[int | None]):
    """A number of threads; None is what the libraries take by themselves."""

    @property
    def count(self) -> int | None:
        return self.effective

    def within(self, own: int) -> int:
        """What applies where the libraries would take `own`: a default is no reason to take more than that."""
        if self.effective is None:
            return own
        return min(self.effective, own) if self.source == "default" else self.effective


@dataclass(frozen=True)
class StoreSettings:
    """A folder for what was read, the most bytes that it may hold, and where each came from."""

    folder: Path
    max_bytes: int
    folder_source: SettingSource
    size_source: SettingSource


def resolve_chunk_size(
    argument: int | str | None = None, *, environ: Environment = None, grid: int = 1, called: str = "argument"
) -> ChunkSetting:
    """The chunk size from the argument, else from `PENSTOCK_PREFILL_CHUNK`, else `auto`: a number of tokens, 0 (off:
    the whole prompt in one chunk) or `auto`. Text is taken strictly: no spaces, signs or capitals. A size that is not
    a multiple of `grid`, which a model with recurrent state has, is rounded up to one."""
    found = CHUNK.resolve(argument, environ, called=called)
    size, reason = found.effective, found.reason
    if size is None:
        return ChunkSetting("auto", DEFAULT_CHUNK_SIZE, found.source, "auto", is_auto=True).on_grid(grid)
    if size == 0:
        reason += ": off, the whole prompt in one chunk"
    return ChunkSetting(str(size), size, found.source, reason).on_grid(grid)


def resolve_align(argument: bool | None = None, *, environ: Environment = None) -> AlignSetting:
    """Whether to align chunks, from the argument, else from `PENSTOCK_PREFILL_ALIGN` (0 or 1), else yes."""
    return AlignSetting(**vars(ALIGN.resolve(argument, environ)))


def resolve_size(
    chunk: int | str | None = None,
    *,
    max_activation: int | str | None = None,
    target_itl_ms: float | str | None = None,
    target_ttft_ms: float | str | None = None,
    environ: Environment = None,
    grid: int = 1,
) -> SizeSettings:
    """Each setting from its argument, else from the environment (`PENSTOCK_PREFILL_CHUNK`, `PENSTOCK_MAX_ACTIVATION`
    in bytes or with a unit, `PENSTOCK_TARGET_ITL` and `PENSTOCK_TARGET_TTFT` in milliseconds), else none.

    A fixed chunk follows no latency target, so the two contradict each other, wherever they come from.
    """
    size = resolve_chunk_size(chunk, environ=environ, grid=grid)
    activation = MAX_ACTIVATION.resolve(max_activation, environ)
    itl = resolve_target(TARGET_ITL, target_itl_ms, size, environ)
    ttft = resolve_target(TARGET_TTFT, target_ttft_ms, size, environ)
    return SizeSettings(size, activation.effective, itl.effective, ttft.effective)


def resolve_target(
    setting: Setting[float | None], argument: object, chunk: ChunkSetting, environ: Environment
) -> Resolved[float | None]:
    found = setting.resolve(argument, environ)
    if found.effective is not None and not chunk.is_auto:
        raise SettingError(
            setting.called(found.source),
            found.requested,
            "auto as the chunk",
            contradicts={CHUNK.called(chunk.source): chunk.effective},
            because="a fixed chunk follows no target",
        )
    return found


def check_schedule(size: SizeSettings, schedule: ScheduleConfig) -> None:
    """Refuse a schedule that follows no target where there is one, or that keeps tokens waiting for many chunks."""
    targets = {TARGET_ITL.name: size.target_itl_s, TARGET_TTFT.name: size.target_ttft_s}
    for name, target in targets.items():
        if target is None:
            continue
        target_ms = round(1000 * target, 6)
        if name == TARGET_ITL.name and schedule.policy is SchedulePolicy.PREFILL_FIRST:
            raise SettingError(
                name,
                target_ms,
                "mixed, interleaved or decode-priority",
                contradicts={"policy": schedule.policy.value},
                because=f"by this policy a token may wait for {schedule.max_chunk_steps} chunks",
            )
        if not schedule.auto_chunk:
            raise SettingError(
                name,
                target_ms,
                "a schedule with auto_chunk=True",
                contradicts={CHUNK.name: schedule.chunk_size},
                because="a schedule with a fixed chunk follows no target",
            )
    if schedule.auto_chunk and not size.chunk.is_auto:
        raise SettingError(
            "auto_chunk", True, "auto as the chunk", contradicts={CHUNK.name: size.chunk.effective}
        )


def resolve_device(
    argument: str | None = None, *, environ: Environment = None, called: str = "argument"
) -> DeviceSetting:
    """The device from the argument, else from `PENSTOCK_DEVICE`, else `auto`. Whether it is there, `settle_device`
    says."""
    return DeviceSetting(**vars(DEVICE.resolve(argument, environ, called=called)))


def settle_device(setting: DeviceSetting, found: DevicesFound, *, only_cpu: str = "") -> DeviceSetting:
    """The one device that it comes to, of those that were found: `auto` is the first of CUDA's, else the processor;
    or that at once, where `only_cpu` says what else was asked for that no other device has. One that is absent is an
    error."""
    name, reason = setting.effective, setting.reason
    if name == "auto" and found.num_cuda:
        name, reason = "cuda:0", "auto: the first GPU that torch sees"
        if only_cpu:
            name, reason = "cpu", f"auto: no GPU has {only_cpu}"
    elif name == "auto":
        name, reason = "cpu", "auto: torch sees no GPU of NVIDIA's"
    elif name == "cuda":
        name = "cuda:0"
    if name not in found.names:
        raise SettingError(
            DEVICE.called(setting.source),
            setting.effective,
            "one of these, or auto",
            where="here",
            because=f"torch sees {', '.join(found.names)}",
        )
    return replace(setting, effective=name, reason=reason, is_settled=True)


def resolve_threads(
    argument: int | None = None, *, environ: Environment = None, root: Path = Path("/")
) -> ThreadsSetting:
    """The number of threads from the argument, else from `PENSTOCK_THREADS`, else as many as there are physical cores
    for this process, unless a variable of the libraries says how many. `root` is where the system tells of cores."""
    environ = os.environ if environ is None else environ
    found = THREADS.resolve(argument, environ)
    if found.effective is not None:
        return ThreadsSetting(**vars(found))
    for name in _LIBRARY_THREADS:
        if environ.get(name):
            return ThreadsSetting(None, "environment", f"set by {name}", environ[name])
    return ThreadsSetting(usable_cores(root=root), "default", "physical cores")


def resolve_store(
    cache_dir: str | Path | None, cache_size: int | str | None, *, environ: Environment = None
) -> StoreSettings | None:
    """The folder from the argument, else from `PENSTOCK_CACHE_DIR`; None where neither names one.
    Its size from the argument, else from `PENSTOCK_CACHE_SIZE`, in bytes or with a unit, else 10 GiB.

    A variable that is empty is not set. A size as an argument without any folder is a contradiction.
    """
    size = CACHE_SIZE.resolve(cache_size, environ)
    folder = CACHE_DIR.resolve(cache_dir, environ)
    if folder.effective is not None:
        return StoreSettings(folder.effective, size.effective, folder.source, size.source)
    if size.source == "argument":
        raise SettingError(
            CACHE_SIZE.name,
            cache_size,
            needs=(CACHE_DIR.name, CACHE_DIR.variable),
            because="it says how much to keep, but not where",
        )
    return None


class EngineKeywords(TypedDict, total=False):
    """The settings of an engine, as arguments. None leaves one to its variable, or to the default."""

    model_impl: str | None
    dtype: Dtype
    weights: str | None
    activations: str | None
    device: str | None
    chunk: int | str | None
    max_activation: int | str | None
    target_itl_ms: float | str | None
    target_ttft_ms: float | str | None
    overlap: int
    align: bool | None
    threads: int | None
    cache_dir: str | Path | None
    cache_size: int | str | None
    reuse_tokens: int
    stages: int | str | None
    layers: str | Sequence[int] | None
    stage_timeout: float | None
    mixed: bool
    token_file: str | Path | None


@dataclass(frozen=True)
class EngineSettings:
    """All settings of an engine, resolved once and passed on: each with what was asked for, what applies, where that
    came from and why. What depends on the machine or the model comes later, each time as a new value: the device
    (`on`), the grid of chunk sizes (`for_model`), a profile's chunk (`tuned`)."""

    dtype: str
    weights: WeightsSetting
    device: DeviceSetting
    kernels: Resolved[str]
    chunk: ChunkSetting
    max_activation: Resolved[int | None]
    target_itl_s: Resolved[float | None]
    target_ttft_s: Resolved[float | None]
    overlap: int
    align: AlignSetting
    threads: ThreadsSetting
    store: StoreSettings | None
    reuse_tokens: int
    stages: StagesSetting | None = None
    model_impl: Resolved[ModelImpl] = _AUTO_IMPL
    activations: Resolved[ActivationsName] = PLAIN_ACTIVATIONS

    @classmethod
    def resolve(
        cls,
        *,
        environ: Environment = None,
        options: Mapping[str, str] | None = None,
        **keywords: Unpack[EngineKeywords],
    ) -> Self:
        """Each setting from its argument, else from the environment, else by default. What can be refused without the
        model is refused here. `options` is what a user calls the arguments, for the reasons."""
        values: dict[str, Any] = {**keywords}
        unknown = values.keys() - EngineKeywords.__annotations__
        if unknown:
            raise TypeError(f"there is no setting {', '.join(sorted(unknown))}")
        given = values.get
        called = {"chunk": "argument", "device": "argument", **(options or {})}
        dtype = one_of(*DTYPES)(given("dtype", "auto"), "dtype")
        chunk = resolve_chunk_size(given("chunk"), environ=environ, called=called["chunk"])
        weights = resolve_weights(given("weights"), dtype=dtype, environ=environ)
        settings = cls(
            dtype=dtype,
            weights=weights,
            device=resolve_device(given("device"), environ=environ, called=called["device"]),
            kernels=KERNELS.resolve(None, environ),
            chunk=chunk,
            max_activation=MAX_ACTIVATION.resolve(given("max_activation"), environ),
            target_itl_s=resolve_target(TARGET_ITL, given("target_itl_ms"), chunk, environ),
            target_ttft_s=resolve_target(TARGET_TTFT, given("target_ttft_ms"), chunk, environ),
            overlap=given("overlap", 0),
            align=resolve_align(given("align"), environ=environ),
            threads=resolve_threads(given("threads"), environ=environ),
            store=resolve_store(given("cache_dir"), given("cache_size"), environ=environ),
            reuse_tokens=check_int("reuse_tokens", given("reuse_tokens", 0), 0),
            stages=resolve_stages(
                given("stages"),
                given("layers"),
                timeout_s=given("stage_timeout"),
                mixed=given("mixed", False),
                token_file=given("token_file"),
            ),
            model_impl=MODEL_IMPL.resolve(given("model_impl"), environ),
            activations=resolve_activations(
                given("activations"), weights=weights, dtype=dtype, environ=environ
            ),
        )
        ChunkedPrefillConfig(chunk.effective, settings.overlap)
        if settings.overlap and (settings.store or settings.reuse_tokens):
            other = "cache_dir" if settings.store else "reuse_tokens"
            raise SettingError("overlap", settings.overlap, contradicts={other: ...})
        return settings

    @property
    def size(self) -> SizeSettings:
        targets = self.target_itl_s.effective, self.target_ttft_s.effective
        return SizeSettings(self.chunk, self.max_activation.effective, *targets)

    @property
    def config(self) -> ChunkedPrefillConfig:
        """How one prompt is cut. A chunk has more tokens than overlap."""
        size = self.chunk.effective  # 0: all in one
        return ChunkedPrefillConfig(max(size, self.overlap + 1) if size else 0, self.overlap)

    @property
    def computes_in(self) -> str:
        """The name of a dtype, or `auto`."""
        return self.weights.dtype if self.dtype == "auto" else self.dtype

    def on(self, found: DevicesFound) -> Self:
        """With the device that applies, of those that were found. One that was settled before stays."""
        if self.device.is_settled:
            return self
        only_cpu = "native kernels" if self.kernels.effective == "native" else ""
        return replace(self, device=settle_device(self.device, found, only_cpu=only_cpu))

    def for_model(self, *, has_state: bool) -> Self:
        """With the chunk on the grid of a model with recurrent state, or without."""
        settings = replace(self, chunk=self.chunk.on_grid(self.align.grid(has_state=has_state)))
        ChunkedPrefillConfig(settings.chunk.effective, self.overlap)
        return settings

    def tuned(self, best: int | None, default: int) -> Self:
        """With an automatic chunk as a profile has it, else the device's default."""
        grid, size, reason = self.chunk.grid, self.chunk.effective, self.chunk.reason
        if self.chunk.is_auto and best is None:
            size, reason = -(-default // grid) * grid, "auto: the default"
        elif self.chunk.is_auto and best is not None:
            size, reason = max(best // grid, 1) * grid, "auto: tuned on this machine"
        if self.overlap % grid:
            reason += f"; an overlap of {self.overlap} is no multiple of {grid}"
            reason += ", so bits may differ from those of other sizes"
        return replace(self, chunk=replace(self.chunk, effective=size, reason=reason))
