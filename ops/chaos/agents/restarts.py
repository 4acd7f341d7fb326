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

from ops.chaos.agents.beginnings import Beginnings
from ops.chaos.agents.scripted_model import MODEL
from ops.chaos.agents.system import AgentSystem
from ops.chaos.agents.tool_server import CountingServer
from shared.protocol.requests import GenerateRequest

PATH = "/v1/responses"
SERVER = "calc"


def script(request: GenerateRequest, request_id: str) -> str:
    """Say something, book twice, and end."""
    response_id = request_id.rpartition("-t")[0]
    if any(message.role == "tool" for message in request.messages or []):
        return "Both are booked."
    (tool, *_) = request.tools
    calls = [
        {"name": tool.function.name, "arguments": {"call": f"{response_id}/{number}"}}
        for number in range(2)
    ]
    made = "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    return f"I book two of them. {made}"


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
            found = await self._kill_gateways()
        return found + await self._restart_all()

    # -- G1 ---------------------------------------------------------------------------------------

    async def _kill_gateways(self) -> list[str]:
        number, found = 0, []
        while True:
            name = f"gateways-{number}"
            seen = await self._first_events(name, number + 1)
            has_ended = seen[-1]["type"] == "response.completed"
            if not has_ended:
                await self._system.start("gateway")
            response_id = seen[0]["response"]["id"]
            rest = await self._events(response_id, f"&starting_after={seen[-1]['sequence_number']}")
            whole = await self._events(response_id)
            if seen + rest != whole:
                found.append(f"G1 {name}: killed after event {number}, it has other streams")
            if has_ended:
                return found
            number += 1

    async def _first_events(self, name: str, count: int) -> list[Any]:
        """Begin a response, and return its first events; the stream is left open for the kill."""
        tool = {"type": "mcp", "server_label": SERVER, "require_approval": "never"}
        body = {"model": MODEL, "input": "Book.", "tools": [tool], "stream": True}
        headers = {"idempotency-key": name}
        seen: list[Any] = []
        async with (
            self._system.http() as http,
            http.stream("POST", PATH, json=body, headers=headers) as got,
        ):
            async for event in _events_of(got):
                seen.append(event)
                if len(seen) == count:
                    if event["type"] != "response.completed":
                        await self._system.kill("gateway")
                    break
        return seen

    async def _events(self, response_id: str, after: str = "") -> list[Any]:
        url = f"{PATH}/{response_id}?stream=true{after}"
        async with self._system.http() as http, http.stream("GET", url) as got:
            return [event async for event in _events_of(got)]

    # -- G2 ---------------------------------------------------------------------------------------

    async def _restart_all(self) -> list[str]:
        found: list[str] = []
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
        if len(approvals) != 2 or any(self._tool.made[call] for call in calls):
            found.append("G2 two calls should wait, and none be made")
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
                sent = [http.post(PATH, json=body, headers=headers) for headers in named]
                answers = await asyncio.gather(*sent)
        statuses = sorted(answer.status_code for answer in answers)
        made = [self._tool.made[call] for call in calls]
        if made != [1, 1]:
            found.append(f"G2 the calls were made {made} times")
        if statuses[:1] != [200] or statuses.count(200) > 1:
            found.append(f"G2 one decision should count: {statuses}")
        return found


async def _events_of(got: httpx.Response) -> AsyncIterator[Any]:
    async for line in got.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def run_restarts() -> list[str]:
    """Run these scenarios and `beginnings`, and return all violations."""
    with tempfile.TemporaryDirectory(prefix="pagemill-restarts-") as folder:
        tool = CountingServer(random.Random(1))
        found = asyncio.run(Restarts(Path(folder), tool).run())
    with tempfile.TemporaryDirectory(prefix="pagemill-beginnings-") as folder:
        return found + asyncio.run(Beginnings(Path(folder)).run())
