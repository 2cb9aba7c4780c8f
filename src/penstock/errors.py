"""What can go wrong for a user's reason. The command line prints these as one line, never as a traceback."""

from collections.abc import Callable, Mapping

# How a message names a setting and its value: `top_p=2` in Python, `--top-p 2` on the command line.
SettingName = Callable[[str, object], str]
_NO_SETTING = object()
_MOST_MESSAGE = 1200


class PenstockError(Exception):
    """Base of every error that the user can act on: what was given, what is accepted, what to do."""


def assigned(setting: str, value: object) -> str:
    """A setting as Python writes it; without a value (`...`) its name alone."""
    return setting if value is ... else f"{setting}={value!r}"


class SettingError(PenstockError, ValueError):
    """A setting with a value that is not accepted, or settings that contradict each other.

    `setting` is its name: an argument's, an environment variable's or an option's. `value` is what was given (`...`
    where that is not to be told), `accepted` what to give instead, `because` a reason. The value may be accepted
    elsewhere (`where`), or with other values of other settings (`beside`). Those that it `contradicts`, and those of
    which it `needs` one, may be several. A message alone is for what is no setting's fault.
    """

    def __init__(
        self,
        setting: str,
        value: object = _NO_SETTING,
        accepted: str = "",
        /,
        *,
        because: str = "",
        where: str = "",
        beside: Mapping[str, object] | None = None,
        contradicts: Mapping[str, object] | None = None,
        needs: tuple[str, ...] = (),
    ) -> None:
        self.setting = None if value is _NO_SETTING else setting
        self.value = None if value is _NO_SETTING else value
        self.accepted = accepted
        self.because = because
        self.where = where
        self.beside = dict(beside or {})
        self.contradicts = dict(contradicts or {})
        self.needs = needs
        super().__init__(setting if self.setting is None else self.message())

    def message(self, name: SettingName = assigned) -> str:
        """One line that says what is wrong and what to do, with settings called as `name` calls them."""
        if self.setting is None:
            return str(self)
        given = name(self.setting, self.value)
        if self.needs:
            needed = " or ".join(name(each, ...) for each in self.needs)
            return f"{given} needs {needed}" + (f": {self.because}" if self.because else "")
        advice = [self.because] if self.because else []
        if self.contradicts:
            others = " and ".join(name(*each) for each in self.contradicts.items())
            fix = f"leave one of them out{f', or give {self.accepted}' if self.accepted else ''}"
            return f"{given} contradicts {others}: {'; '.join([*advice, fix])}"
        place = f" {self.where}" if self.where else ""
        if self.beside:
            place += " with " + " and ".join(name(*each) for each in self.beside.items())
        advice += [f"give {self.accepted}"] if self.accepted else []
        return f"{given} is not accepted{place}" + (f": {'; '.join(advice)}" if advice else "")


class PromptError(PenstockError, ValueError):
    """A prompt that cannot be run, such as an empty one."""


class ContextLengthError(PromptError):
    """A prompt and its answer need more tokens than the model's context holds."""


class ModelError(PenstockError):
    """A model that cannot be found or used: no such file, an unknown family, weights that do not fit. Names in a file
    may be of any length: of a long message the middle is left out."""

    def __init__(self, message: str) -> None:
        is_long = len(message) > _MOST_MESSAGE
        super().__init__(
            f"{message[: _MOST_MESSAGE // 2]} ... {message[-_MOST_MESSAGE // 2 :]}" if is_long else message
        )


class ModelFileError(ModelError):
    """A model file that is damaged, hostile or of a kind that is refused."""


class MemoryExhaustedError(PenstockError):
    """The machine has no memory left for a step, however small."""


class CacheFullError(PenstockError):
    """The K/V cache has no room for what was asked."""


class QueueFullError(PenstockError):
    """As many requests wait as may wait: try again later."""


class ServiceClosedError(PenstockError):
    """The service takes no more requests, or ended before this one did."""


class RequestFailedError(PenstockError):
    """A request that could not be run to its end, for a reason that is not the user's."""


class StageError(PenstockError):
    """A stage of the pipeline that cannot be used: which one, where it is, and why. `stage` is None where the address
    is all that is known of it."""

    _WHAT = "cannot be used"

    def __init__(self, stage: int | None, address: str, reason: str) -> None:
        self.stage = stage
        self.address = address
        self.reason = reason
        name = "the worker" if stage is None else f"stage {stage}"
        super().__init__(f"{name} at {address} {self._WHAT}: {reason}")


class StageLostError(StageError):
    """A stage that is gone: it closed the connection, is silent, or cannot be reached."""

    _WHAT = "is lost"


class StageRefusedError(StageError):
    """A stage that is there and does not fit: another token, other weights, other code, another processor."""

    _WHAT = "is refused"


class StageFailedError(StageError):
    """A stage that was lost again and again in steps of one request, and is not tried any more for it."""

    _WHAT = "fails again and again"


# What torch and the libraries under it say where they have no type of their own for it: on a processor, and on a GPU
# whose driver, and not torch's allocator, was asked for memory.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a processor or a device."""
    # By name, since this module does without torch.
    if isinstance(error, MemoryError) or any(
        kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__
    ):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
