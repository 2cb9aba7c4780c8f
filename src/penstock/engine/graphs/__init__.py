"""Passes that a device records, and runs again by one command."""

from penstock.kernels.device import device_kind
from penstock.models.decoder import Decoder


def record_passes(model: Decoder) -> None:
    """Let a model's passes be recorded from now on, where its device can."""
    if model.recorded is None and model.can_record and device_kind(model.device).records:
        from penstock.engine.graphs.passes import PassGraphs  # with what only a GPU has

        model.recorded = PassGraphs(model)
