"""Connections whose other end does not read: they end, instead of being held for ever."""

import asyncio
import socket
import struct

from uvicorn.protocols.http.h11_impl import H11Protocol

# How long nothing of an answer may be taken.
STALL_S = 60.0
_AT_ONCE = struct.pack("ii", 1, 0)


class Connection(H11Protocol):
    """Hangs up on a client that takes nothing for `STALL_S`. Whoever works for it then learns that it has gone."""

    _timer: asyncio.TimerHandle | None = None
    _num_unsent = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Writing pauses as soon as the system takes no more, so that a pause is always a client that does not read.
        transport.set_write_buffer_limits(high=0)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        self._unwatch()
        super().resume_writing()

    def _watch(self) -> None:
        self._unwatch()
        self._num_unsent = self.transport.get_write_buffer_size()
        self._timer = self.loop.call_later(STALL_S, self._look)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        if self.transport.get_write_buffer_size() < self._num_unsent:
            self._watch()  # slow, but it reads
        else:
            # The system is to forget it too, and what it has kept for it.
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            self.transport.abort()
