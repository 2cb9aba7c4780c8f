"""The size limit of the disk store, over all models in its folder: what has been unused for longest goes first."""

import time
from collections.abc import Set
from pathlib import Path

from penstock.cache.store.folder import ModelFiles, StoredFile, remove, scan

# Evicting goes on to this share of the limit, so that not every file that is written has to look for room.
_ROOM_TO_LEAVE = 0.9
# Other processes write too: what they did is seen after so much of the limit was written here, or so many seconds.
_SCAN_SHARE = 0.05
_SCAN_S = 60.0


class SizeLimit:
    """How much lies in a folder, and what is to go for a file to come. For one thread at a time.

    The total is kept in memory and put right by looking, now and then and always before something is evicted.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_evicted = 0
        self._scan()

    def add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._since_scan += num_bytes

    def make_room(self, num_bytes: int, keep: Set[Path], used_ns: int, num_blocks: int) -> bool:
        """Whether a file of this size may be written now, after evicting others but those in `keep`, and those that
        would go after it: a prompt that is too long for the limit keeps its head."""
        if num_bytes > self.max_bytes:
            return False
        is_due = time.monotonic() - self._scanned_s > _SCAN_S
        if is_due or self._since_scan > _SCAN_SHARE * self.max_bytes:
            self._scan()
        if self.num_bytes + num_bytes > self.max_bytes:
            goal_bytes = int(_ROOM_TO_LEAVE * self.max_bytes) - num_bytes
            self._evict(self._scan(), goal_bytes, keep, (True, used_ns, -num_blocks))
        return self.num_bytes + num_bytes <= self.max_bytes

    def _scan(self) -> list[ModelFiles]:
        """Count again, and clear away what dead processes left."""
        models, now_ns = scan(self._folder), time.time_ns()
        self.num_bytes = sum(model.num_bytes for model in models)
        self._since_scan = 0
        self._scanned_s = time.monotonic()
        for model in models:
            for file in model.temporary:
                if file.is_stale(now_ns) and remove(file.path):
                    self.num_bytes -= file.num_bytes
        return models

    def _evict(
        self, models: list[ModelFiles], goal_bytes: int, keep: Set[Path], before: tuple[bool, int, int]
    ) -> None:
        if self.num_bytes <= goal_bytes:
            return
        now_ns = time.time_ns()
        for file in eviction_order(models, now_ns):
            if file.path in keep:
                continue
            if file.name is not None and _rank(file, now_ns) >= before:
                return
            # One that has gone already was another process's to evict.
            self.num_evicted += remove(file.path)
            self.num_bytes -= file.num_bytes
            if self.num_bytes <= goal_bytes:
                return


def eviction_order(models: list[ModelFiles], now_ns: int) -> list[StoredFile]:
    """Damaged files; then those whose time is of a clock that was wrong; then by time of last use. Of files that were
    used together the end of a prefix goes first: without its head, the rest of it is of no use."""
    damaged = [file for model in models for file in model.damaged]
    files = [file for model in models for file in model.files]
    return damaged + sorted(files, key=lambda file: _rank(file, now_ns))


def _rank(file: StoredFile, now_ns: int) -> tuple[bool, int, int]:
    assert file.name is not None
    is_from_future = file.used_ns > now_ns and file.is_stale(now_ns)
    return not is_from_future, file.used_ns, -file.name.num_blocks
