"""Bugs in the separation of tenants, and in the count of workers' deaths."""

from collections.abc import Collection, Sequence
from typing import Any

from ops.chaos.bugs.registry import bug
from ops.chaos.patching import replace_attribute, wrap


@bug("gateway", "tenants", "I17")
def requests_of_all_tenants_are_found() -> None:
    from starlette.requests import Request

    from shared.protocol.names import scoped_id
    from shared.state import request_registry
    from workers.gateway.app import AppContext
    from workers.gateway.backend.active_request import ActiveRequest, find_request
    from workers.gateway.http.auth import Caller
    from workers.gateway.routes import requests

    async def found(context: AppContext, request: Request, caller: Caller) -> ActiveRequest:
        name = request.path_params["id"]
        for key in context.config.gateway.api_keys:
            bus_id = scoped_id(name, key.name if key.tenant is None else key.tenant)
            record = await request_registry.find(context.bus, bus_id)
            if record is not None:
                request.scope["request_id"] = name, True
                return ActiveRequest(context, name, record, request.scope["endpoint_path"])
        return await find_request(context, request, caller)

    replace_attribute(requests, "find_request", found)


@bug("engine", "resumes with few deaths allowed", "I10")
def deaths_count_despite_progress() -> None:
    """A long answer fails when two workers have died, although each wrote a part of it."""
    from msgspec.structs import replace

    from shared.protocol.messages import AttemptRecord
    from shared.stage import retry

    @wrap(retry, "recount")
    def all_deaths(
        recount: Any,
        records: Sequence[AttemptRecord],
        stage: str,
        log_len: int,
        dead: Collection[str],
    ) -> Any:
        return recount([replace(a, log_len=0) for a in records], stage, 0, dead)
