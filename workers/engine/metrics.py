"""Engine metrics: token counts and latencies per step, and the timing of each request."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from shared.bus.priorities import load_of
from shared.protocol.messages import PROMPT_SPEED
from shared.protocol.records import AnyRecord, TokenChunk
from shared.telemetry.metrics import Metrics
from workers.engine.core.engine_stats import EngineStats
from workers.engine.core.sequence import RequestOutput


@dataclass(slots=True)
class RequestTiming:
    """Times of a running request: `_ms` by the broker's clock, `_s` by the monotonic clock."""

    accepted_ms: float
    arrived_ms: float
    num_prompt_tokens: int
    resumed: bool
    """True if an earlier attempt has sent the client its first tokens."""
    finished_reason: str = ""
    """Finish reason of the choice that ended last."""
    prefilled: bool = False
    num_generated: int = 0
    """Tokens that this attempt has sampled, in all choices."""
    last_token_s: dict[int, float] = field(default_factory=dict)
    """Time of the last token of each choice."""

    @classmethod
    def of(
        cls,
        accepted_ms: float,
        arrived_ms: float,
        num_prompt_tokens: int,
        records: Sequence[AnyRecord],
    ) -> "RequestTiming":
        """Return the timing of a request; `records` were in its log when it arrived."""
        timing = cls(accepted_ms, arrived_ms, num_prompt_tokens, bool(records))
        for record in records:
            for delta in record.choices if isinstance(record, TokenChunk) else ():
                timing.finished_reason = delta.finish_reason or timing.finished_reason
        return timing


class EngineMetrics:
    """Records the metrics, at a cost of a few additions per step and two lookups per token."""

    def __init__(
        self,
        metrics: Metrics,
        stats: EngineStats,
        at_ms: Callable[[float], float],
        *,
        counts_requests: bool = True,
    ) -> None:
        """`at_ms` converts seconds of the monotonic clock to milliseconds of the broker's clock.

        `counts_requests` is false for a stage that does not answer requests: another stage records
        their times and ends.
        """
        self._counts_requests = counts_requests
        self._metrics = metrics
        self._stats = stats
        self._at_ms = at_ms
        self._prompt_tokens = metrics.counter("prompt_tokens_total")
        self._generation_tokens = metrics.counter("generation_tokens_total")
        self._iteration_tokens = metrics.histogram("iteration_tokens_total")
        self._step_seconds = metrics.counter("engine_step_seconds_total")
        self._inter_token = metrics.histogram("inter_token_latency_seconds")
        self._first_token = metrics.histogram("time_to_first_token_seconds")
        self._engine_first_token = metrics.histogram("engine_time_to_first_token_seconds")
        self._queue_time = metrics.histogram("request_queue_time_seconds")
        self._engine_queue_time = metrics.histogram("engine_queue_time_seconds")
        self._latency = metrics.histogram("e2e_request_latency_seconds")
        for reason in ("stop", "length"):
            metrics.counter("request_success_total", finished_reason=reason)
        for name, read in (
            ("num_requests_running", lambda: self._stats.num_running),
            ("num_requests_waiting", lambda: self._stats.num_waiting),
            ("num_requests_without_input", lambda: self._stats.num_without_input),
            (
                "kv_cache_usage_perc",
                lambda: 1 - self._stats.num_free_blocks / self._stats.num_blocks,
            ),
            ("kv_waste", lambda: self._stats.kv_waste),
            ("num_preemptions_total", lambda: self._stats.num_preemptions),
            ("spec_decode_num_draft_tokens_total", lambda: self._stats.num_draft_tokens),
            ("spec_decode_num_accepted_tokens_total", lambda: self._stats.num_accepted_tokens),
            ("prefix_cache_queries_total", lambda: self._stats.prefix_query_tokens),
            ("prefix_cache_hits_total", lambda: self._stats.prefix_hit_tokens),
            ("prefix_cache_evictions_total", lambda: self._stats.prefix_evictions),
            ("mm_cache_queries_total", lambda: self._stats.mm_cache_queries),
            ("mm_cache_hits_total", lambda: self._stats.mm_cache_hits),
            ("encoded_items_total", lambda: self._stats.encoded_items),
        ):
            metrics.set_function(name, read)
        for action in stats.memory_shortages:
            metrics.set_function(
                "engine_memory_shortages_total",
                partial(self._count_shortages, action),
                action=action,
            )

    def _count_shortages(self, action: str) -> int:
        return self._stats.memory_shortages[action]

    def on_step(
        self,
        first_scheduled: Iterable[RequestTiming],
        outputs: Iterable[tuple[RequestTiming, RequestOutput]],
        stats: EngineStats,
        began_s: float,
        ended_s: float,
    ) -> None:
        """Record a report of the step thread. Reports come in order; some come without a step."""
        if stats.num_steps > self._stats.num_steps:
            num_tokens = stats.num_batched_tokens - self._stats.num_batched_tokens
            self._iteration_tokens.observe(num_tokens)
            self._step_seconds.add(ended_s - began_s)
        self._stats = stats
        for timing in first_scheduled:
            began_ms = self._at_ms(began_s)
            self._queue_time.observe(_seconds_between(timing.accepted_ms, began_ms))
            self._engine_queue_time.observe(_seconds_between(timing.arrived_ms, began_ms))
        self._count_tokens(outputs, ended_s)

    def _count_tokens(
        self, outputs: Iterable[tuple[RequestTiming, RequestOutput]], ended_s: float
    ) -> None:
        num_tokens = 0
        # Grouped by gap, because most tokens of a step had their predecessor in the same step.
        gaps: dict[float, int] = {}
        for timing, output in outputs:
            if output.embedding:
                self._prompt_tokens.add(timing.num_prompt_tokens)
                timing.finished_reason = "stop"
            for delta in output.choices:
                if not (num_new := len(delta.token_ids)):
                    continue
                num_tokens += num_new
                timing.num_generated += num_new
                last_s = timing.last_token_s.get(delta.index)
                timing.last_token_s[delta.index] = ended_s
                if last_s is not None:
                    gap_s = (ended_s - last_s) / num_new
                    gaps[gap_s] = gaps.get(gap_s, 0) + num_new
                elif not timing.prefilled:
                    self._record_first_token(timing, ended_s)
                if delta.finish_reason is not None:
                    timing.finished_reason = delta.finish_reason
        self._generation_tokens.add(num_tokens)
        for gap_s, count in gaps.items():
            self._inter_token.observe(gap_s, count)

    def _record_first_token(self, timing: RequestTiming, ended_s: float) -> None:
        timing.prefilled = True
        self._prompt_tokens.add(timing.num_prompt_tokens)
        if self._counts_requests and not timing.resumed:
            first_ms = self._at_ms(ended_s)
            self._first_token.observe(_seconds_between(timing.accepted_ms, first_ms))
            self._engine_first_token.observe(_seconds_between(timing.arrived_ms, first_ms))

    def on_finished(self, timing: RequestTiming, ended_ms: float) -> None:
        """Record a request whose final log record is stored and reports success."""
        if not self._counts_requests:
            return
        self._metrics.counter("request_success_total", finished_reason=timing.finished_reason).add()
        self._latency.observe(_seconds_between(timing.accepted_ms, ended_ms))


