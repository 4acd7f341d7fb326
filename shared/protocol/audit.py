"""Records of the audit log: actor, action, target, tenant, time and outcome."""

from typing import Literal, get_args

from msgspec import Struct

from shared.protocol.encoding import ClientDecoder, or_none

Action = Literal[
    "approval",
    "backup",
    "cancel",
    "dead.drop",
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
    """Record of one action. Its subject contains the identity, and the broker adds the time."""

    action: Action
    by: str
    """User and host of a command, or the name of an API key."""
    target: str = ""
    """Target of the action, such as a request id."""
    tenant: str = ""
    """Tenant of the target; "" without a tenant."""
    outcome: str = DONE
    """`done`, or the code of the error."""


decode_audit_record = or_none(ClientDecoder(AuditRecord))
