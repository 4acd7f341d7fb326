"""Gateways that are killed after each event, and a restart of all processes during approvals.

G1  the events before a kill and the later events from another gateway make one whole stream
G2  a call that waits for approval is made once after the restart, and not before
"""

import asyncio
import json
import random
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from ops.chaos.agents.beginnings import PATH, Beginnings
from ops.chaos.agents.scripted_model import MODEL
from ops.chaos.agents.system import AgentSystem
from ops.chaos.agents.tool_server import CountingServer
from shared.protocol.requests import GenerateRequest

SERVER = "calc"


def script(request: GenerateRequest, request_id: str) -> str:
    """Say something, book twice, and end."""
    response_id = request_id.rpartition("~t")[0]
    if any(message.role == "tool" for message in request.messages or []):
        return "Both are booked."
    (tool, *_) = request.tools
    calls = [
        {"name": tool.function.name, "arguments": {"call": f"{response_id}/{number}"}}
        for number in range(2)
    ]
    calls_text = "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    return f"I book two of them. {calls_text}"


class Restarts:
    """The two scenarios, one after the other."""

    def __init__(self, folder: Path, tool: CountingServer) -> None:
        self._tool = tool
        servers = {SERVER: {"url": tool.start()}}
        self._system = AgentSystem(folder, {"servers": servers}, ack_wait_s=1.0)

    async def run(self) -> list[str]:
        """Return all violations."""
        async with self._system.running(script):
            await self._system.start()
            violations = await self._kill_gateways()
        return violations + await self._restart_all()

    # -- G1 ---------------------------------------------------------------------------------------

    async def _kill_gateways(self) -> list[str]:
        number, violations = 0, []
        while True:
            name = f"gateways-{number}"
            events = await self._first_events(name, number + 1)
            has_ended = events[-1]["type"] == "response.completed"
            if not has_ended:
                await self._system.start("gateway")
            response_id = events[0]["response"]["id"]
            rest = await self._events(
                response_id, f"&starting_after={events[-1]['sequence_number']}"
            )
            whole = await self._events(response_id)
            if events + rest != whole:
                violations.append(f"G1 {name}: killed after event {number}, it has other streams")
            if has_ended:
                return violations
            number += 1

    async def _first_events(self, name: str, count: int) -> list[Any]:
        """Begin a response, and return its first events; the stream is left open for the kill."""
        tool = {"type": "mcp", "server_label": SERVER, "require_approval": "never"}
        body = {"model": MODEL, "input": "Book.", "tools": [tool], "stream": True}
        headers = {"idempotency-key": name}
        events: list[Any] = []
        async with (
            self._system.http() as http,
            http.stream("POST", PATH, json=body, headers=headers) as got,
        ):
            async for event in _events_of(got):
                events.append(event)
                if len(events) == count:
                    if event["type"] != "response.completed":
                        await self._system.kill("gateway")
                    break
        return events

    async def _events(self, response_id: str, after: str = "") -> list[Any]:
        url = f"{PATH}/{response_id}?stream=true{after}"
        async with self._system.http() as http, http.stream("GET", url) as got:
            return [event async for event in _events_of(got)]

    # -- G2 ---------------------------------------------------------------------------------------

    async def _restart_all(self) -> list[str]:
        violations: list[str] = []
        tool = {"type": "mcp", "server_label": SERVER}
        async with self._system.running(script) as model:
            await self._system.start()
            async with self._system.http() as http:
                body = {"model": MODEL, "input": "Book.", "tools": [tool]}
                waiting = (await http.post(PATH, json=body)).json()
            # A scripted model has no drain, so it must end before the broker does.
            model.stop()
            await self._system.kill()
            self._system.broker.kill()
        approvals = [item for item in waiting["output"] if item["type"] == "mcp_approval_request"]
        calls = [f"{waiting['id']}/{number}" for number in range(2)]
        if len(approvals) != 2 or any(self._tool.num_made[call] for call in calls):
            violations.append("G2 two calls should wait, and none be made")
        decisions = [
            {"type": "mcp_approval_response", "approval_request_id": item["id"], "approve": True}
            for item in approvals
        ]
        body = {"model": MODEL, "input": decisions, "tools": [tool]}
        body |= {"previous_response_id": waiting["id"]}
        async with self._system.running(script):
            await self._system.start()
            async with self._system.http() as http:
                # The same decision from several clients at the same time.
                named = [{"idempotency-key": f"decision-{n}"} for n in range(4)]
                posts = [http.post(PATH, json=body, headers=headers) for headers in named]
                answers = await asyncio.gather(*posts)
        statuses = sorted(answer.status_code for answer in answers)
        num_made = [self._tool.num_made[call] for call in calls]
        if num_made != [1, 1]:
            violations.append(f"G2 the calls were made {num_made} times")
        if statuses[:1] != [200] or statuses.count(200) > 1:
            violations.append(f"G2 one decision should count: {statuses}")
        return violations


async def _events_of(got: httpx.Response) -> AsyncIterator[Any]:
    async for line in got.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def run_restarts() -> list[str]:
    """Run these scenarios and `beginnings`, and return all violations."""
    with tempfile.TemporaryDirectory(prefix="pagemill-restarts-") as folder:
        tool = CountingServer(random.Random(1))
        violations = asyncio.run(Restarts(Path(folder), tool).run())
    with tempfile.TemporaryDirectory(prefix="pagemill-beginnings-") as folder:
        return violations + asyncio.run(Beginnings(Path(folder)).run())
