"""What a stored message says of its tenant and of its size. Pure.

Streams are shared by tenants, and the broker tells the size of a whole stream alone. So a message
of a tenant names it in its headers, and a record of a log also tells how large the log is with it:
the last message of each subject is enough to know what each tenant has stored.
"""

from collections.abc import Mapping

from shared.protocol.requests import TENANT_HEADER, tenant_header
from shared.protocol.subjects import tenant_of

LOG_BYTES_HEADER = "Pagemill-Log-Bytes"
"""Header of a record: bytes of the tenant's log to its end."""
SIZE_HEADER = "Nats-Msg-Size"
"""Header by which the broker tells the size of a message that it leaves out."""
MESSAGE_BYTES = 200
"""What the broker stores of a message beside its content: the subject, headers, a checksum."""


def log_headers(tenant: str, num_bytes: int) -> dict[str, str]:
    """Return the headers of a record that ends `num_bytes` of a tenant's log."""
    return tenant_header(tenant) | {LOG_BYTES_HEADER: str(num_bytes)} if tenant else {}


def kept_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return those headers of a log's last message that the next one may repeat."""
    return {name: headers[name] for name in (TENANT_HEADER, LOG_BYTES_HEADER) if name in headers}


def stored_bytes(data: bytes) -> int:
    """Return about how many bytes the broker stores for a message with this content."""
    return MESSAGE_BYTES + len(data)


def tenant_and_bytes(subject: str, headers: Mapping[str, str]) -> tuple[str, int]:
    """Return whose the messages of a subject are, and their bytes, by the headers of the last one.

    The tenant is "" where none is named.
    """
    own = MESSAGE_BYTES + _number(headers.get(SIZE_HEADER))
    tenant = tenant_of(subject) or headers.get(TENANT_HEADER, "")
    return tenant, max(own, _number(headers.get(LOG_BYTES_HEADER)))


def _number(text: str | None) -> int:
    is_number = text is not None and text.isascii() and text.isdecimal() and len(text) <= 15
    return int(text or 0) if is_number else 0
