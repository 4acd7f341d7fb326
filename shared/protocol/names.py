"""Names of models, requests and tenants, which become part of subjects.

A token with a dot, a wildcard or white space would change the meaning of a subject. Models have
public names, such as `org/qwen2.5`, so their names are encoded in subjects, and only there.
"""

import re
from typing import Literal

NAME_RULE = "must be 1 to 128 letters, digits, '-' or '_'"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
# A line of a batch may have several prompts.
_OWN_ID = re.compile(r"[A-Za-z0-9_-]{1,128}(?:~[ti]?[0-9]{1,19}(?:-[0-9]{1,19})?){0,2}")
_JOB_ID = re.compile(r"(?:batch|response):[A-Za-z0-9_-]{1,128}(?:@[A-Za-z0-9_-]{1,128})?")
MAX_MODEL_LEN = 128
# It leaves room for a stage and a lane in the name of a consumer.
MAX_MODEL_TOKEN_LEN = 200
MODEL_NAME_RULE = (
    f"must be 1 to {MAX_MODEL_LEN} printable characters without spaces at the ends, and at most"
    f" {MAX_MODEL_TOKEN_LEN} in a subject, where each byte of UTF-8 other than letters, digits, '-'"
    " and '_' counts as 3"
)
_ENCODED = re.compile(r"[^A-Za-z0-9_-]")
_TOKEN = re.compile(r"(?:[A-Za-z0-9_-]|=[0-9A-F]{2})+")
_WILDCARD = re.compile(r"[.*>]")
_MAX_LOG_NAME_LEN = 256
TENANT_MARK = "@"
"""First character of a tenant's token, which model names and request ids of clients cannot have."""
PART_MARK = "~"
"""Character before the last token of an id of `part_id`, which ids of clients cannot have."""
RESERVED_PREFIX = "item_"
"""Prefix of the names of item tasks, which request ids must not have."""
REQUEST_ID_RULE = f"{NAME_RULE}, and must not begin with {RESERVED_PREFIX!r}"


def is_name(value: str) -> bool:
    """Return whether `value` is valid as one token of a subject."""
    return _NAME.fullmatch(value) is not None


def is_model_name(value: str) -> bool:
    """Return whether `value` is valid as the name of a model or an adapter, see MODEL_NAME_RULE."""
    return (
        0 < len(value) <= MAX_MODEL_LEN
        and value.isprintable()
        and value == value.strip()
        and len(encode_model(value)) <= MAX_MODEL_TOKEN_LEN
    )


def encode_model(name: str) -> str:
    """Encode a model's name as one token, which is valid in names of subjects, consumers and files.

    Letters, digits, `-` and `_` stay. Any other character becomes `=` and two upper-case
    hexadecimal digits for each of its bytes in UTF-8. So different names have different tokens.
    """
    return _ENCODED.sub(lambda match: "".join(f"={b:02X}" for b in match[0].encode()), name)


def decode_model(token: str) -> str:
    """Decode a token of `encode_model`. Other tokens are returned unchanged."""
    if "=" not in token or _TOKEN.fullmatch(token) is None:
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

    Item tasks have logs and attempts like requests, under names that can be computed from the
    item's content. If clients could use these names, one client could end an item task, and so
    make it fail for every tenant.
    """
    return is_name(value) and not value.startswith(RESERVED_PREFIX)


def is_own_id(value: str) -> bool:
    """Return whether `value` is a request id without a tenant, of a client or of `part_id`."""
    return _OWN_ID.fullmatch(value) is not None and not value.startswith(RESERVED_PREFIX)


def has_own_log(name: str, tenant: str) -> bool:
    """Return whether the log of a request with this name, which may be invalid, is its own.

    A wildcard would lead to other logs. Without a tenant, so would the mark of a tenant and the
    prefix of item tasks. The broker closes a connection for a command of more than 4,096 bytes,
    which contains the name.
    """
    if len(name) > _MAX_LOG_NAME_LEN or _WILDCARD.search(name) is not None:
        return False
    if tenant:
        return TENANT_MARK not in tenant and _WILDCARD.search(tenant) is None
    return TENANT_MARK not in name and not name.startswith(RESERVED_PREFIX)


def scoped_id(name: str, tenant: str) -> str:
    """Return the request id for a client's name of a request, which is different for each tenant.

    Without a tenant it is the name itself.
    """
    return f"{name}{TENANT_MARK}{tenant}" if tenant else name


def part_id(whole_id: str, part: str | int) -> str:
    """Return the id of a request that is part of a request, a response or a batch.

    No client can choose such an id for its own request, so no other request has the same one.
    """
    name, tenant = split_id(whole_id)
    return scoped_id(f"{name}{PART_MARK}{part}", tenant)


def job_id(kind: Literal["batch", "response"], name: str, tenant: str) -> str:
    """Return the id of a batch or a response in its attempts and dead letters.

    Clients choose the ids of requests, batches and responses separately, so they may be equal. No
    request can have an id of this form.
    """
    return scoped_id(f"{kind}:{name}", tenant)


def is_job_id(value: str) -> bool:
    """Return whether `value` is an id of `job_id`."""
    return _JOB_ID.fullmatch(value) is not None


def split_id(request_id: str) -> tuple[str, str]:
    """Return the name and the tenant of a request id of `scoped_id`.

    The last mark counts, because an invalid name of a tenant's client may have one.
    """
    name, mark, tenant = request_id.rpartition(TENANT_MARK)
    return (name, tenant) if mark else (request_id, "")


def is_scoped_id(value: str) -> bool:
    """Return whether `value` is a request id, with or without a tenant."""
    name, mark, tenant = value.partition(TENANT_MARK)
    return is_own_id(name) and (not mark or is_name(tenant))


def is_part_id(value: str) -> bool:
    """Return whether `value` has the form of an id of `part_id`."""
    return PART_MARK in value and is_scoped_id(value)


def is_task_id(value: str) -> bool:
    """Return whether `value` is a request id or the name of an item task."""
    return is_name(value) or is_scoped_id(value)
