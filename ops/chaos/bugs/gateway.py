"""Bugs of the gateway: resumed streams, named requests, clients that disconnect."""

import secrets

from ops.chaos.bugs.registry import bug
from ops.chaos.patching import replace_attribute, skip


@bug("gateway", "dying gateways", "I2")
def last_event_id_ignored() -> None:
    from workers.gateway.backend import submit

    replace_attribute(submit, "read_start", lambda request, parts: [0] * parts)


@bug("gateway", "dying gateways", "I2", "I5", "I12")
def request_id_not_idempotent() -> None:
    """A request sent again under the client's own id becomes another request."""
    from starlette.requests import Request

    from workers.gateway.backend import submit
    from workers.gateway.core import ids
    from workers.gateway.core.assembler import AnswerOptions
    from workers.gateway.core.kinds import AnswerKind

    read_request_id = ids.read_request_id

    def another(request: Request, kind: AnswerKind[AnswerOptions]) -> tuple[str, bool]:
        request_id, named = read_request_id(request, kind)
        return f"{request_id[:-8]}{secrets.token_hex(4)}", named

    replace_attribute(submit, "read_request_id", another)


@bug("gateway", "dying gateways", "I1")
def disconnect_does_not_cancel() -> None:
    from workers.gateway.backend.active_request import ActiveRequest

    skip(ActiveRequest, "on_disconnect")


@bug("gateway", "frozen gateways", "I10")
def cancels_request_read_elsewhere() -> None:
    from shared.bus.bus import Bus
    from shared.state import request_registry

    async def always(bus: Bus, request_id: str, holder: str) -> bool:
        return True

    replace_attribute(request_registry, "unregister", always)


@bug("gateway", "frozen gateways", "I8")
def subscription_leaks() -> None:
    from shared.bus.bus import Bus

    skip(Bus, "unsubscribe")
