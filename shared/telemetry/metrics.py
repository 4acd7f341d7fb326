"""What a process counts of itself. Adding is cheap, for some of it is done for every token.

Counters only grow, histograms count values by their size, and what is kept elsewhere anyway is read
there when somebody asks. How numbers are told is no business of this module, see
`shared.telemetry.prometheus`; what they mean is in `shared.telemetry.catalog`.
"""

from bisect import bisect_left
from collections.abc import Callable

from shared.protocol.messages import MetricSeries, WorkerMetrics
from shared.telemetry.catalog import METRICS

LabelSet = tuple[tuple[str, str], ...]


class Counter:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        self.value += amount


class Histogram:
    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """`bounds` are upper ones, each within its bucket, in ascending order."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """By bucket; the last is for what is above all bounds."""
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """`count` times the same value, at the cost of one."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count


Read = Callable[[], float]
Series = Counter | Histogram | Read


class Metrics:
    """The numbers of one process, for one model or, where the model is "", for none in particular.

    Names are those of the catalogue; a series comes into being when it is first asked for.
    """

    def __init__(
        self,
        role: str,
        worker: str,
        model: str = "",
        series: dict[tuple[str, LabelSet], Series] | None = None,
    ) -> None:
        self._role = role
        self._worker = worker
        self._model = model
        self._series = {} if series is None else series

    def of(self, model: str) -> "Metrics":
        """The same numbers, as far as they are of this model."""
        return Metrics(self._role, self._worker, model, self._series)

    def counter(self, name: str, **labels: str) -> Counter:
        key = self._key(name, labels)
        if (series := self._series.get(key)) is None:
            assert METRICS[name].kind == "counter", name
            series = self._series[key] = Counter()
        assert isinstance(series, Counter), name
        return series

    def histogram(self, name: str, **labels: str) -> Histogram:
        key = self._key(name, labels)
        if (series := self._series.get(key)) is None:
            series = self._series[key] = Histogram(METRICS[name].bounds)
        assert isinstance(series, Histogram), name
        return series

    def set_function(self, name: str, read: Read, **labels: str) -> None:
        """Call `read` whenever somebody asks; what it reads of a counter must only grow."""
        assert METRICS[name].kind != "histogram", name
        self._series[self._key(name, labels)] = read

    def snapshot(self) -> WorkerMetrics:
        """All of it, of every model, as it is just now."""
        # Another thread may be asking while a series comes into being.
        told = sorted(self._series.copy().items(), key=lambda item: item[0])
        series = [_to_series(name, dict(labels), series) for (name, labels), series in told]
        return WorkerMetrics(self._role, self._worker, series)

    def _key(self, name: str, labels: dict[str, str]) -> tuple[str, LabelSet]:
        own = (("model", self._model), ("role", self._role), ("worker", self._worker))
        return name, own + tuple(labels.items())


def _to_series(name: str, labels: dict[str, str], series: Series) -> MetricSeries:
    if isinstance(series, Histogram):
        return MetricSeries(name, labels, series.total, list(series.bounds), series.counts.copy())
    value = series.value if isinstance(series, Counter) else series()
    return MetricSeries(name, labels, value)
