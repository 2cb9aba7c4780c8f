"""How many threads compute, and where that setting came from."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import SettingError
from penstock.machine import usable_cores
from penstock.plan.settings import SettingSource

THREADS_VARIABLE = "PENSTOCK_THREADS"
MAX_THREADS = 1024
# Settings of the libraries that compute, which they follow by themselves.
_LIBRARY_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_NUMBER = re.compile(r"[1-9][0-9]{0,3}", re.ASCII)


@dataclass(frozen=True)
class ThreadsSetting:
    """A resolved number of threads; None is what the libraries take by themselves."""

    count: int | None
    source: SettingSource
    reason: str

    def within(self, own: int) -> int:
        """What applies where the libraries would take `own`: a default is no reason to take more than that."""
        if self.count is None:
            return own
        return min(self.count, own) if self.source == "default" else self.count


def resolve_threads(
    argument: int | None = None, *, environ: Mapping[str, str] | None = None, root: Path = Path("/")
) -> ThreadsSetting:
    """The number of threads from the argument, else from `PENSTOCK_THREADS`, else as many as there are physical cores
    for this process, unless a variable of the libraries says how many. `root` is where the system tells of cores."""
    environ = os.environ if environ is None else environ
    if argument is not None:
        if isinstance(argument, bool) or not isinstance(argument, int) or not 1 <= argument <= MAX_THREADS:
            raise _refused("threads", argument)
        return ThreadsSetting(argument, "argument", "threads")
    if THREADS_VARIABLE in environ:
        value = environ[THREADS_VARIABLE]
        if not _NUMBER.fullmatch(value) or int(value) > MAX_THREADS:
            raise _refused(THREADS_VARIABLE, value)
        return ThreadsSetting(int(value), "environment", THREADS_VARIABLE)
    for name in _LIBRARY_VARIABLES:
        if environ.get(name):
            return ThreadsSetting(None, "environment", name)
    return ThreadsSetting(usable_cores(root=root), "default", "physical cores")


def _refused(name: str, value: object) -> SettingError:
    return SettingError(name, value, f"a whole number from 1 to {MAX_THREADS}")
