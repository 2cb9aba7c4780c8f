"""A worker, as the driver knows it: its connection, what it has loaded, what it answers, how long its steps took."""

import queue
from dataclasses import dataclass, field

from penstock.cache.tensors import CacheSpec
from penstock.engine.stages.control import Control, Message
from penstock.errors import StageLostError, StageRefusedError
from penstock.kernels.probe import ProbeShapes

# How often it is looked whether one that is to answer is still there.
_LOOK_S = 0.5


@dataclass(frozen=True)
class LoadedStage:
    """What a worker has of the model."""

    layers: range
    cache: CacheSpec
    weight_bytes: int
    free_bytes: int | None
    device: str


@dataclass
class StageTimes:
    """Of one stage, in seconds, since it was loaded."""

    num_steps: int = 0
    busy_s: float = 0.0
    waited_s: float = 0.0  # for a residual
    link_s: float = 0.0  # to hand a residual on

    def count(self, *, busy_s: float, waited_s: float, link_s: float) -> None:
        self.num_steps += 1
        self.busy_s += busy_s
        self.waited_s += waited_s
        self.link_s += link_s


@dataclass(eq=False)
class Peer:
    """One connection to a worker. Another takes its place when it is lost."""

    stage: int
    control: Control
    layers: range
    replies: "queue.SimpleQueue[Message | StageLostError]" = field(default_factory=queue.SimpleQueue)
    found: "queue.SimpleQueue[Message]" = field(default_factory=queue.SimpleQueue)
    loaded: LoadedStage | None = None
    times: StageTimes = field(default_factory=StageTimes)
    shapes: ProbeShapes | None = None
    num_restarts: int = 0
    differs: bool = False  # its bits may be others than the driver's

    def count_found(self, round_number: int) -> int:
        """The answer to a question for what is on disk."""
        while True:
            try:
                about = self.found.get(timeout=_LOOK_S).about
            except queue.Empty:
                if not self.control.is_alive:
                    raise StageLostError(self.stage, self.control.peer, "it is not connected") from None
                continue
            if about["round"] == round_number:
                return int(about["num_blocks"])

    def reply(self, kind: str) -> Message:
        """The answer to what was asked of it last."""
        while True:
            message = self.replies.get()
            if isinstance(message, StageLostError):
                self.replies.put(message)
                raise message
            if message.kind == "failed":
                raise StageRefusedError(self.stage, self.control.peer, str(message.about.get("error")))
            if message.kind == kind:
                return message
