"""Names of all subjects, streams, buckets and consumers; no other module contains one.

`shared.protocol.names` defines valid parts of these names.
"""

import hashlib
import re
from typing import NamedTuple

from shared.protocol.names import (
    RESERVED_PREFIX,
    TENANT_MARK,
    decode_model,
    encode_model,
    is_name,
    scoped_id,
    split_id,
)
from shared.protocol.pipeline import TEXT

REQUESTS_STREAM = "REQUESTS"
STAGES_STREAM = "STAGES"
TOKENS_STREAM = "TOKENS"
DEAD_STREAM = "DEAD"
JOBS_STREAM = "JOBS"
CANCELS_STREAM = "CANCELS"
ATTEMPTS_STREAM = "ATTEMPTS"
RESULTS_STREAM = "RESULTS"
MEDIA_STREAM = "MEDIA"
RESPONSES_STREAM = "RESPONSES"
STEPS_STREAM = "STEPS"
BATCHJOBS_STREAM = "BATCHJOBS"
BATCHES_STREAM = "BATCHES"
AUDIT_STREAM = "AUDIT"
KV_STREAM = "KV"
# The key-value bucket `pm_workers`, which clients can read with functions of their library.
WORKERS_STREAM = "KV_pm_workers"
SCALE_STREAM = "KV_pm_scale"

REQUESTS_FILTER = "pm.request.>"
# Subjects of the requests of trusted publishers, without and with a tenant. No stream stores a
# message with another number of tokens, such as one without an id.
REQUESTS_SUBJECTS = ("pm.request.*.*", "pm.request.*.*.*")
STAGES_FILTER = "pm.stage.>"
DEAD_FILTER = "pm.dead.>"
AUDIT_FILTER = "pm.audit.*"
JOBS_FILTER = "pm.job.*"
CANCELS_FILTER = "pm.cancel.>"
# Subjects of the cancellations of trusted publishers, without and with a tenant.
CANCELS_SUBJECTS = ("pm.cancel.*", "pm.cancel.*.*")
# Token after the tenant in the subjects of requests and cancellations that a client has published
# with the key of its tenant. They are in queues of this tenant, see `queues_of_tenant`.
WITH_KEY = "key"
# Tokens in place of a model in the subjects of a tenant's orders for batches and of their
# cancellations. No model has such a token, see `names.encode_model`.
BATCH_ORDER, BATCH_CANCEL = "=batch", "=cancel"
ATTEMPTS_FILTER = "pm.attempt.*"
RESULTS_FILTER = "pm.result.*"
MEDIA_FILTER = "pm.media.>"
PINS_FILTER = "pm.pin.>"
ITEMS_FILTER = "pm.item.*"
KV_FILTER = "pm.kv.*"
ENDED_FILTER = "pm.ended.*"
HEARTBEATS_FILTER = "$KV.pm_workers.*"
# A worker that is not ready has another key, which the filter of heartbeats does not match.
START_REPORTS_FILTER = "$KV.pm_workers.starting.*"
WORKERS_FILTER = "$KV.pm_workers.>"
# Tenants over their share of storage. The message is next to the heartbeats, whose readers skip it.
EXCEEDED_SHARES = "$KV.pm_workers.exceeded"
# Stores of the broker with too little free space, also next to the heartbeats.
FULL_STORES = "$KV.pm_workers.full_stores"
SCALE_FILTER = "$KV.pm_scale.*"
# The plan of the leading autoscaler, which is also its lease, and the orders of operators. Reports
# of actuators are on `scale_report`.
SCALE_PLAN = "$KV.pm_scale.plan"
SCALE_ORDERS = "$KV.pm_scale.orders"
RESPONSES_FILTER = "pm.response.*"
STEP_FILTER = "pm.step.>"
STEPS_FILTER = "pm.steps.>"
BATCHJOBS_FILTER = "pm.batchjob.*"
BATCH_FILTER = "pm.batchlog.>"
# Token in place of the id of a batch in the subjects of input files.
BATCH_FILES = "file"
BATCHES_FILTER = "pm.batches.>"
# First character of the last token of `batch_results`, which names of files cannot have.
RESULTS_MARK = "="
BATCHES_BEGUN = "pm.batches.*.*.begun"
APPEND_FILTER = "pm.append.>"
TOKENS_FILTER = "pm.tokens.>"

