"""Decisions on approval requests: each is recorded once, in the log of the response that asked."""

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

    What is called comes from the record of the request, never from the client. A decision for a
    response that was never begun is free: its gateway could not store it. Raises ApprovalUsed
    for a request that another response has decided on, and InvalidRequest for one that the
    conversation does not have.
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
        asked = log.state.approvals[name]
        if item.approve:
            approved.append(
                ApprovedCall(
                    name,
                    asked.item.server_label,
                    asked.item.name,
                    asked.item.arguments,
                    asked.schema_digest,
                )
            )
    return approved


async def _record(bus: Bus, caller: Caller, log: StepLog, decision: Decided, field: str) -> None:
    while True:
        known = log.state.decisions.get(decision.approval_id)
        # The same response may come a second time, because its client has seen no answer.
        if known is not None and (known.by, known.approve) == (decision.by, decision.approve):
            return
        if known is not None and (
            known.by == decision.by or not await _is_barred(bus, log.tenant, known.by)
        ):
            raise ApprovalUsed(
                f"this approval request has been decided on by {known.by}", field=field
            )
        # First, so that no decision has an effect that is not recorded.
        target = f"{decision.approval_id} {'approved' if decision.approve else 'denied'}"
        await audit_log.write(
            bus, "gateway", AuditRecord("approval", caller.name, target, caller.tenant)
        )
        log.overtaken = False  # The decisions that it has now are known.
        with contextlib.suppress(Fenced):
            await log.append(decision)
            return


async def _is_barred(bus: Bus, tenant: str, response_id: str) -> bool:
    """Make sure that a response which was never begun cannot begin any more.

    Return False for one that was begun; the agents get it, in case they have not. Raises Overloaded
    or Unavailable.
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
