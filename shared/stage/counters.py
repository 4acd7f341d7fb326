"""Metrics that every stage counts of its jobs."""

from shared.bus.bus import Bus
from shared.errors import PagemillError
from shared.protocol import subjects
from shared.stage.job import Job
from shared.telemetry.metrics import Metrics


class StageCounters:
    """Counts the arrivals, retries and ends of one worker's jobs."""

    def __init__(self, bus: Bus, metrics: Metrics) -> None:
        self._bus = bus
        self._metrics = metrics

    def arrived(self, job: Job) -> None:
        metrics = self._metrics_of(job)
        if job.delivery.attempt > 1:
            metrics.counter("stage_redeliveries_total").add()
        else:
            waited_s = max(0.0, job.received_ms - job.delivery.stored_ms) / 1000
            metrics.histogram("stage_queue_seconds").observe(waited_s)

    def handled(self, job: Job) -> None:
        took_s = (self._bus.now_ms() - job.received_ms) / 1000
        self._metrics_of(job).histogram("stage_handling_seconds").observe(took_s)

    def retried(self, job: Job, cause: PagemillError) -> None:
        self._metrics_of(job).counter("stage_retries_total", code=cause.code).add()

    def given_up(self, job: Job, cause: PagemillError) -> None:
        self._metrics_of(job).counter("stage_dead_letters_total", code=cause.code).add()

    def ended_with(self, cause: PagemillError) -> None:
        """Count a request that this worker has ended with an error."""
        self._metrics.counter("request_errors_total", code=cause.code).add()

    def _metrics_of(self, job: Job) -> Metrics:
        return self._metrics.of(subjects.model_of_stage(job.delivery.subject))
