"""Catalog of all metrics: names, kinds and descriptions. Names follow vLLM where it has the metric.

All metrics have the labels `model`, `role` and `worker` where these apply. Times since a request's
acceptance use the broker's clock, so that clocks of machines do not matter.
"""

from dataclasses import dataclass
from typing import Literal

PREFIX = "pagemill_"
OWN_LABELS = ("model", "role", "worker")

# Histogram bounds in seconds: for times of milliseconds, and for times of up to minutes.
SHORT_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 40.0),
)
LONG_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
SIZES = tuple(float(2**power) for power in range(15))


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """Name, kind, source and description of one metric."""

    name: str
    """Name without the prefix; a counter's name ends in `_total`."""
    kind: Literal["counter", "gauge", "histogram"]
    source: str
    """Role that reports it."""
    description: str
    """Meaning and unit."""
    labels: tuple[str, ...] = ()
    """Labels besides model, role and worker."""
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""


ENGINE, RENDERER, ENCODER, COORDINATOR = "engine", "renderer", "encoder", "coordinator"
GATEWAY = "gateway"
STAGE, EVERY, BROKER = "every role", "every worker", "the broker"

_ALL = (
    # -- engine -------------------------------------------------------------------------------
    MetricSpec(
        "time_to_first_token_seconds",
        "histogram",
        ENGINE,
        "Time from a request's acceptance to its first token, in seconds, without the network time"
        " of its client. Requests that were resumed by this engine are not counted.",
        bounds=LONG_S,
    ),
    MetricSpec(
        "engine_time_to_first_token_seconds",
        "histogram",
        ENGINE,
        "Time from a request's arrival at the engine to its first token, in seconds.",
        bounds=LONG_S,
    ),
    MetricSpec(
        "inter_token_latency_seconds",
        "histogram",
        ENGINE,
        "Time between two tokens of one answer, in seconds; one observation per token except the"
        " first.",
        bounds=SHORT_S,
    ),
    MetricSpec(
        "e2e_request_latency_seconds",
        "histogram",
        ENGINE,
        "Time from a request's acceptance to the last record of its answer, in seconds; successful"
        " answers only.",
        bounds=LONG_S,
    ),
    MetricSpec(
        "request_queue_time_seconds",
        "histogram",
        ENGINE,
        "Time from a request's acceptance to its first step, in seconds: rendering and all queues.",
        bounds=LONG_S,
    ),
    MetricSpec(
        "engine_queue_time_seconds",
        "histogram",
        ENGINE,
        "Time from a request's arrival at the engine to its first step, in seconds.",
        bounds=LONG_S,
    ),
    MetricSpec(
        "prompt_tokens_total",
        "counter",
        ENGINE,
        "Prefilled prompt tokens, including those from the prefix cache.",
    ),
    MetricSpec("generation_tokens_total", "counter", ENGINE, "Sampled tokens."),
    MetricSpec(
        "iteration_tokens_total",
        "histogram",
        ENGINE,
        "Tokens in one model step.",
        bounds=SIZES,
    ),
    MetricSpec("num_requests_running", "gauge", ENGINE, "Sequences that hold KV blocks."),
    MetricSpec("num_requests_waiting", "gauge", ENGINE, "Sequences that wait to be scheduled."),
    MetricSpec(
        "kv_cache_usage_perc",
        "gauge",
        ENGINE,
        "Fraction of the KV blocks held by sequences, 0 to 1; cached blocks without a sequence are"
        " free.",
    ),
    MetricSpec(
        "kv_waste",
        "gauge",
        ENGINE,
        "Fraction of the slots in held KV blocks without a token, over all steps so far, 0 to 1.",
    ),
    MetricSpec(
        "num_preemptions_total",
        "counter",
        ENGINE,
        "Preemptions: a sequence lost its blocks to an older one and is recomputed.",
    ),
    MetricSpec(
        "prefix_cache_queries_total", "counter", ENGINE, "Tokens looked up in the prefix cache."
    ),
    MetricSpec("prefix_cache_hits_total", "counter", ENGINE, "Tokens found in the prefix cache."),
    MetricSpec(
        "prefix_cache_evictions_total",
        "counter",
        ENGINE,
        "Cached KV blocks that were evicted.",
    ),
    MetricSpec(
        "spec_decode_num_draft_tokens_total",
        "counter",
        ENGINE,
        "Drafted tokens that the model has checked (`engine.speculative`).",
    ),
    MetricSpec(
        "spec_decode_num_accepted_tokens_total",
        "counter",
        ENGINE,
        "Drafted tokens that were accepted.",
    ),
    MetricSpec(
        "request_success_total",
        "counter",
        ENGINE,
        "Successful answers, by the finish reason of their last choice: `stop` or `length`.",
        ("finished_reason",),
    ),
    # -- images -------------------------------------------------------------------------------
    MetricSpec(
        "mm_cache_queries_total",
        "counter",
        f"{RENDERER}, {ENGINE}",
        "Image cache lookups: for processed images in a renderer, for embeddings in an engine with"
        " a vision tower.",
    ),
    MetricSpec("mm_cache_hits_total", "counter", f"{RENDERER}, {ENGINE}", "Image cache hits."),
    MetricSpec(
        "encoded_items_total",
        "counter",
        f"{ENCODER}, {ENGINE}",
        "Images encoded by the vision tower.",
    ),
    MetricSpec(
        "encoder_found_items_total",
        "counter",
        ENCODER,
        "Requested images whose embeddings were already stored.",
    ),
    MetricSpec(
        "encoder_batch_items",
        "histogram",
        ENCODER,
        "Images in one batch of the vision tower.",
        bounds=SIZES,
    ),
    MetricSpec("encoder_waiting_items", "gauge", ENCODER, "Images that wait for the vision tower."),
    # -- renderer and coordinator -------------------------------------------------------------
    MetricSpec("rendered_requests_total", "counter", RENDERER, "Requests forwarded to engines."),
    MetricSpec(
        "render_seconds",
        "histogram",
        RENDERER,
        "Time from a task's arrival to its rendered prompt, in seconds, including image fetches.",
        bounds=LONG_S,
    ),
    MetricSpec(
        "requests_accepted_total",
        "counter",
        COORDINATOR,
        "Valid requests forwarded to renderers.",
    ),
    # -- gateway ------------------------------------------------------------------------------
    MetricSpec(
        "http_requests_total",
        "counter",
        GATEWAY,
        "HTTP requests that have ended, by route (`none` without one) and status.",
        ("endpoint", "status"),
    ),
    MetricSpec("http_requests_in_flight", "gauge", GATEWAY, "HTTP requests that have not ended."),
    MetricSpec(
        "http_request_seconds",
        "histogram",
        GATEWAY,
        "Time from an HTTP request's headers to the end of its response, in seconds.",
        ("endpoint",),
        LONG_S,
    ),
    MetricSpec(
        "http_time_to_first_token_seconds",
        "histogram",
        GATEWAY,
        "Time from an HTTP request's headers to the first tokens of its response, in seconds.",
        ("endpoint",),
        LONG_S,
    ),
    MetricSpec(
        "http_tokens_total",
        "counter",
        GATEWAY,
        "Tokens in responses, as far as the gateway has read them.",
        ("endpoint",),
    ),
    MetricSpec(
        "http_answer_bytes_total",
        "counter",
        GATEWAY,
        "Bytes of response bodies.",
        ("endpoint",),
    ),
    MetricSpec(
        "http_connections_refused_total",
        "counter",
        GATEWAY,
        "Connections refused beyond `gateway.max_connections`.",
    ),
    MetricSpec(
        "http_slow_clients_total",
        "counter",
        GATEWAY,
        "Connections closed because the client read nothing for `gateway.send_timeout_s`.",
    ),
    # -- every stage --------------------------------------------------------------------------
    MetricSpec(
        "request_errors_total",
        "counter",
        STAGE,
        "Requests that this worker has ended with an error, by code: requests that a coordinator"
        " refuses, ends at their deadline or cancels, and requests whose attempts are used up.",
        ("code",),
    ),
    MetricSpec(
        "stage_queue_seconds",
        "histogram",
        STAGE,
        "Time that a message waits in the role's queue before its first delivery, in seconds.",
        bounds=LONG_S,
    ),
    MetricSpec(
        "stage_handling_seconds",
        "histogram",
        STAGE,
        "Time from a message's delivery to its acknowledgement, in seconds.",
        bounds=LONG_S,
    ),
    MetricSpec(
        "stage_redeliveries_total",
        "counter",
        STAGE,
        "Redelivered messages, after a worker has failed, died or requeued them.",
    ),
    MetricSpec(
        "stage_retries_total",
        "counter",
        STAGE,
        "Messages requeued for another attempt, by error code.",
        ("code",),
    ),
    MetricSpec(
        "stage_dead_letters_total",
        "counter",
        STAGE,
        "Dead letters written, by error code.",
        ("code",),
    ),
    MetricSpec(
        "start_time_seconds",
        "gauge",
        EVERY,
        "Start of the worker: Unix time of the broker's clock.",
    ),
    MetricSpec("info", "gauge", EVERY, "Always 1.", ("version",)),
    # -- reported by `pagemill metrics` -------------------------------------------------------
    MetricSpec(
        "up",
        "gauge",
        "`pagemill metrics`",
        "1 for a worker that has replied, 0 for one with a heartbeat but without a reply.",
    ),
    MetricSpec("queue_pending", "gauge", BROKER, "Messages that wait for a worker.", ("lane",)),
    MetricSpec(
        "queue_ack_pending",
        "gauge",
        BROKER,
        "Messages in flight, or delayed for a retry.",
        ("lane",),
    ),
    MetricSpec(
        "queue_oldest_age_seconds",
        "gauge",
        BROKER,
        "Age of the oldest message that waits for a worker, in seconds; 0 without one. Not reported"
        " for requests that wait for a coordinator.",
        ("lane",),
    ),
    MetricSpec(
        "requests_in_flight",
        "gauge",
        BROKER,
        "Stored requests that have not ended.",
    ),
    MetricSpec(
        "oldest_request_age_seconds",
        "gauge",
        BROKER,
        "Age of the oldest request in flight, in seconds; 0 without one.",
    ),
    MetricSpec("dead_letters", "gauge", BROKER, "Stored dead letters."),
    MetricSpec(
        "broker_up",
        "gauge",
        "`pagemill metrics`",
        "1 if the broker has replied; otherwise no other metric is reported.",
    ),
)

METRICS = {description.name: description for description in _ALL}
