"""Who holds how many blocks of a cache that requests share."""

from typing import Protocol

from penstock.plan.step import RequestId


class BlockLedger(Protocol):
    """Tells how many blocks may be taken, and is told who is to hold how many. Requests that begin alike may hold
    some of the same blocks: what one gives up is then not always free."""

    @property
    def num_free(self) -> int: ...

    def num_held(self, request_id: RequestId) -> int: ...

    def num_shared(self, request_id: RequestId) -> int:
        """Blocks that a request which holds none would share with others that hold them."""

    def hold(self, request_id: RequestId, num_blocks: int) -> None:
        """The request is to hold so many blocks, its first ones: more than it did, or fewer."""

    def forget(self, request_id: RequestId) -> None:
        """The request holds nothing any more."""


class PlainLedger:
    """Blocks that nobody shares, by counting."""

    def __init__(self, num_blocks: int) -> None:
        self._num_free = num_blocks
        self._held: dict[RequestId, int] = {}

    @property
    def num_free(self) -> int:
        return self._num_free

    def num_held(self, request_id: RequestId) -> int:
        return self._held.get(request_id, 0)

    def num_shared(self, request_id: RequestId) -> int:
        return 0

    def hold(self, request_id: RequestId, num_blocks: int) -> None:
        self._num_free -= num_blocks - self.num_held(request_id)
        self._held[request_id] = num_blocks

    def forget(self, request_id: RequestId) -> None:
        self._num_free += self._held.pop(request_id, 0)
