"""Decisions on approval requests. Each is recorded once, in the log of the requesting response."""

import contextlib
from collections.abc import Sequence

from shared.bus.bus import Bus
from shared.errors import Fenced, InvalidRequest
from shared.protocol.audit import AuditRecord
from shared.protocol.items import ApprovalResponseItem, Item
from shared.protocol.steps import ApprovedCall, Decided, Ended
from shared.state import audit_log
from shared.state.step_log import StepLog, open_log
from workers.gateway.backend.responses import publish_task
from workers.gateway.http.auth import Caller
from workers.gateway.http.errors import ApprovalUsed


async def decide(
    bus: Bus, caller: Caller, items: Sequence[Item], logs: Sequence[StepLog], response_id: str
) -> list[ApprovedCall]:
    """Record the decisions of a response's input, and return the calls that are approved.

    Tools and arguments come from the stored approval requests, never from the client. A decision
    of a response that has not begun does not count, because its gateway could not store it. Raises
    ApprovalUsed for an approval request on which another response has decided, and InvalidRequest
    for one that is not in the conversation.
    """
    approved: list[ApprovedCall] = []
    for i, item in enumerate(items):
        if not isinstance(item, ApprovalResponseItem):
            continue
        field = f"input[{i}].approval_request_id"
        name = item.approval_request_id
        log = next((log for log in logs if name in log.state.approvals), None)
        if log is None:
            raise InvalidRequest("this conversation has no such approval request", field=field)
        await _record(bus, caller, log, Decided(0, name, item.approve, response_id), field)
        approval = log.state.approvals[name]
        if item.approve:
            approved.append(
                ApprovedCall(
                    name,
                    approval.item.server_label,
                    approval.item.name,
                    approval.item.arguments,
                    approval.schema_digest,
                )
            )
    return approved


async def _record(bus: Bus, caller: Caller, log: StepLog, decision: Decided, field: str) -> None:
    while True:
        earlier = log.state.decisions.get(decision.approval_id)
        # A client that has got no answer may send the same response again.
        if earlier is not None and (earlier.by, earlier.approve) == (decision.by, decision.approve):
            return
        if earlier is not None and (
            earlier.by == decision.by or not await _prevent_begin(bus, log.tenant, earlier.by)
        ):
            raise ApprovalUsed(
                f"the response {earlier.by} has decided on this approval request", field=field
            )
        # The audit record comes first, so that no decision takes effect without one.
        target = f"{decision.approval_id} {'approved' if decision.approve else 'denied'}"
        await audit_log.write(
            bus, "gateway", AuditRecord("approval", caller.name, target, caller.tenant)
        )
        log.overtaken = False  # The present decisions were checked above.
        with contextlib.suppress(Fenced):
            await log.append(decision)
            return


async def _prevent_begin(bus: Bus, tenant: str, response_id: str) -> bool:
    """Prevent a response from beginning, unless it has begun. Return whether it is prevented.

    The task of a response that has begun is published again, in case its gateway died before that.
    Raises Overloaded or Unavailable.
    """
    log = await open_log(bus, tenant, response_id)
    if log.state.num_steps == 0:
        with contextlib.suppress(Fenced):
            await log.append(Ended(0, "cancelled", int(bus.now_ms() / 1000)))
    if log.state.begun is None:
        return True
    if log.state.ended is None:
        await publish_task(bus, log.state.begun, response_id)
    return False