# Every worker answers requests on this subject with its metrics; core NATS.
METRICS = "pm.metrics"
# One worker answers a request on this subject with the settings that must be common to all.
SETTINGS = "pm.settings"
# No message has this subject. A purge of it changes nothing, and fails if a stream cannot store.
PROBE = "pm.probe"
# Number of batches of KV events that are stored for each engine.
MAX_KV_BATCHES = 10_000

LANES = ("interactive", "batch")

MAX_CONSUMER_LEN = 255
"""The server's limit on the name of a durable consumer, which has a stage, a model and a lane."""
_STAGE_MSG_ID = re.compile(
    rf"(?P<request_id>[^:]+):(?P<stream>{REQUESTS_STREAM}(?:_[A-Za-z0-9_-]{{1,128}})?)"
    r":(?P<sequence>[0-9]{1,19}):[^:]+:[0-9]+"
)


class RequestPlace(NamedTuple):
    """Place of a queued request."""

    stream: str
    sequence: int


def in_domain(subject: str, domain: str | None) -> str:
    """Return the subject by which a leaf node reaches JetStream's API and buckets in a domain.

    Other subjects are the same in all domains.
    """
    if domain is None or not subject.startswith(("$JS.API.", "$KV.")):
        return subject
    return f"$JS.{domain}.API.{subject.removeprefix('$JS.API.')}"


def tenant_of(subject: str) -> str:
    """Return the tenant in a subject; "" if there is none."""
    third = subject.split(".")[2:3]
    return third[0][1:] if third and third[0].startswith(TENANT_MARK) else ""


def request(model: str, request_id: str) -> str:
    """Subject of a request; the stream holds at most one message of a subject.

    Trusted publishers publish to the subject of any tenant. A tenant's clients publish without the
    tenant, which the broker adds.
    """
    name, tenant = split_id(request_id)
    return _of_tenant("pm.request", tenant, f"{encode_model(model)}.{name}")


def without_key(subject: str) -> str:
    """Return the subject of a request as `request` returns it, also for one with a tenant's key."""
    parts = subject.split(".")
    if len(parts) == 6 and parts[3] == WITH_KEY:
        del parts[3]
    return ".".join(parts)


def as_published(subject: str, tenant: str) -> str:
    """Return the subject of a request as the clients of its tenant publish to it."""
    return subject.replace(f"pm.request.{TENANT_MARK}{tenant}.", "pm.request.")


def is_batch_order(subject: str) -> bool:
    """Return whether a message in a queue of requests begins or cancels a batch."""
    return subject.split(".")[-2:-1] in ([BATCH_ORDER], [BATCH_CANCEL])


def is_batch_cancellation(subject: str) -> bool:
    return subject.split(".")[-2:-1] == [BATCH_CANCEL]


def requests_of_model(model: str) -> tuple[str, str, str]:
    """Filters for the requests for a model: without and with a tenant, and with a tenant's key."""
    token = encode_model(model)
    return f"pm.request.{token}.*", f"pm.request.*.{token}.*", f"pm.request.*.{WITH_KEY}.{token}.*"


def queues_of_tenant(tenant: str) -> dict[str, str]:
    """Return the streams of what the clients with a tenant's key publish, each with its filter.

    A tenant that fills its queues, or reads sequences in acknowledgements, meets no other tenant.
    """
    root = f"{TENANT_MARK}{tenant}.{WITH_KEY}"
    return {
        _queue_of(REQUESTS_STREAM, tenant): f"pm.request.{root}.*.*",
        _queue_of(CANCELS_STREAM, tenant): f"pm.cancel.{root}.*",
    }


def _queue_of(stream: str, tenant: str) -> str:
    return f"{stream}_{tenant}"


def tenant_of_queue(stream: str) -> str:
    """Return the tenant of a stream of `queues_of_tenant`; "" for any other stream."""
    kind, _, tenant = stream.partition("_")
    return tenant if kind in (REQUESTS_STREAM, CANCELS_STREAM) and is_name(tenant) else ""


def requests_with_id(request_id: str) -> dict[str, str]:
    """Return the streams of requests with an id, which may name different models, with filters."""
    name, tenant = split_id(request_id)
    if not tenant:
        return {REQUESTS_STREAM: f"pm.request.*.{name}"}
    root = f"pm.request.{TENANT_MARK}{tenant}"
    return {
        REQUESTS_STREAM: f"{root}.*.{name}",
        _queue_of(REQUESTS_STREAM, tenant): f"{root}.{WITH_KEY}.*.{name}",
    }


