"""Two network namespaces joined by a link of a certain rate: two machines, as far as the network goes, on one."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.errors import PenstockError

_CLONE_NEWNET = 0x40000000
_FOLDER = Path("/var/run/netns")
# tbf sends what came together at once, up to a burst: a large one is no slow link, a small one no fast one.
_BURST_S, _LEAST_BURST, _MOST_BURST = 0.004, 16_384, 1 << 20


class NamespaceError(PenstockError):
    """This system makes no namespaces, or shapes no link: for want of rights, of a tool, or of the kernel's help."""


@dataclass(frozen=True)
class Joined:
    """The names of two namespaces, and the address of each on the link between them."""

    names: tuple[str, str]
    addresses: tuple[str, str]
    ends: tuple[str, str]

    def turn(self, end: int, state: Literal["up", "down"]) -> None:
        """One end of the link: while it is down, nothing passes either way."""
        _run("ip", "-n", self.names[end], "link", "set", self.ends[end], state)


@contextmanager
def joined_namespaces(bits_per_s: int) -> Iterator[Joined]:
    """Gone at the end, whatever happened."""
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise NamespaceError(f"there is no {missing[0]}")
    names = (f"penstock-{os.getpid()}-a", f"penstock-{os.getpid()}-b")
    ends = (f"pa{os.getpid()}", f"pb{os.getpid()}")
    joined = Joined(names, ("10.231.77.1", "10.231.77.2"), ends)
    burst = min(max(int(bits_per_s / 8 * _BURST_S), _LEAST_BURST), _MOST_BURST)
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run(
            "ip",
            "link",
            "add",
            ends[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            ends[1],
            "netns",
            names[1],
        )
        for name, end, address in zip(names, ends, joined.addresses, strict=True):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", end)
            for device in ("lo", end):
                _run("ip", "-n", name, "link", "set", device, "up")
            rate = ("rate", f"{bits_per_s}bit", "burst", f"{burst}b", "latency", "200ms")
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", end, "root", "tbf", *rate)
        yield joined
    finally:
        for name in names:
            with suppress(NamespaceError):
                _run("ip", "netns", "del", name)


def enter_namespace(name: str) -> None:
    """The calling thread, and those that it starts from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(_FOLDER / name, os.O_RDONLY)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            raise NamespaceError(f"{name} cannot be entered: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(descriptor)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit {done.returncode}"
        raise NamespaceError(f"`{' '.join(command[:4])}`: {said}")
