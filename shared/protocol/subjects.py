"""All names of subjects, streams, buckets and consumers; no other module contains one.

Names that become part of a subject (request ids, worker ids) are checked here: a subject token with
a dot, a wildcard or white space would address something else. Models have the names that people
know them by, such as `org/qwen2.5`, and are encoded. Elsewhere a model's name is shown as it is.
"""

import re

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
KV_STREAM = "KV"
# A key-value bucket, `pm_workers`, which clients can read with functions of their library.
WORKERS_STREAM = "KV_pm_workers"
SCALE_STREAM = "KV_pm_scale"

REQUESTS_FILTER = "pm.request.>"
STAGES_FILTER = "pm.stage.>"
DEAD_FILTER = "pm.dead.>"
JOBS_FILTER = "pm.job.*"
CANCELS_FILTER = "pm.cancel.*"
ATTEMPTS_FILTER = "pm.attempt.*"
RESULTS_FILTER = "pm.result.*"
MEDIA_FILTER = "pm.media.>"
PINS_FILTER = "pm.pin.>"
ITEMS_FILTER = "pm.item.*"
KV_FILTER = "pm.kv.*"
ENDED_FILTER = "pm.ended.*"
HEARTBEATS_FILTER = "$KV.pm_workers.*"
# A worker that is not ready has another key, which readers of heartbeats do not see.
START_REPORTS_FILTER = "$KV.pm_workers.starting.*"
WORKERS_FILTER = "$KV.pm_workers.>"
SCALE_FILTER = "$KV.pm_scale.*"
# What the leading autoscaler wants, which is its lease as well; what the actuator has; and what an
# operator has set.
SCALE_PLAN = "$KV.pm_scale.plan"
SCALE_REPORT = "$KV.pm_scale.report"
SCALE_ORDERS = "$KV.pm_scale.orders"
APPEND_FILTER = "pm.append.>"
TOKENS_FILTER = "pm.tokens.>"

# Every worker answers requests on this subject with its metrics; core NATS.
METRICS = "pm.metrics"
# One worker answers a request on this subject with the settings that all have in common.
SETTINGS = "pm.settings"
# Number of batches of KV events that are stored for each engine.
MAX_KV_BATCHES = 10_000

LANES = ("interactive", "batch")

NAME_RULE = "must be 1 to 128 letters, digits, '-' or '_'"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
MAX_MODEL_LEN = 128
MAX_CONSUMER_LEN = 255
"""The server's limit on the name of a durable consumer, which has a stage, a model and a lane."""
# It leaves room for a stage and a lane in the name of a consumer.
MAX_MODEL_TOKEN_LEN = 200
MODEL_NAME_RULE = (
    f"must be 1 to {MAX_MODEL_LEN} printable characters without spaces at the ends, and at most"
    f" {MAX_MODEL_TOKEN_LEN} in a subject, where each byte of UTF-8 that is no letter, digit, '-'"
    " or '_' counts as 3"
)
_ENCODED = re.compile(r"[^A-Za-z0-9_-]")
_TOKEN = re.compile(r"(?:[A-Za-z0-9_-]|=[0-9A-F]{2})+")
RESERVED_PREFIX = "item_"
"""Prefix of the names of item tasks, which request ids may not have."""
_STAGE_MSG_ID = re.compile(r"(?P<request_id>[^:]+):(?P<sequence>[0-9]{1,19}):[^:]+:[0-9]+")


def is_name(value: str) -> bool:
    """Return whether `value` can be one token of a subject."""
    return _NAME.fullmatch(value) is not None


def is_model_name(value: str) -> bool:
    """Return whether a model or an adapter may have this name, see MODEL_NAME_RULE."""
    return (
        0 < len(value) <= MAX_MODEL_LEN
        and value.isprintable()
        and value == value.strip()
        and len(encode_model(value)) <= MAX_MODEL_TOKEN_LEN
    )


def encode_model(name: str) -> str:
    """Encode a model's name as one token, which subjects, consumers and files may have as a name.

    Letters, digits, `-` and `_` stay. Any other character becomes `=` and two upper-case
    hexadecimal digits for each of its bytes in UTF-8. So no two names have the same token.
    """
    return _ENCODED.sub(lambda found: "".join(f"={b:02X}" for b in found[0].encode()), name)


def decode_model(token: str) -> str:
    """Return the name that `encode_model` has encoded. A token that it cannot have made stays."""
    if _TOKEN.fullmatch(token) is None:
        return token
    data = token.encode()
    parts = re.split(rb"=(..)", data)
    parts[1::2] = [bytes.fromhex(digits.decode()) for digits in parts[1::2]]
    try:
        name = b"".join(parts).decode()
    except UnicodeDecodeError:
        return token
    return name if encode_model(name) == token else token


def is_request_id(value: str) -> bool:
    """Return whether a client may use `value` as a request id.

    Item tasks have logs and attempts like requests, under names that anyone can compute from the
    item's content. A client that could end such a task would have the item refused to every tenant.
    """
    return is_name(value) and not value.startswith(RESERVED_PREFIX)


def request(model: str) -> str:
    return f"pm.request.{encode_model(model)}"


def model_of_request(subject: str) -> str:
    return decode_model(last_token(subject))


def stage(name: str, model: str, lane: str, request_id: str, slot: int | None = None) -> str:
    """Subject of a task of a stage; the stream holds at most one message of a subject.

    A stage with slots has a queue for each slot of a lane. The slot follows the lane in one token,
    so the subjects of all stages have the same form.
    """
    return f"pm.stage.{name}.{encode_model(model)}.{_queue(lane, slot)}.{request_id}"