def tenants_requests(name: str) -> tuple[str, ...]:
    """Filters for the requests of all tenants with a name; see `names.scoped_id`."""
    return f"pm.request.*.*.{name}", f"pm.request.*.{WITH_KEY}.*.{name}"


def scale_report(pool: str) -> str:
    """Subject of the actuator's report on a pool, with one token, as `SCALE_FILTER` needs."""
    return f"$KV.pm_scale.report-{encode_model(pool)}"


def _of_tenant(root: str, tenant: str, name: str) -> str:
    return f"{root}.{TENANT_MARK}{tenant}.{name}" if tenant else f"{root}.{name}"


def request_id_of(subject: str) -> str | None:
    """Return the request id in the subject of a request; None for a subject of another form.

    The stream may still have requests of an older version, without an id in their subjects.
    """
    num_tokens = 5 if tenant_of(subject) else 4
    has_form = is_request(subject) and without_key(subject).count(".") == num_tokens - 1
    return id_in(subject) if has_form else None


def model_of_request(subject: str) -> str:
    """Return the model of a request's subject; empty for a subject of another form."""
    return "" if request_id_of(subject) is None else decode_model(subject.split(".")[-2])


def stage(name: str, model: str, lane: str, request_id: str, slot: int | None = None) -> str:
    """Subject of a task of a stage; the stream holds at most one message of a subject.

    A stage with slots has a queue for each slot of a lane. The slot follows the lane in one token,
    so the subjects of all stages have the same form.
    """
    return f"pm.stage.{name}.{encode_model(model)}.{_queue(lane, slot)}.{request_id}"


def _queue(lane: str, slot: int | None) -> str:
    return lane if slot is None else f"{lane}-{slot}"


def stage_msg_id(stage: str, request_id: str, place: RequestPlace, round: int) -> str:
    """Message id of a task, with the place of its request."""
    return f"{request_id}:{place.stream}:{place.sequence}:{stage}:{round}"


def place_of(stage_msg_id: str, request_id: str) -> RequestPlace | None:
    """Return the place of a task's request; None if the id does not belong to a task."""
    match = _STAGE_MSG_ID.fullmatch(stage_msg_id)
    if match is None or match["request_id"] != request_id:
        return None
    return RequestPlace(match["stream"], int(match["sequence"]))


def stage_filter(name: str, model: str, lane: str, slot: int | None = None) -> str:
    return f"pm.stage.{name}.{encode_model(model)}.{_queue(lane, slot)}.*"


def stage_of_model(name: str, model: str) -> str:
    """Subject of all tasks of a stage for a model."""
    return f"pm.stage.{name}.{encode_model(model)}.>"


def is_request(subject: str) -> bool:
    return subject.startswith("pm.request.")


def is_stage(subject: str) -> bool:
    return subject.startswith("pm.stage.")


def stages_of(request_id: str) -> str:
    """Filter for the tasks of a request in all stages."""
    return f"pm.stage.*.*.*.{request_id}"


def parts_of_stage(subject: str) -> tuple[str, str, str]:
    """Return stage, model and lane of a stage's subject or filter."""
    _, _, name, model, queue, _ = subject.split(".")
    return name, decode_model(model), queue.partition("-")[0]


def slot_of_stage(subject: str) -> int | None:
    """Return the slot of a stage's subject or filter; None for a queue without slots."""
    _, _, slot = subject.split(".")[4].partition("-")
    return int(slot) if slot.isdecimal() else None


def model_of_stage(subject: str) -> str:
    """Return the model of a stage's subject; empty for the subject of a request."""
    return parts_of_stage(subject)[1] if is_stage(subject) else ""


def stage_consumer(name: str, model: str, lane: str, slot: int | None = None) -> str:
    """Durable consumer that all workers of a stage share, on exactly one `stage_filter`.

    The stage ends at the first underscore, and the lane begins after the last one. So an underscore
    in the name of a stage is encoded, like special characters in the name of a model.
    """
    return f"{name.replace('_', '=5F')}_{encode_model(model)}_{_queue(lane, slot)}"


RENDERER_CALLS = ("render", "features", "tokenize", "detokenize", "split", "card")


def renderer(call: str, model: str) -> str:
    """Subject on which renderers of a model answer a call of `shared.protocol.renderer_rpc`."""
    return f"pm.{call}.{encode_model(model)}"


