"""All settings of an engine as one value, resolved once and passed on.

What depends on the machine or the model comes later, each time as a new value: the device (`on`), the grid of chunk
sizes (`for_model`), a profile's chunk (`tuned`).
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

from penstock.errors import SettingError
from penstock.plan.checks import check_int
from penstock.plan.chunks import ChunkedPrefillConfig
from penstock.plan.settings import (
    DTYPES,
    KERNELS,
    MAX_ACTIVATION,
    QUANTISED_WEIGHTS,
    TARGET_ITL,
    TARGET_TTFT,
    AlignSetting,
    ChunkSetting,
    DeviceSetting,
    DevicesFound,
    Dtype,
    Environment,
    Resolved,
    SizeSettings,
    StoreSettings,
    ThreadsSetting,
    WeightsSetting,
    one_of,
    resolve_align,
    resolve_chunk_size,
    resolve_device,
    resolve_store,
    resolve_target,
    resolve_threads,
    resolve_weights,
    settle_device,
)


class EngineKeywords(TypedDict, total=False):
    """The settings of an engine, as arguments. None leaves one to its variable, or to the default."""

    dtype: Dtype
    weights: str | None
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


@dataclass(frozen=True)
class EngineSettings:
    """All settings of an engine: each with what was asked for, what applies, where that came from and why."""

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

    @classmethod
    def resolve(cls, *, environ: Environment = None, **keywords: Unpack[EngineKeywords]) -> Self:
        """Each setting from its argument, else from the environment, else by default. What can be refused without the
        model is refused here."""
        values: dict[str, Any] = {**keywords}
        unknown = values.keys() - EngineKeywords.__annotations__
        if unknown:
            raise TypeError(f"there is no setting {', '.join(sorted(unknown))}")
        given = values.get
        dtype = one_of(*DTYPES)(given("dtype", "auto"), "dtype")
        chunk = resolve_chunk_size(given("chunk"), environ=environ)
        settings = cls(
            dtype=dtype,
            weights=resolve_weights(given("weights"), dtype=dtype, environ=environ),
            device=resolve_device(given("device"), environ=environ),
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
        )
        ChunkedPrefillConfig(chunk.effective, settings.overlap)
        if settings.overlap and (settings.store or settings.reuse_tokens):
            other = "cache_dir" if settings.store else "reuse_tokens"
            raise SettingError("overlap", settings.overlap, contradicts={other: ...})
        return settings

    @property
    def size(self) -> SizeSettings:
        return SizeSettings(
            self.chunk,
            self.max_activation.effective,
            self.target_itl_s.effective,
            self.target_ttft_s.effective,
        )

    @property
    def config(self) -> ChunkedPrefillConfig:
        """How one prompt is cut. A chunk has more tokens than overlap."""
        return ChunkedPrefillConfig(max(self.chunk.effective, self.overlap + 1), self.overlap)

    @property
    def computes_in(self) -> str:
        """The name of a dtype, or `auto`."""
        return self.weights.dtype if self.dtype == "auto" else self.dtype

    def on(self, found: DevicesFound) -> Self:
        """With the device that applies, of those that were found. One that was settled before stays."""
        if self.device.is_settled:
            return self
        only_cpu = "native kernels" if self.kernels.effective == "native" else ""
        if self.weights.effective in QUANTISED_WEIGHTS:
            only_cpu = f"{self.weights.effective} weights"
        return replace(self, device=settle_device(self.device, found, only_cpu=only_cpu))

    def for_model(self, *, has_state: bool) -> Self:
        """With the chunk on the grid of a model with recurrent state, or without."""
        settings = replace(self, chunk=self.chunk.on_grid(self.align.grid(has_state=has_state)))
        ChunkedPrefillConfig(settings.chunk.effective, self.overlap)
        return settings

    def tuned(self, best: int | None, default: int) -> Self:
        """With an automatic chunk as a profile has it, else the device's default."""
        chunk, grid = self.chunk, self.chunk.grid
        if chunk.is_auto and best is None:
            chunk = replace(chunk, effective=-(-default // grid) * grid, reason="auto: the default")
        elif chunk.is_auto and best is not None:
            chunk = replace(
                chunk, effective=max(best // grid, 1) * grid, reason="auto: tuned on this machine"
            )
        if self.overlap % grid:
            why = f"an overlap of {self.overlap} is no multiple of {grid}"
            chunk = replace(
                chunk, reason=f"{chunk.reason}; {why}, so bits may differ from those of other sizes"
            )
        return replace(self, chunk=chunk)
