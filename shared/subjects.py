"""Every subject, stream, bucket and consumer name. No other module spells one out.

Names that become part of a subject (request ids, models, worker ids) are checked here: a subject
token with a dot, a wildcard or white space would address something else.
"""

import re

REQUESTS_STREAM = "REQUESTS"
STAGES_STREAM = "STAGES"
TOKENS_STREAM = "TOKENS"
DEAD_STREAM = "DEAD"
WORKERS_BUCKET = "pm_workers"

REQUESTS_FILTER = "pm.request.>"
STAGES_FILTER = "pm.stage.>"
DEAD_FILTER = "pm.dead.>"
APPEND_FILTER = "pm.append.*"
TOKENS_FILTER = "pm.tokens.*"
# The server's own subject mapping language: the first wildcard of the source.
TOKENS_TARGET = "pm.tokens.{{wildcard(1)}}"

LANES = ("interactive", "batch")

MAX_NAME_LEN = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")


def is_name(value: str) -> bool:
    """Whether `value` may stand as one token of a subject."""
    return _NAME.fullmatch(value) is not None


def request(model: str) -> str:
    return f"pm.request.{model}"


def model_of_request(subject: str) -> str:
    """The model that a request subject names; may be any text, for clients choose it."""
    return subject.removeprefix("pm.request.")


def stage(role: str, model: str, lane: str) -> str:
    return f"pm.stage.{role}.{model}.{lane}"


def stage_consumer(role: str, model: str, lane: str) -> str:
    """Durable consumer shared by all workers of a role; its filter is exactly one stage subject."""
    return f"{role}_{model}_{lane}"


REQUESTS_CONSUMER = "coordinator"


def append(request_id: str) -> str:
    """Where writers publish a token log record; the server stores it under `tokens`."""
    return f"pm.append.{request_id}"


def tokens(request_id: str) -> str:
    """Where readers find a token log: live on core NATS, and from any index in TOKENS.

    Only records that the stream has accepted are republished here, so a writer that was fenced off
    is not seen by live readers either.
    """
    return f"pm.tokens.{request_id}"


def dead(role: str) -> str:
    return f"pm.dead.{role}"