def renderer_of_tenants(call: str, model: str) -> str:
    """Filter for the same calls of clients of tenants."""
    return f"pm.{call}.*.{encode_model(model)}"


# Queue group of the renderers that answer on these subjects.
RENDERERS_GROUP = "renderers"

READING_CALLS = ("read", "state", "results", "file")


def reading(call: str, name: str) -> str:
    """Subject on which coordinators answer a call of `shared.protocol.reading`.

    `name` is the id of a request or a batch, or the SHA-256 of a file, each with or without a
    tenant.
    """
    return f"pm.{call}.{name}"


def reading_filter(call: str) -> str:
    """Filter for a call, which includes the calls of clients of tenants."""
    return f"pm.{call}.>"


# Queue group of the coordinators that answer on these subjects.
COORDINATORS_GROUP = "coordinators"

REQUESTS_CONSUMER = "coordinator"
TRACES_CONSUMER = "traces"
CANCELS_CONSUMER = "coordinator"
RESPONSES_CONSUMER = "agent"
BATCHJOBS_CONSUMER = "batcher"


def append(request_id: str, output: str = TEXT) -> str:
    """Subject for writers of an output's records. The server stores them under `tokens`."""
    return _log_subject("pm.append", request_id, output)


def tokens(request_id: str, output: str = TEXT) -> str:
    """Subject for readers of an output's log: live on core NATS, and from any index in TOKENS.

    The log of the text is the request's own log, and has the request id alone as its name. Only
    records that the stream has accepted are republished here, so live readers never see a record of
    a writer that was fenced off.
    """
    return _log_subject("pm.tokens", request_id, output)


def tenants_logs(name: str) -> str:
    """Filter for the logs of all tenants' requests with a name, and for outputs with this name."""
    return f"pm.tokens.*.{name}"


def logs_beside_text(request_id: str) -> str:
    """Filter for the logs of a request's other outputs, and for the list of their ends."""
    return f"{tokens(request_id)}.>"


def _log_subject(root: str, request_id: str, output: str) -> str:
    name, tenant = split_id(request_id)
    own = _of_tenant(root, tenant, name)
    return own if output == TEXT else f"{own}.{output}"


def response(model: str) -> str:
    """Subject of the queue of responses."""
    return f"pm.response.{encode_model(model)}"


def step(tenant: str, response_id: str) -> str:
    """Subject for writers of a response's steps. The server stores them under `steps`."""
    return f"pm.step.{_tenant_token(tenant)}.{response_id}"


def steps(tenant: str | None, response_id: str) -> str:
    """Subject of the steps of a response: live on core NATS, and from any index in STEPS.

    The tenant is part of it, so the id of another tenant's response leads to no steps. Without a
    tenant, for operators, it is a filter.
    """
    return f"pm.steps.{'*' if tenant is None else _tenant_token(tenant)}.{response_id}"


def steps_of_tenant(tenant: str) -> str:
    """Filter for the steps of all responses of a tenant."""
    return f"pm.steps.{_tenant_token(tenant)}.*"


def batch_job(tenant: str, batch_id: str) -> str:
    """Subject of the message of a batch in the queue of batches."""
    return f"pm.batchjob.{scoped_id(batch_id, tenant)}"


def stored_batch(subject: str) -> str:
    """Subject under which the server stores a message of `BATCH_FILTER`, for its readers."""
    return subject.replace("pm.batchlog.", "pm.batches.", 1)


def batch_begun(tenant: str, batch_id: str) -> str:
    """Subject of the order of a client to run a batch. With `*` as the id, all of a tenant."""
    return f"{_batches_of(tenant)}.{batch_id}.begun"


def batches_named(batch_id: str) -> str:
    """Subjects of the stored orders of all tenants for an id. With `*`, orders of all batches."""
    return f"pm.batches.*.{batch_id}.begun"


def batch_cancelled(tenant: str, batch_id: str) -> str:
    """Subject of the order of a client to cancel a batch."""
    return f"{_batches_of(tenant)}.{batch_id}.cancelled"


def batch_log(tenant: str, batch_id: str) -> str:
    """Subject of the records of a batch."""
    return f"{_batches_of(tenant)}.{batch_id}.log"


def batch_file(tenant: str, name: str) -> str:
    """Subject of the head of an input file. `name` is the SHA-256 of its bytes."""
    return f"{_batches_of(tenant)}.{BATCH_FILES}.{name}"


