"""Metrics of one process. Updates are cheap, because some happen for every token.

Counters only grow, histograms count values by bucket, and functions read values that other code
stores anyway. `shared.telemetry.prometheus` exports metrics, and `shared.telemetry.catalog`
describes them.
"""

from bisect import bisect_left
from collections.abc import Callable

from shared.protocol.messages import MetricSeries, WorkerMetrics
from shared.telemetry.catalog import METRICS

LabelSet = tuple[tuple[str, str], ...]


class Counter:
    """Value that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        self.value += amount


class Histogram:
    """Number of observed values per bucket, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """`bounds` are the inclusive upper bounds of the buckets, in ascending order."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Number of values by bucket; the last bucket is for values above all bounds."""
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add `value` as `count` observations, at the cost of one."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count


ReadValue = Callable[[], float]
Series = Counter | Histogram | ReadValue


class Metrics:
    """All series of one process, bound to one model; the model "" stands for none.

    Names must be in the catalog. A series is created on its first use.
    """

    def __init__(self, role: str, worker: str, model: str = "") -> None:
        self._role = role
        self._worker = worker
        self._model = model
        self._series: dict[tuple[str, LabelSet], Series] = {}

    def of(self, model: str) -> "Metrics":
        """Return the same metrics bound to `model`."""
        metrics = Metrics(self._role, self._worker, model)
        metrics._series = self._series
        return metrics

    def counter(self, name: str, **labels: str) -> Counter:
        """Return the counter of this name and these labels."""
        key = self._key(name, labels)
        if (series := self._series.get(key)) is None:
            assert METRICS[name].kind == "counter", name
            series = self._series[key] = Counter()
        assert isinstance(series, Counter), name
        return series

    def histogram(self, name: str, **labels: str) -> Histogram:
        """Return the histogram of this name and these labels."""
        key = self._key(name, labels)
        if (series := self._series.get(key)) is None:
            series = self._series[key] = Histogram(METRICS[name].bounds)
        assert isinstance(series, Histogram), name
        return series

    def set_function(self, name: str, read: ReadValue, **labels: str) -> None:
        """Set a function that returns the current value. The value of a counter must only grow."""
        assert METRICS[name].kind != "histogram", name
        self._series[self._key(name, labels)] = read

    def snapshot(self) -> WorkerMetrics:
        """Return the current values of all series, for all models."""
        # Another thread may create a series meanwhile.
        items = sorted(self._series.copy().items(), key=lambda item: item[0])
        series = [_to_series(name, dict(labels), series) for (name, labels), series in items]
        return WorkerMetrics(self._role, self._worker, series)

    def _key(self, name: str, labels: dict[str, str]) -> tuple[str, LabelSet]:
        own = (("model", self._model), ("role", self._role), ("worker", self._worker))
        return name, own + tuple(labels.items())


def _to_series(name: str, labels: dict[str, str], series: Series) -> MetricSeries:
    if isinstance(series, Histogram):
        return MetricSeries(name, labels, series.total, list(series.bounds), series.counts.copy())
    value = series.value if isinstance(series, Counter) else series()
    return MetricSeries(name, labels, value)
