"""Memory that this process takes, as the system counts it."""

import ctypes
import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def resident_bytes() -> int | None:
    """Resident memory now; None where the system does not tell (anything but Linux)."""
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """The most resident memory since the last `reset_peak`, or since the process started."""
    peak = _status("VmHWM")
    if peak is not None:
        return peak
    # Linux counts KiB here, macOS bytes.
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def anonymous_bytes() -> int | None:
    """Resident memory now that is no file's: what was allocated. None where the system does not tell."""
    return _status("RssAnon")


def peak_anonymous_bytes() -> int | None:
    """The most allocated memory that was resident since the last `reset_peak`, taking it that as much of files was
    resident then as is now. None where the system does not tell."""
    files, shared = _status("RssFile"), _status("RssShmem")
    if files is None or shared is None:
        return None
    return peak_resident_bytes() - files - shared


def trim_heap() -> None:
    """Give memory that was freed back to the system, where the C library has a call for that."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def reset_peak() -> bool:
    """Start measuring the peak anew. False where the system cannot."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def _status(field: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return None