def batch_results(tenant: str, batch_id: str) -> str:
    """Subject that marks the end of a batch with results. `batch_file` with `*` includes it."""
    return batch_file(tenant, f"{RESULTS_MARK}{batch_id}")


def batch_file_chunk(tenant: str, name: str, number: int | str) -> str:
    return f"{batch_file(tenant, name)}.{number}"


def _batches_of(tenant: str) -> str:
    """Without a tenant, its token is the mark alone, so that all subjects have the same form."""
    return f"pm.batchlog.{TENANT_MARK}{tenant}"


def media_upload(tenant: str, name: str) -> str:
    """Subject that marks a stored file as uploaded by a tenant. With `*`, all of its uploads."""
    return f"pm.media.uploads.{_tenant_token(tenant)}.{name}"


def video_job(tenant: str, request_id: str) -> str:
    """Subject of a video that a gateway has ordered. With `*`, all videos of a tenant.

    `request_id` has no tenant. The stream is the one of the file, so that both expire.
    """
    return f"pm.media.videos.{_tenant_token(tenant)}.{request_id}"


def _tenant_token(tenant: str) -> str:
    return hashlib.blake2s(tenant.encode(), digest_size=16).hexdigest()


def last_token(subject: str) -> str:
    return subject.rpartition(".")[2]


def id_in(subject: str) -> str:
    """Return the request id of a subject that ends with a request's name."""
    return scoped_id(last_token(subject), tenant_of(subject))


def is_text_log(subject: str) -> bool:
    """Return whether the subject of a log belongs to the text of a request, see `tokens`."""
    return subject.count(".") == (3 if tenant_of(subject) else 2)


def id_of_log(subject: str) -> str:
    """Return the request id of the subject of any log, see `tokens`."""
    tenant = tenant_of(subject)
    return scoped_id(subject.split(".")[3 if tenant else 2], tenant)


def cancel(request_id: str) -> str:
    """Subject of a cancellation, which is stored until a coordinator has carried it out."""
    name, tenant = split_id(request_id)
    return _of_tenant("pm.cancel", tenant, name)


def ended(request_id: str) -> str:
    """Subject on core NATS of the message that a request has ended, for its other workers."""
    return f"pm.ended.{request_id}"


def attempts(job_id: str) -> str:
    """Subject of the attempts at a job: the worker that claimed it, and the outcome.

    The id of a job is the id of a request, the name of an item task, or an id of `names.job_id`.
    """
    return f"pm.attempt.{job_id}"


def item_task(key: str) -> str:
    """Name of an item task, in place of a request id. `key` identifies its content."""
    return f"{RESERVED_PREFIX}{key}"


def result(key: str) -> str:
    """Subject of the result of an item task."""
    return f"pm.result.{key}"


def media(name: str) -> str:
    """Subject of the head of a stored file. `name` is the SHA-256 of its bytes in hexadecimal."""
    return f"pm.media.{name}"


def media_chunk(name: str, number: int) -> str:
    return f"pm.media.{name}.{number}"


def media_chunks(name: str) -> str:
    return f"pm.media.{name}.*"


def pin(request_id: str, sequence: int) -> str:
    """Subject of the hashes of files from a request's URLs, separate for each acceptance."""
    return f"pm.pin.{request_id}.{sequence}"


def item(key: str) -> str:
    """Subject of the name of an item's bytes, by the client's own hash of the item."""
    return f"pm.item.{key}"


def blob(worker: str) -> str:
    """Subject on which a worker sends large payloads in chunks, to readers without a connection."""
    return f"pm.blob.{worker}"


def kv(engine: str) -> str:
    """Subject of an engine's KV events, about its cached blocks. `engine` is its worker id."""
    return f"pm.kv.{engine}"


def heartbeat(worker: str) -> str:
    return f"$KV.pm_workers.{worker}"


def start_report(worker: str) -> str:
    return f"$KV.pm_workers.starting.{worker}"


def job(request_id: str) -> str:
    """Subject of the gateways' record of a request, which is separate from its log."""
    return f"pm.job.{request_id}"


def dead(role: str, job_id: str) -> str:
    """Subject of the dead letters of a job. Its id is as in `attempts`."""
    return f"pm.dead.{role}.{job_id}"


def dead_of(job_id: str) -> str:
    return f"pm.dead.*.{job_id}"


def audit(identity: str) -> str:
    """Subject of the actions of an identity of `shared.protocol.permissions`."""
    return f"pm.audit.{identity}"
