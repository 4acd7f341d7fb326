"""Names that become part of a subject: what a model, a request or a tenant may be called.

A token of a subject with a dot, a wildcard or white space would address something else. Models have
the names that people know them by, such as `org/qwen2.5`, and are encoded. Elsewhere a model's name
is shown as it is.
"""

import re

NAME_RULE = "must be 1 to 128 letters, digits, '-' or '_'"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
MAX_MODEL_LEN = 128
# It leaves room for a stage and a lane in the name of a consumer.
MAX_MODEL_TOKEN_LEN = 200
MODEL_NAME_RULE = (
    f"must be 1 to {MAX_MODEL_LEN} printable characters without spaces at the ends, and at most"
    f" {MAX_MODEL_TOKEN_LEN} in a subject, where each byte of UTF-8 that is no letter, digit, '-'"
    " or '_' counts as 3"
)
_ENCODED = re.compile(r"[^A-Za-z0-9_-]")
_TOKEN = re.compile(r"(?:[A-Za-z0-9_-]|=[0-9A-F]{2})+")
TENANT_MARK = "@"
"""First character of a tenant's token, which no model and no client's request id may have."""
RESERVED_PREFIX = "item_"
"""Prefix of the names of item tasks, which request ids may not have."""


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


def scoped_id(name: str, tenant: str) -> str:
    """The request id of a request that a tenant's client has named, so that no two tenants share
    one; for requests without a tenant in their subject this is the name itself."""
    return f"{name}{TENANT_MARK}{tenant}" if tenant else name


def split_id(request_id: str) -> tuple[str, str]:
    """The name and the tenant of which `scoped_id` has made a request id."""
    name, _, tenant = request_id.partition(TENANT_MARK)
    return name, tenant


def is_scoped_id(value: str) -> bool:
    """Return whether `value` is a request id, with or without a tenant."""
    name, mark, tenant = value.partition(TENANT_MARK)
    return is_request_id(name) and (not mark or is_name(tenant))


def is_task_id(value: str) -> bool:
    """Return whether `value` is a request id or the name of an item task."""
    return is_name(value) or is_scoped_id(value)
