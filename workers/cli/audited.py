"""Records the actions of commands and their outcome in the audit log."""

import contextlib
import getpass
import platform
from collections.abc import AsyncIterator

from shared.bus.bus import Bus
from shared.bus.login import Login
from shared.errors import PagemillError
from shared.protocol.audit import DONE, Action, AuditRecord
from shared.protocol.permissions import OPERATOR
from shared.state import audit_log
from workers.cli.broker import connected
from workers.cli.terminal import print_note


@contextlib.asynccontextmanager
async def audited(
    bus: Bus, action: Action, target: str = "", tenant: str = ""
) -> AsyncIterator[None]:
    """Record the action of the body in the audit log when it has ended.

    Raises Unavailable if the action was done and cannot be recorded.
    """
    try:
        yield
    except BaseException as error:
        outcome = error.code if isinstance(error, PagemillError) else type(error).__name__
        with contextlib.suppress(PagemillError):  # The first error is raised.
            await _write(bus, action, target, tenant, outcome)
        raise
    await _write(bus, action, target, tenant, DONE)


@contextlib.asynccontextmanager
async def audited_if_possible(login: Login, action: Action, target: str) -> AsyncIterator[None]:
    """Record an action on files if a broker answers. The action itself needs no broker."""
    async with contextlib.AsyncExitStack() as stack:
        try:
            bus = await stack.enter_async_context(connected(login, "audit"))
        except PagemillError as error:
            print_note(f"not in the audit log: {error.message}")
        else:
            await stack.enter_async_context(audited(bus, action, target))
        yield


async def _write(bus: Bus, action: Action, target: str, tenant: str, outcome: str) -> None:
    by = f"{getpass.getuser()}@{platform.node()}"
    await audit_log.write(bus, OPERATOR, AuditRecord(action, by, target, tenant, outcome))