def _queue(lane: str, slot: int | None) -> str:
    return lane if slot is None else f"{lane}-{slot}"


def stage_msg_id(stage: str, request_id: str, sequence: int, round: int) -> str:
    """Message id of a task; `sequence` is that of the request in its queue."""
    return f"{request_id}:{sequence}:{stage}:{round}"


def sequence_of(stage_msg_id: str, request_id: str) -> int | None:
    """Sequence in its queue of the request of a task; None for an id of another kind."""
    found = _STAGE_MSG_ID.fullmatch(stage_msg_id)
    return int(found["sequence"]) if found and found["request_id"] == request_id else None


def stage_filter(name: str, model: str, lane: str, slot: int | None = None) -> str:
    return f"pm.stage.{name}.{encode_model(model)}.{_queue(lane, slot)}.*"


def is_stage(subject: str) -> bool:
    return subject.startswith("pm.stage.")


def stages_of(request_id: str) -> str:
    """Filter for the tasks of a request in all stages."""
    return f"pm.stage.*.*.*.{request_id}"


def parts_of_stage(subject: str) -> tuple[str, str, str]:
    """Stage, model and lane of a stage's subject or filter."""
    _, _, name, model, queue, _ = subject.split(".")
    return name, decode_model(model), queue.partition("-")[0]


def slot_of_stage(subject: str) -> int | None:
    """Slot of a stage's subject or filter; None for a queue without slots."""
    _, _, slot = subject.split(".")[4].partition("-")
    return int(slot) if slot.isdecimal() else None


def model_of_stage(subject: str) -> str:
    """Model of a stage's subject; empty for a request's subject, whose name a client chooses."""
    return parts_of_stage(subject)[1] if is_stage(subject) else ""


def stage_consumer(name: str, model: str, lane: str, slot: int | None = None) -> str:
    """Durable consumer that all workers of a stage share, on exactly one `stage_filter`.

    The stage ends at the first underscore, and the lane begins at the last one. So an underscore in
    the name of a stage is encoded like other characters in the name of a model.
    """
    return f"{name.replace('_', '=5F')}_{encode_model(model)}_{_queue(lane, slot)}"


def renderer(call: str, model: str) -> str:
    """Subject on which renderers of a model answer a call of `shared.protocol.renderer_rpc`."""
    return f"pm.{call}.{encode_model(model)}"


# Queue group of the renderers that answer on these subjects.
RENDERERS_GROUP = "renderers"

REQUESTS_CONSUMER = "coordinator"
CANCELS_CONSUMER = "coordinator"


def append(request_id: str, output: str = TEXT) -> str:
    """Subject for writers of an output's records; the server stores them under `tokens`."""
    return _log_subject("pm.append", request_id, output)


def tokens(request_id: str, output: str = TEXT) -> str:
    """Subject for readers of an output's log: live on core NATS, and from any index in TOKENS.

    The log of the text is the request's own, and its name is the request id alone. Only records
    that the stream has accepted are republished here, so live readers never see a record of a
    writer that was fenced off.
    """
    return _log_subject("pm.tokens", request_id, output)


def logs_beside_text(request_id: str) -> str:
    """Filter for the logs of a request's other outputs, and for the list of their ends."""
    return f"pm.tokens.{request_id}.>"


def _log_subject(root: str, request_id: str, output: str) -> str:
    return f"{root}.{request_id}" if output == TEXT else f"{root}.{request_id}.{output}"


def last_token(subject: str) -> str:
    """The request id of a subject that ends in one."""
    return subject.rpartition(".")[2]


def cancel(request_id: str) -> str:
    """Subject of a request to cancel, which is stored until a coordinator has carried it out."""
    return f"pm.cancel.{request_id}"


def ended(request_id: str) -> str:
    """Subject on core NATS of the message that another worker has ended a claimed request."""
    return f"pm.ended.{request_id}"


def attempts(request_id: str) -> str:
    """Subject of the attempts at a request: the worker that claimed it, and the outcome."""
    return f"pm.attempt.{request_id}"


def item_task(key: str) -> str:
    """Name of an item task in place of a request id; `key` identifies its content."""
    return f"{RESERVED_PREFIX}{key}"


def result(key: str) -> str:
    """Subject of the result of an item task."""
    return f"pm.result.{key}"


def media(name: str) -> str:
    """Subject of the head of a stored image; `name` is the SHA-256 of its bytes in hexadecimal."""
    return f"pm.media.{name}"


def media_chunk(name: str, number: int) -> str:
    return f"pm.media.{name}.{number}"


def pin(request_id: str, sequence: int) -> str:
    """Subject of the hashes found behind a request's URLs; each acceptance of an id has its own."""
    return f"pm.pin.{request_id}.{sequence}"


def item(key: str) -> str:
    """Subject of the name of an item's bytes, for an item that a client knows by its own hash."""
    return f"pm.item.{key}"


def blob(worker: str) -> str:
    """Subject on which a worker sends large payloads in chunks, to readers without another path."""
    return f"pm.blob.{worker}"


def kv(engine: str) -> str:
    """Subject of the KV events of an engine, its cached blocks; `engine` is its worker id."""
    return f"pm.kv.{engine}"


def heartbeat(worker: str) -> str:
    return f"$KV.pm_workers.{worker}"


def start_report(worker: str) -> str:
    return f"$KV.pm_workers.starting.{worker}"


def job(request_id: str) -> str:
    """Subject of the record that gateways keep of a request, beside its log."""
    return f"pm.job.{request_id}"


def dead(role: str, request_id: str) -> str:
    return f"pm.dead.{role}.{request_id}"


def dead_of(request_id: str) -> str:
    return f"pm.dead.*.{request_id}"
