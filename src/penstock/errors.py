"""What can go wrong for a user's reason. The command line prints these as one line, never as a traceback."""


class PenstockError(Exception):
    """Base of every error that the user can act on: what was given, what is accepted, what to do."""


class SettingError(PenstockError, ValueError):
    """A setting with a value that is not accepted, or two settings that contradict each other."""


class PromptError(PenstockError, ValueError):
    """A prompt that cannot be run, such as an empty one."""


class ContextLengthError(PromptError):
    """A prompt and its answer need more tokens than the model's context holds."""


class ModelError(PenstockError):
    """A model that cannot be found or used: no such file, an unknown family, weights that do not fit."""


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
