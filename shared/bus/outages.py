"""Outages of queues: the broker refuses pulls while a consumer is lost or has no leader."""

import time
from collections import Counter
from collections.abc import Callable

import structlog

from shared.protocol import subjects

# An election causes a few refusals, and usually ends before an operator could act.
MAX_SILENT_REFUSALS = 3

_log = structlog.get_logger()


class Outages:
    """Queues of one worker that refuse pulls. They are logged as one outage."""

    def __init__(self, on_refused: Callable[[], None]) -> None:
        self._on_refused = on_refused
        self._refusals: Counter[tuple[str, str]] = Counter()
        self._began_s: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether a queue has refused several pulls without an answer since.

        The queues of one tenant do not count: with them, a worker would be unready for all others.
        """
        return self._began_s is not None

    def is_refused(self, stream: str, durable: str) -> bool:
        """Return whether the last pull from a queue was refused."""
        return (stream, durable) in self._refusals

    def add_refusal(self, stream: str, durable: str, status: str) -> None:
        """Count a refused pull."""
        self._refusals[stream, durable] += 1
        is_long = self._refusals[stream, durable] >= MAX_SILENT_REFUSALS
        if is_long and not self.is_open and not subjects.tenant_of_queue(stream):
            self._began_s = time.monotonic()
            _log.warning("queue_refused", stream=stream, consumer=durable, status=status)
        self._on_refused()

    def add_answer(self, stream: str, durable: str) -> None:
        """Record that the broker has answered a pull from a queue."""
        self.forget(stream, durable)
        refused = (name for name, _ in self._refusals if not subjects.tenant_of_queue(name))
        if self._began_s is not None and not any(refused):
            seconds = round(time.monotonic() - self._began_s, 1)
            self._began_s = None
            _log.info("queues_answer", stream=stream, consumer=durable, after_s=seconds)

    def forget(self, stream: str, durable: str) -> None:
        """Forget the refusals of a queue."""
        del self._refusals[stream, durable]
