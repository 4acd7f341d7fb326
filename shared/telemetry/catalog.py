"""Catalog of all metrics: names, kinds and descriptions. Names follow vLLM where it has the metric.

All metrics have the labels `model`, `role` and `worker` where these apply. Times since a request's
acceptance use the broker's clock, because the clocks of machines may differ.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

PREFIX = "pagemill_"
OWN_LABELS = ("model", "role", "worker")

# Histogram bounds in seconds: for times of milliseconds, and for times of up to minutes.
SHORT_S = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075,
    0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 40.0,
)  # fmt: skip
LONG_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5,
    2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
FACTORS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2.0, 4.0, 8.0)
SIZES = tuple(float(2**power) for power in range(15))

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """Name, kind, source and description of one metric."""

    name: str
    """Name without the prefix; a counter's name ends in `_total`."""
    kind: Kind
    source: str
    """Role that reports the metric."""
    description: str
    """Meaning and unit."""
    labels: tuple[str, ...] = ()
    """Labels besides model, role and worker."""
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""


ENGINE, RENDERER, ENCODER, COORDINATOR = "engine", "renderer", "encoder", "coordinator"
GENERATOR, GATEWAY, AUTOSCALER = "generator", "gateway", "autoscaler"
BATCHER = "batcher"
STAGE, EVERY, BROKER = "every role", "every worker", "the broker"

