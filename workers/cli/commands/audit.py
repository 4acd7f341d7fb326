"""The command `pagemill audit`."""

from datetime import datetime
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from shared.protocol.audit import Action
from shared.state import audit_log
from shared.state.audit_log import AuditEntry
from workers.cli.broker import connected
from workers.cli.options import ConfigFile, Json, NatsUrl, find_login
from workers.cli.terminal import format_time, print_columns, print_json

HEADER = ("time (UTC)", "action", "outcome", "identity", "by", "tenant", "target")


async def audit(
    *,
    action: Action | None = None,
    by: str | None = None,
    tenant: str | None = None,
    since: datetime | None = None,
    limit: Annotated[int, Parameter(validator=Number(gte=1))] = 50,
    json: Json = False,
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """List the audit log: actions of operators and approvers, the newest first.

    Parameters
    ----------
    action
        List only this action.
    by
        List only actions by this user, such as `alice@host`, or by this API key.
    tenant
        List only actions on this tenant's requests.
    since
        List only actions at or after this time, such as 2026-11-23T08:00.
    limit
        Maximum number of entries.
    """

    def is_wanted(entry: AuditEntry) -> bool:
        record = entry.record
        return (
            action in (None, record.action)
            and by in (None, record.by)
            and tenant in (None, record.tenant)
        )

    entries: list[AuditEntry] = []
    async with connected(find_login(config, nats), "audit") as bus:
        async for entry in audit_log.read_newest(bus):
            if since is not None and entry.at_ms < 1000 * since.timestamp():
                break
            if is_wanted(entry):
                entries.append(entry)
            if len(entries) == limit:
                break
    if json:
        for entry in entries:
            print_json(entry._asdict())
    elif entries:
        print_columns([HEADER, *map(_cells, entries)])
    return 0


def _cells(entry: AuditEntry) -> tuple[str, ...]:
    record = entry.record
    return (
        format_time(entry.at_ms),
        record.action,
        record.outcome,
        entry.identity,
        record.by,
        record.tenant or "-",
        record.target,
    )
