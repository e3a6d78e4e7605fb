"""The table of metrics as a collector of Prometheus's client library."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from protocol.histogram import Distribution
from router.metrics import METRICS, PREFIX, Metric
from router.metrics_readers import Sample, Scrape
from router.metrics_totals import DoorTotals
from router.router import Router


class RouterCollector(Collector):
    """Not thread-safe: `collect` reads the state of the event loop, so it must run there."""

    def __init__(self, core: Router, told: DoorTotals, model_name: str) -> None:
        self._core, self._told, self._model_name = core, told, model_name

    def collect(self) -> list[Family]:
        scrape = Scrape(self._core, self._told, list(self._core.replicas()), self._core.totals())
        return [_family(metric, metric.read(scrape), self._model_name) for metric in METRICS]


def _family(metric: Metric, samples: Iterable[Sample], model_name: str) -> Family:
    name, labels = PREFIX + metric.name, ("model_name", *metric.labels)
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(name, metric.help, labels=labels)
        for values, value in samples:
            assert isinstance(value, Distribution)
            histogram.add_metric((model_name, *values), _buckets(value), value.total)
        return histogram
    family = (CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily)(name, metric.help, labels=labels)
    for values, value in samples:
        assert not isinstance(value, Distribution)
        family.add_metric((model_name, *values), value)
    return family


def _buckets(distribution: Distribution) -> list[tuple[str, float]]:
    """(upper edge, values up to it), cumulative, as Prometheus wants them."""
    buckets, so_far = [], 0
    for edge, count in zip((*map(repr, distribution.edges), "+Inf"), distribution.counts, strict=True):
        so_far += count
        buckets.append((edge, float(so_far)))
    return buckets
