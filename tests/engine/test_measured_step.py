"""The step that a GPU's memory is measured with: what it runs, and what becomes of one that is too large."""

from collections.abc import Iterator

import pytest
import torch

from penstock.cache.space import CacheSpace
from penstock.engine.capacity import measured_step_bytes
from penstock.errors import CacheFullError
from penstock.kernels.device import DeviceKind
from penstock.models.decoder import Decoder
from penstock.plan.grids import RowLaw
from tests.oracle import load_model, make_oracle

CANON = RowLaw(tile_size=512)


@pytest.fixture(params=["llama", "qwen3_5_text"])
def model(request: pytest.FixtureRequest) -> Decoder:
    return load_model(make_oracle(request.param).folder)


class Counted:
    """An allocator that has more at its peak after each pass, and the rows of the passes."""

    def __init__(self, model: Decoder, patch: pytest.MonkeyPatch, most_rows: int | None = None) -> None:
        self.rows: list[tuple[int, int]] = []  # tokens, logits
        self._peak = 1000
        forward = model.forward

        def counted(batch: object, caches: object, residual: object) -> torch.Tensor | None:
            assert residual is None  # of a model that is whole
            num_tokens = batch.num_tokens  # type: ignore[attr-defined]
            if most_rows is not None and num_tokens > most_rows:
                raise torch.OutOfMemoryError
            self.rows.append((num_tokens, batch.num_logits))  # type: ignore[attr-defined]
            self._peak += num_tokens
            return forward(batch, caches)  # type: ignore[arg-type]

        patch.setattr(model, "forward", counted)
        patch.setattr(DeviceKind, "memory_bytes", lambda kind: 1000)
        patch.setattr(DeviceKind, "peak_bytes", lambda kind: self._peak)
        patch.setattr(DeviceKind, "reset_peak", lambda kind: self.reset())

    def reset(self) -> bool:
        self._peak = 1000
        return True


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def test_it_reads_after_others_and_decodes_beside(model: Decoder, patch: pytest.MonkeyPatch) -> None:
    counted = Counted(model, patch)
    assert measured_step_bytes(model, CANON, 192, 3) == CANON.tile_size + 195
    assert counted.rows == [(CANON.tile_size, 1), (195, 4)]


def test_no_step_is_longer_than_the_context(model: Decoder, patch: pytest.MonkeyPatch) -> None:
    counted = Counted(model, patch)
    measured_step_bytes(model, CANON, 10**9, 1)
    assert counted.rows == [(model.config.max_position + 1, 2)]


def test_what_does_not_fit_is_halved(model: Decoder, patch: pytest.MonkeyPatch) -> None:
    counted = Counted(model, patch, most_rows=600)
    assert measured_step_bytes(model, CANON, 2048, 2) == CANON.tile_size + 514
    assert counted.rows[-1] == (514, 3)


def test_other_errors_are_told(model: Decoder, patch: pytest.MonkeyPatch) -> None:
    def fail(batch: object, caches: object, residual: object) -> torch.Tensor | None:
        raise ValueError("no pass")

    patch.setattr(model, "forward", fail)
    with pytest.raises(ValueError, match="no pass"):
        measured_step_bytes(model, CANON, 64, 1)

    def no_space(*args: object, **options: object) -> None:
        raise CacheFullError("no cache")

    patch.setattr(CacheSpace, "for_tokens", no_space)
    with pytest.raises(CacheFullError, match="no cache"):
        measured_step_bytes(model, CANON, 64, 1)
