"""What was found of prompts, and what was given up, for Prometheus: the service counts it, a scrape reads it."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from penstock.engine.status import ServiceStatus


class ReuseMetrics(Collector):
    """The metrics of one status. A server without a folder for its cache has zeros of it."""

    def __init__(self, status: ServiceStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        cache, reuse = self._status.cache, self._status.reuse
        found = {"memory": reuse.memory_tokens, "disk": reuse.disk_tokens}
        yield _counters("prefix_hit_tokens", "Prompt tokens that were found and not read", "where", found)
        yield _counter("prefix_miss_tokens", "Prompt tokens that were not found", reuse.missed_tokens)
        requests = {"hit": reuse.num_hits, "miss": reuse.num_misses}
        yield _counters(
            "prefix_requests", "Requests by whether some of the prompt was found", "result", requests
        )
        given_up = {"block": reuse.num_evicted_blocks, "state": reuse.num_evicted_states}
        yield _counters("prefix_evictions", "What was given up for space, in memory", "what", given_up)
        yield _gauge("cache_blocks_idle", "Blocks of the K/V cache kept for reuse", cache.blocks_idle)
        yield _gauge("state_slots_idle", "Slots of recurrent state kept for reuse", cache.slots_idle)
        yield _counter("disk_cache_writes", "Files written to the cache folder", reuse.num_disk_written)
        yield _counter("disk_cache_evictions", "Files deleted for space", reuse.num_disk_evicted)
        yield _counter("disk_cache_damaged", "Files found damaged and set aside", reuse.num_disk_damaged)
        yield _counter(
            "disk_cache_dropped", "Files not written for a slow or failing disk", reuse.num_disk_dropped
        )
        yield _gauge("disk_cache_bytes", "Bytes in the cache folder", reuse.disk_bytes or 0)
        yield _gauge("disk_cache_limit_bytes", "The most bytes there", reuse.disk_limit_bytes or 0)


def _counter(name: str, text: str, value: int) -> Metric:
    return CounterMetricFamily(f"penstock_{name}", text, value=value)


def _counters(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"penstock_{name}", text, labels=[label])
    for which, value in values.items():
        family.add_metric([which], value)
    return family


def _gauge(name: str, text: str, value: int) -> Metric:
    return GaugeMetricFamily(f"penstock_{name}", text, value=value)
