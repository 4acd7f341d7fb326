"""Records of the audit log: who did what to whose work, when, and how it ended."""

from typing import Literal, get_args

from msgspec import Struct

from shared.protocol.encoding import json_or_msgpack, or_none

Action = Literal[
    "approval",
    "backup",
    "cancel",
    "dead.requeue",
    "keys.add-tenant",
    "keys.make",
    "keys.remove-tenant",
    "keys.rotate",
    "migrate",
    "restore",
    "scale",
]
ACTIONS: tuple[Action, ...] = get_args(Action)
DONE = "done"


class AuditRecord(Struct, frozen=True, omit_defaults=True):
    """One act. Its time is that of its storage, and its identity that of its subject."""

    action: Action
    by: str
    """User and host of a command, or the name of an API key."""
    target: str = ""
    """What it was done to, such as a request id."""
    tenant: str = ""
    """Whose work that is; "" without a tenant."""
    outcome: str = DONE
    """`done`, or the code of the error."""


decode_audit_record = or_none(json_or_msgpack(AuditRecord))
