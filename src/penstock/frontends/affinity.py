"""Which of several replicas reads a prompt: one that has read its beginning, else one with little to do."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from penstock.cache.keys import BlockKey

# Blocks that are remembered, those of all replicas together: 16 million tokens.
MOST_KEYS = 1 << 18


@dataclass(eq=False)
class Route:
    """The way of a request with these blocks to a replica, and of the answer back: until `is_over`, which may be said
    on any thread, it is a load of that replica."""

    keys: Sequence[BlockKey]
    replica: str = ""
    is_over: bool = False

    @classmethod
    def aside(cls) -> Self:
        """Of what is no load: a question that is answered at once."""
        return cls((), is_over=True)


class PrefixAffinity:
    """Remembers which replica was given which blocks. A replica that has at least half of a prompt is given all of
    it, up to `most_load` requests at once; any other prompt goes where the load is least, and among equals to the one
    that has most of it, then to the one that was given least. Not for several threads."""

    def __init__(self, most_load: int, most_keys: int = MOST_KEYS) -> None:
        self._most_load = most_load
        self._most_keys = most_keys
        self._owners: dict[BlockKey, set[str]] = {}  # the last used last
        self._num_keys: Counter[str] = Counter()
        self._routes: set[Route] = set()

    def ranked(self, route: Route, names: Collection[str]) -> list[str]:
        """The one of these replicas that is to have a request, then the others, by their load."""
        self._routes = {each for each in self._routes if not each.is_over and each is not route}
        counts = Counter(each.replica for each in self._routes)
        loads = {name: counts[name] for name in names}
        route.replica = self.choose(route.keys, loads)
        self._routes.add(route)
        return [route.replica, *sorted(loads.keys() - {route.replica}, key=loads.__getitem__)]

    def choose(self, keys: Sequence[BlockKey], loads: Mapping[str, int]) -> str:
        """One of the replicas in `loads`, for a prompt of these blocks, which it is then taken to have."""
        found = self._num_found(keys, loads)
        able = [name for name in loads if 2 * found[name] >= len(keys) > 0 and loads[name] < self._most_load]
        if able:
            chosen = min(able, key=lambda name: (-found[name], loads[name], name))
        else:
            chosen = min(loads, key=lambda name: (loads[name], -found[name], self._num_keys[name], name))
        for key in keys:
            owners = self._owners[key] = self._owners.pop(key, set())
            if chosen not in owners:
                owners.add(chosen)
                self._num_keys[chosen] += 1
        while len(self._owners) > self._most_keys:
            self._num_keys.subtract(self._owners.pop(next(iter(self._owners))))
        return chosen

    def keep(self, names: Collection[str]) -> None:
        """Forget all replicas but these: what the others had is lost."""
        if self._num_keys.keys() <= set(names):
            return
        for key, owners in tuple(self._owners.items()):
            owners.intersection_update(names)
            if not owners:
                del self._owners[key]
        self._num_keys = Counter({name: self._num_keys[name] for name in names})

    def _num_found(self, keys: Sequence[BlockKey], names: Collection[str]) -> Counter[str]:
        """Blocks from the prompt's beginning that each replica has."""
        found: Counter[str] = Counter()
        having = set(names)
        for key in keys:
            having &= self._owners.get(key, set())
            if not having:
                break
            found.update(having)
        return found
