"""Every metric: its name, kind and meaning. Names and meanings are the field's usual ones.

All have the labels `model`, `role` and `worker` where these make sense. Times from a request's
acceptance are by the broker's clock, so that machines' clocks do not matter.
"""

from dataclasses import dataclass
from typing import Literal

PREFIX = "pagemill_"
OWN_LABELS = ("model", "role", "worker")

# Seconds of what takes milliseconds, and of what may take minutes.
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
class Description:
    name: str
    """Without the prefix; that of a counter ends in `_total`."""
    kind: Literal["counter", "gauge", "histogram"]
    where: str
    """Who tells it."""
    meaning: str
    """With the unit."""
    labels: tuple[str, ...] = ()
    """Beside model, role and worker."""
    bounds: tuple[float, ...] = ()


ENGINE, RENDERER, ENCODER, COORDINATOR = "engine", "renderer", "encoder", "coordinator"
GATEWAY = "gateway"
STAGE, EVERY, BROKER = "every role", "every worker", "the broker"

_ALL = (
    # -- engine -------------------------------------------------------------------------------
    Description(
        "time_to_first_token_seconds",
        "histogram",
        ENGINE,
        "From a request's acceptance to its first token, in seconds: what its client waits, less"
        " the way there and back. Not of requests that were resumed here.",
        bounds=LONG_S,
    ),
    Description(
        "engine_time_to_first_token_seconds",
        "histogram",
        ENGINE,
        "From a request's arrival at the engine to its first token, in seconds.",
        bounds=LONG_S,
    ),
    Description(
        "inter_token_latency_seconds",
        "histogram",
        ENGINE,
        "Between two tokens of one answer, in seconds; one observation for each token but the"
        " first.",
        bounds=SHORT_S,
    ),
    Description(
        "e2e_request_latency_seconds",
        "histogram",
        ENGINE,
        "From a request's acceptance to the last record of its answer, in seconds; of answers that"
        " ended well.",
        bounds=LONG_S,
    ),
    Description(
        "request_queue_time_seconds",
        "histogram",
        ENGINE,
        "From a request's acceptance to its first step, in seconds: rendering and every queue.",
        bounds=LONG_S,
    ),
    Description(
        "engine_queue_time_seconds",
        "histogram",
        ENGINE,
        "From a request's arrival at the engine to its first step, in seconds.",
        bounds=LONG_S,
    ),
    Description(
        "prompt_tokens_total",
        "counter",
        ENGINE,
        "Tokens of prompts that have been prefilled, those from the prefix cache included.",
    ),
    Description("generation_tokens_total", "counter", ENGINE, "Tokens that have been sampled."),
    Description(
        "iteration_tokens_total",
        "histogram",
        ENGINE,
        "Tokens that went through the model in one step.",
        bounds=SIZES,
    ),
    Description("num_requests_running", "gauge", ENGINE, "Sequences that hold KV blocks."),
    Description("num_requests_waiting", "gauge", ENGINE, "Sequences that wait for their turn."),
    Description(
        "kv_cache_usage_perc",
        "gauge",
        ENGINE,
        "Share of the KV blocks that sequences hold, 0 to 1; what is only cached counts as free.",
    ),
    Description(
        "kv_waste",
        "gauge",
        ENGINE,
        "Share of the slots in held KV blocks that had no token, over all steps so far, 0 to 1.",
    ),
    Description(
        "num_preemptions_total",
        "counter",
        ENGINE,
        "Times that a sequence lost its blocks to an older one, to be computed again.",
    ),
    Description(
        "prefix_cache_queries_total", "counter", ENGINE, "Tokens looked up in the prefix cache."
    ),
    Description("prefix_cache_hits_total", "counter", ENGINE, "Tokens found in the prefix cache."),
    Description(
        "prefix_cache_evictions_total",
        "counter",
        ENGINE,
        "Cached KV blocks that were needed for something else.",
    ),
    Description(
        "spec_decode_num_draft_tokens_total",
        "counter",
        ENGINE,
        "Drafts of tokens that went through the model (`engine.speculative`).",
    ),
    Description(
        "spec_decode_num_accepted_tokens_total",
        "counter",
        ENGINE,
        "Those of them that have become part of an answer.",
    ),
    Description(
        "request_success_total",
        "counter",
        ENGINE,
        "Answers that ended well, by what ended the choice that ended last: `stop` or `length`.",
        ("finished_reason",),
    ),
    # -- pictures -----------------------------------------------------------------------------
    Description(
        "mm_cache_queries_total",
        "counter",
        f"{RENDERER}, {ENGINE}",
        "Pictures looked up: by a renderer among those that were processed before, by an engine"
        " with a tower among those that it has embeddings of.",
    ),
    Description(
        "mm_cache_hits_total", "counter", f"{RENDERER}, {ENGINE}", "Pictures that were found there."
    ),
    Description(
        "encoded_items_total",
        "counter",
        f"{ENCODER}, {ENGINE}",
        "Pictures that have gone through the tower.",
    ),
    Description(
        "encoder_found_items_total",
        "counter",
        ENCODER,
        "Pictures asked for whose embeddings were there already.",
    ),
    Description(
        "encoder_batch_items",
        "histogram",
        ENCODER,
        "Pictures that went through the tower at once.",
        bounds=SIZES,
    ),
    Description(
        "encoder_waiting_items", "gauge", ENCODER, "Pictures that wait for the tower in a worker."
    ),
    # -- renderer and coordinator -------------------------------------------------------------
    Description("rendered_requests_total", "counter", RENDERER, "Requests handed to engines."),
    Description(
        "render_seconds",
        "histogram",
        RENDERER,
        "From a task's arrival to its rendered prompt, in seconds; fetching pictures included.",
        bounds=LONG_S,
    ),
    Description(
        "requests_accepted_total",
        "counter",
        COORDINATOR,
        "Requests found valid and handed to renderers.",
    ),
    # -- gateway ------------------------------------------------------------------------------
    Description(
        "http_requests_total",
        "counter",
        GATEWAY,
        "HTTP requests that have ended, by route (`none` where there is none) and status.",
        ("endpoint", "status"),
    ),
    Description("http_requests_in_flight", "gauge", GATEWAY, "HTTP requests that have not ended."),
    Description(
        "http_request_seconds",
        "histogram",
        GATEWAY,
        "From an HTTP request's headers to the end of its answer, in seconds.",
        ("endpoint",),
        LONG_S,
    ),
    Description(
        "http_time_to_first_token_seconds",
        "histogram",
        GATEWAY,
        "From an HTTP request's headers to the first tokens of its answer, in seconds.",
        ("endpoint",),
        LONG_S,
    ),
    Description(
        "http_tokens_total",
        "counter",
        GATEWAY,
        "Tokens in answers, as far as they were read here.",
        ("endpoint",),
    ),
    Description(
        "http_answer_bytes_total",
        "counter",
        GATEWAY,
        "Bytes of answers' bodies.",
        ("endpoint",),
    ),
    Description(
        "http_connections_refused_total",
        "counter",
        GATEWAY,
        "Connections over `gateway.max_connections`.",
    ),
    Description(
        "http_slow_clients_total",
        "counter",
        GATEWAY,
        "Connections closed because nothing they were sent was taken in `gateway.send_timeout_s`.",
    ),
    # -- every stage --------------------------------------------------------------------------
    Description(
        "request_errors_total",
        "counter",
        STAGE,
        "Requests that this worker has ended with an error, by its code: those that a coordinator"
        " refuses, ends at their deadline or cancels, and those that are given up.",
        ("code",),
    ),
    Description(
        "stage_queue_seconds",
        "histogram",
        STAGE,
        "How long a message lay in the role's queue before its first delivery, in seconds.",
        bounds=LONG_S,
    ),
    Description(
        "stage_handling_seconds",
        "histogram",
        STAGE,
        "From a message's delivery to its acknowledgement, in seconds.",
        bounds=LONG_S,
    ),
    Description(
        "stage_redeliveries_total",
        "counter",
        STAGE,
        "Messages that came a second time or more, after a worker had failed, died or given them"
        " back.",
    ),
    Description(
        "stage_retries_total",
        "counter",
        STAGE,
        "Messages given back to be tried again, by the code of the error.",
        ("code",),
    ),
    Description(
        "stage_dead_letters_total",
        "counter",
        STAGE,
        "Dead letters written, by the code of the error.",
        ("code",),
    ),
    Description(
        "start_time_seconds", "gauge", EVERY, "When the worker started: Unix time, broker's clock."
    ),
    Description("info", "gauge", EVERY, "Always 1.", ("version",)),
    # -- told by `pagemill metrics` -----------------------------------------------------------
    Description(
        "up",
        "gauge",
        "`pagemill metrics`",
        "1 for a worker that has answered, 0 for one that has a heartbeat and has not.",
    ),
    Description("queue_pending", "gauge", BROKER, "Messages that nobody has taken.", ("lane",)),
    Description(
        "queue_ack_pending", "gauge", BROKER, "Messages in workers' hands, or put off.", ("lane",)
    ),
    Description(
        "queue_oldest_age_seconds",
        "gauge",
        BROKER,
        "Age of the oldest message that nobody has taken, in seconds; 0 where there is none. Not"
        " told of requests that wait for a coordinator.",
        ("lane",),
    ),
    Description(
        "requests_in_flight",
        "gauge",
        BROKER,
        "Requests stored that have not ended.",
    ),
    Description(
        "oldest_request_age_seconds",
        "gauge",
        BROKER,
        "Age of the oldest of these, in seconds; 0 where there is none.",
    ),
    Description("dead_letters", "gauge", BROKER, "Dead letters kept."),
    Description(
        "broker_up",
        "gauge",
        "`pagemill metrics`",
        "1 if the broker has answered; without it nothing else is told.",
    ),
)

METRICS = {description.name: description for description in _ALL}