def pull_load(
    stats: EngineStats, used: float, num_ahead: int, num_begun: int, step_tokens: int
) -> float:
    """Return the load of an engine.

    `used` is the occupied fraction of its places, `num_ahead` the number of waiting prompt tokens,
    and `num_begun` the number of requests that have begun here.
    """
    num_hits = stats.prefix_hit_tokens
    miss_rate = 1 - num_hits / max(1, stats.prefix_query_tokens)
    # Counts one earlier request with a whole step of cached tokens, so that slots begin well.
    num_saved = num_hits + step_tokens
    return load_of(used, num_ahead * miss_rate, num_saved / (1 + num_begun))


def heartbeat_figures(stats: EngineStats) -> dict[str, float]:
    """Return the figures of an engine's steps for its heartbeat."""
    return {
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "without_input": stats.num_without_input,
        "free_blocks": stats.num_free_blocks,
        "blocks": stats.num_blocks,
        "prefix_query_tokens": stats.prefix_query_tokens,
        "prefix_hit_tokens": stats.prefix_hit_tokens,
        "prefix_evictions": stats.prefix_evictions,
        "preemptions": stats.num_preemptions,
        "kv_waste": round(stats.kv_waste, 4),
        "encoded_items": stats.encoded_items,
        PROMPT_SPEED: round(stats.prompt_tokens_per_s, 1),
    }


def _seconds_between(since_ms: float, until_ms: float) -> float:
    """Return the time between two events, at least 0: clocks may differ by a millisecond."""
    return max(0.0, until_ms - since_ms) / 1000
