"""Tenant and size of stored messages, in their subjects and headers. Pure.

Tenants share streams, and the broker reports only the size of a whole stream. So the subject or a
header of a message contains its tenant, and a header of a log's record the size of the log up to
it. The last message of each subject is then enough to measure the storage of each tenant.
"""

from collections.abc import Mapping

from shared.protocol.requests import TENANT_HEADER
from shared.protocol.subjects import tenant_of

LOG_BYTES_HEADER = "Pagemill-Log-Bytes"
"""Header of a record: bytes of the tenant's log, up to the end of the record."""
SIZE_HEADER = "Nats-Msg-Size"
"""Header with the size of a message, if the broker delivers headers alone."""
MESSAGE_BYTES = 200
"""Bytes that the broker stores for a message besides its content: subject, headers, checksum."""


def log_headers(subject: str, num_bytes: int) -> dict[str, str]:
    """Return the headers of a record that ends `num_bytes` of a log; none without a tenant."""
    return {LOG_BYTES_HEADER: str(num_bytes)} if tenant_of(subject) else {}


def kept_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a log's last message that the next message may repeat."""
    num_bytes = headers.get(LOG_BYTES_HEADER)
    return {} if num_bytes is None else {LOG_BYTES_HEADER: num_bytes}


def stored_bytes(data: bytes) -> int:
    """Return the approximate number of bytes that the broker stores for a message."""
    return MESSAGE_BYTES + len(data)


def tenant_and_bytes(subject: str, headers: Mapping[str, str]) -> tuple[str, int]:
    """Return tenant and bytes of a subject's messages, from the headers of the last one.

    The tenant is "" if neither names one.
    """
    own = MESSAGE_BYTES + _number(headers.get(SIZE_HEADER))
    tenant = tenant_of(subject) or headers.get(TENANT_HEADER, "")
    return tenant, max(own, _number(headers.get(LOG_BYTES_HEADER)))


def _number(text: str | None) -> int:
    is_number = text is not None and text.isascii() and text.isdecimal() and len(text) <= 15
    return int(text or 0) if is_number else 0