# Descriptions by name, with further labels in braces, grouped by kind, source and bounds.
_DESCRIPTIONS: dict[tuple[Kind, str, tuple[float, ...]], dict[str, str]] = {
    ("histogram", ENGINE, LONG_S): {
        "time_to_first_token_seconds": (
            "Time from a request's acceptance to its first token, in seconds, without the network"
            " time of its client. Requests that were resumed by this engine are not counted."
        ),
        "engine_time_to_first_token_seconds": (
            "Time from a request's arrival at the engine to its first token, in seconds."
        ),
        "e2e_request_latency_seconds": (
            "Time from a request's acceptance to the last record of its answer, in seconds;"
            " successful answers only."
        ),
        "request_queue_time_seconds": (
            "Time from a request's acceptance to its first step, in seconds: rendering and all"
            " queues."
        ),
        "engine_queue_time_seconds": (
            "Time from a request's arrival at the engine to its first step, in seconds."
        ),
    },
    ("histogram", ENGINE, SHORT_S): {
        "inter_token_latency_seconds": (
            "Time between two tokens of one answer, in seconds; one observation per token except"
            " the first."
        ),
    },
    ("counter", ENGINE, ()): {
        "prompt_tokens_total": "Prefilled prompt tokens, including those from the prefix cache.",
        "generation_tokens_total": "Sampled tokens.",
        "engine_step_seconds_total": (
            "Time of steps, in seconds. Its rate is the share of time in which the engine computed;"
            " the rest is idle."
        ),
        "engine_device_seconds_total": (
            "Time in which forward passes and sampling ran on the device, in seconds. 1 less its"
            " rate is the idle share of the device."
        ),
        "engine_wait_seconds_total": (
            "Time in which steps waited for the device, in seconds. The rest of"
            " `engine_step_seconds_total` is work of the host."
        ),
        "engine_memory_shortages_total{action}": (
            "Steps for which the device had too little memory, by the reaction: `retry` as it was,"
            " `cut` prompts, `preempt` a sequence, or `fail` a request that was alone."
        ),
        "num_preemptions_total": (
            "Preemptions: a sequence lost its blocks to an older one and is recomputed."
        ),
        "prefix_cache_queries_total": "Tokens looked up in the prefix cache.",
        "prefix_cache_hits_total": "Tokens found in the prefix cache.",
        "prefix_cache_evictions_total": "Cached KV blocks that were evicted.",
        "spec_decode_num_draft_tokens_total": (
            "Drafted tokens that the model has checked (`engine.speculative`)."
        ),
        "spec_decode_num_accepted_tokens_total": "Drafted tokens that were accepted.",
        "request_success_total{finished_reason}": (
            "Successful answers, by the finish reason of their last choice: `stop` or `length`."
        ),
        "gpu_steps_total{kind}": (
            "Steps on a GPU: `graph` for decodes that were replayed as CUDA graphs, `eager` for all"
            " other steps."
        ),
        "gpu_graph_rows_total{kind}": (
            "Rows of the CUDA graphs that were replayed: `sequence`, or `padding` up to the size of"
            " the recorded graph."
        ),
        "gpu_kernels_loaded_total{source}": (
            "Kernels that were loaded after the start was complete, which delays a step: from the"
            " `compiler` in seconds, from the `cache` on disk in milliseconds."
        ),
    },
    ("histogram", ENGINE, SIZES): {
        "iteration_tokens_total": "Tokens in one model step.",
    },
    ("gauge", ENGINE, ()): {
        "num_requests_running": "Sequences that hold KV blocks.",
        "num_requests_waiting": "Sequences that wait to be scheduled.",
        "num_requests_without_input": "Running sequences that wait for more of the text that they"
        " speak, or for an item in the tower thread.",
        "num_ranks": "Processes that share the model of the engine (`engine.tensor_parallel`).",
        "kv_cache_usage_perc": (
            "Fraction of the KV blocks held by sequences, 0 to 1; cached blocks without a sequence"
            " are free."
        ),
        "kv_waste": (
            "Fraction of the slots in held KV blocks without a token, over all steps so far, 0 to"
            " 1."
        ),
    },
    ("counter", f"{RENDERER}, {ENGINE}", ()): {
        "mm_cache_queries_total": (
            "Media cache lookups: for processed media in a renderer, for embeddings in an engine"
            " with a tower."
        ),
        "mm_cache_hits_total": "Media cache hits.",
    },
    ("counter", f"{ENCODER}, {ENGINE}", ()): {
        "encoded_items_total": "Items encoded by the tower.",
    },
    ("counter", f"{ENCODER}, {GENERATOR}", ()): {
        "batch_memory_shortages_total{action}": (
            "Batches for which the device had too little memory, by the reaction: `split` into"
            " single items, or `fail` the request of a single one."
        ),
    },
    ("counter", ENCODER, ()): {
        "encoder_found_items_total": "Requested items with embeddings that were already stored.",
    },
    ("histogram", ENCODER, SIZES): {
        "encoder_batch_items": "Items in one batch of the tower.",
    },
    ("gauge", ENCODER, ()): {
        "encoder_waiting_items": "Images that wait for the vision tower.",
    },
    ("histogram", GENERATOR, LONG_S): {
        "time_to_first_audio_seconds": (
            "Time from a request's acceptance to its first samples, in seconds."
        ),
    },
    ("histogram", GENERATOR, FACTORS): {
        "audio_realtime_factor": (
            "Time from a speech's first task to its last samples, divided by the length of its"
            " sound: below 1, it is computed faster than it is played. Speeches that were resumed"
            " by this generator are not counted."
        ),
    },
    ("histogram", GENERATOR, SIZES): {
        "generator_batch_size": "Chunks of sound, or steps or texts of images, in one batch.",
    },
    ("counter", GENERATOR, ()): {
        "image_steps_total": "Computed denoising steps of all images.",
        "image_cache_hits_total": "Requests answered with the images of an earlier equal request.",
        "audio_seconds_total": "Length of the computed sound, in seconds.",
        "audio_gap_seconds_total": (
            "Time in which clients had played all available sound of an unfinished speech, in"
            " seconds."
        ),
    },
    ("gauge", GENERATOR, ()): {
        "generator_waiting_units": "Chunks of sound, steps and texts that wait for a batch.",
    },
    ("counter", RENDERER, ()): {
        "rendered_requests_total": "Requests forwarded to engines.",
    },
    ("histogram", RENDERER, LONG_S): {
        "render_seconds": (
            "Time from a task's arrival to its rendered prompt, in seconds, including"
            " fetches of media."
        ),
    },
    ("gauge", COORDINATOR, ()): {
        "streams_refusing": (
            "Streams on disk that have refused to store for longer than an election takes."
        ),
        "replicas_lagging{server}": (
            "Replicas of streams on a server of the broker's cluster that do not follow their"
            " leaders; not reported for a server before its first one."
        ),
        "refused_stages": (
            "Stages of models whose workers all refuse their configuration or model, so that"
            " requests end with `unavailable` and the reason."
        ),
        "full_stores": (
            "Stores of the broker with less free space than `nats.min_free_percent` or"
            " `nats.min_free_mib` requires. New requests, files and responses are refused."
        ),
    },
    ("counter", COORDINATOR, ()): {
        "requests_accepted_total": "Valid requests forwarded to renderers.",
        "trace_spans_exported_total": "Spans that the collector of `tracing.otlp_url` accepted.",
        "trace_spans_dropped_total": (
            "Spans that were dropped, because the collector did not accept them or too many waited."
        ),
    },
    ("counter", GATEWAY, ()): {
        "http_requests_total{endpoint,status}": (
            "HTTP requests that have ended, by route (`none` without one) and status."
        ),
        "http_tokens_total{endpoint}": "Tokens in responses, as far as the gateway has read them.",
        "http_answer_bytes_total{endpoint}": "Bytes of response bodies.",
        "http_connections_refused_total": "Connections refused beyond `gateway.max_connections`.",
        "http_connections_displaced_total": (
            "Connections closed to make room for new ones, at `gateway.max_connections`."
        ),
        "http_slow_clients_total": (
            "Connections closed because the client read nothing for `gateway.send_timeout_s`."
        ),
    },
    ("gauge", GATEWAY, ()): {
        "http_requests_in_flight": "HTTP requests that have not ended.",
    },
    ("histogram", GATEWAY, LONG_S): {
        "http_request_seconds{endpoint}": (
            "Time from an HTTP request's headers to the end of its response, in seconds."
        ),
        "http_time_to_first_token_seconds{endpoint}": (
            "Time from an HTTP request's headers to the first tokens of its response, in seconds."
        ),
        "http_time_to_first_audio_seconds{endpoint}": (
            "Time from an HTTP request's headers to the first samples of its speech, in seconds."
        ),
    },
    ("counter", BATCHER, ()): {
        "batch_lines_total{outcome}": (
            "Lines of batches with a stored result: `answered` in the output file, `refused` in the"
            " error file."
        ),
        "batch_line_retries_total": (
            "Further attempts at lines, after a failure with a passing reason."
        ),
        "batches_ended_total{status}": (
            "Batches that this worker has ended, by status: `completed`, `failed`, `expired` or"
            " `cancelled`."
        ),
    },
    ("gauge", BATCHER, ()): {
        "batch_lines_unfinished{state}": (
            "Lines without a stored result, of the batches that this worker runs: `waiting`,"
            " `in_flight`, or `unwritten` if the result is not stored yet."
        ),
        "batches_paused{reason}": (
            "Batches that wait until the broker has room for their results or further lines, by the"
            " code of the error."
        ),
        "batches_late": (
            "Batches that will not end within their windows at the pace of the last ten minutes."
        ),
    },
    ("gauge", AUTOSCALER, ()): {
        "scale_wanted{pool}": (
            "Target number of the pool's workers; autoscalers that do not lead report 0."
        ),
        "scale_running{pool}": "Workers of the pool that are ready and do not drain.",
        "scale_starting{pool}": "Workers of the pool that are not ready yet.",
    },
    ("counter", AUTOSCALER, ()): {
        "scale_decisions_total{pool,reason}": (
            "Changes of a pool's target, by the rule that has decided them."
        ),
    },
    ("histogram", AUTOSCALER, LONG_S): {
        "scale_cold_start_seconds{pool}": (
            "Time from the request for a worker to its first heartbeat, in seconds."
        ),
    },
    ("counter", STAGE, ()): {
        "request_errors_total{code}": (
            "Requests that this worker has ended with an error, by code: requests that a"
            " coordinator refuses, cancels or ends at their deadline, and requests without further"
            " attempts."
        ),
        "stage_redeliveries_total": (
            "Messages that were redelivered, because a worker has failed, died or requeued them."
        ),
        "stage_retries_total{code}": "Messages requeued for another attempt, by error code.",
        "stage_dead_letters_total{code}": "Dead letters written, by error code.",
    },
    ("histogram", STAGE, LONG_S): {
        "stage_queue_seconds": (
            "Time that a message waits in the role's queue before its first delivery, in seconds."
        ),
        "stage_handling_seconds": (
            "Time from a message's delivery to its acknowledgement, in seconds."
        ),
    },
    ("gauge", EVERY, ()): {
        "start_time_seconds": "Start of the worker: Unix time of the broker's clock.",
        "info{version,stage}": (
            "Always 1. The stage of a worker may have another name than its role; the label"
            " `worker` joins it with other metrics."
        ),
    },
    ("gauge", "workers on GPUs", ()): {
        "gpu_memory_used_bytes{gpu}": (
            "Memory in use on the worker's GPU, by all programs. The label `gpu` is its UUID."
        ),
        "gpu_memory_total_bytes{gpu}": "Memory of the worker's GPU.",
        "gpu_utilization{gpu}": (
            "Share of the last second in which the worker's GPU computed, 0 to 1. Instances of MIG"
            " do not report it, the power or the throttling."
        ),
        "gpu_power_watts{gpu}": "Power of the worker's GPU.",
        "gpu_throttled{gpu}": (
            "1 while power, heat or the hardware keeps the clock of the worker's GPU down, else 0."
        ),
    },
    ("counter", "workers on GPUs", ()): {
        "gpu_memory_errors_total{gpu}": (
            "Errors in the memory of the worker's GPU that its hardware could not correct, since"
            " the driver was loaded. GPUs without such a check do not report it."
        ),
    },
    ("gauge", "`pagemill metrics`", ()): {
        "up": "1 for a worker that has replied, 0 for one with a heartbeat but without a reply.",
        "broker_up": "1 if the broker has replied; otherwise no other metric is reported.",
    },
    ("gauge", BROKER, ()): {
        "queue_pending{lane}": "Messages that wait for a worker.",
        "queue_ack_pending{lane}": "Messages in flight, or delayed for a retry.",
        "queue_oldest_age_seconds{lane}": (
            "Age of the oldest message that waits for a worker, in seconds; 0 without one. Not"
            " reported for requests that wait for a coordinator."
        ),
        "requests_in_flight": "Stored requests that have not ended.",
        "shared_requests_in_flight": (
            "Stored requests of gateways, agents and clients without a tenant's key, which share"
            " the limit `delivery.max_queued`."
        ),
        "oldest_request_age_seconds": (
            "Age of the oldest request in flight, in seconds; 0 without one."
        ),
        "batches_unfinished": "Batches that have not ended.",
        "oldest_batch_age_seconds": (
            "Age of the oldest batch that has not ended, in seconds; 0 without one."
        ),
        "dead_letters": "Stored dead letters.",
    },
}


def _parse_specs() -> Iterator[MetricSpec]:
    for (kind, source, bounds), group in _DESCRIPTIONS.items():
        for key, description in group.items():
            name, _, labels = key.rstrip("}").partition("{")
            yield MetricSpec(
                name, kind, source, description, tuple(filter(None, labels.split(","))), bounds
            )


METRICS = {spec.name: spec for spec in _parse_specs()}
