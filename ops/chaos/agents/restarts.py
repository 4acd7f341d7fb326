"""Gateways that are killed after each event of a stream, and a restart of all while approvals wait.

G1  the events before a kill and those of another gateway behind it are those of a whole stream
G2  what waits for approval is called once after the restart, and not before
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from ops.chaos.agents.scripted_model import MODEL, ScriptedModel
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
        self._system.broker.start()
        model = ScriptedModel(self._system.broker.url, script)
        await self._system.start()
        model.start()
        try:
            found = await self._kill_gateways()
            self._system.kill()
            model.stop()
            # A scripted model has no drain, so it is away while a response waits.
            return found + await self._restart_all()
        finally:
            self._system.kill()
            self._system.broker.stop()

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
                found.append(f"G1 {name}: killed behind {number}, the streams are not the whole")
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
                        self._system.kill("gateway")
                    break
        return seen

    async def _events(self, response_id: str, after: str = "") -> list[Any]:
        url = f"{PATH}/{response_id}?stream=true{after}"
        async with self._system.http() as http, http.stream("GET", url) as got:
            return [event async for event in _events_of(got)]

    # -- G2 ---------------------------------------------------------------------------------------

    async def _restart_all(self) -> list[str]:
        found: list[str] = []
        model = ScriptedModel(self._system.broker.url, script)
        model.start()
        await self._system.start()
        tool = {"type": "mcp", "server_label": SERVER}
        async with self._system.http() as http:
            body = {"model": MODEL, "input": "Book.", "tools": [tool]}
            asked = (await http.post(PATH, json=body)).json()
        requests = [item for item in asked["output"] if item["type"] == "mcp_approval_request"]
        model.stop()
        self._system.kill()
        self._system.broker.kill()
        if len(requests) != 2 or any(self._tool.made[f"{asked['id']}/{n}"] for n in range(2)):
            found.append("G2 two calls should wait, and none be made")
        self._system.broker.start()
        model = ScriptedModel(self._system.broker.url, script)
        model.start()
        await self._system.start()
        given = [
            {"type": "mcp_approval_response", "approval_request_id": one["id"], "approve": True}
            for one in requests
        ]
        body = {"model": MODEL, "input": given, "tools": [tool]}
        body |= {"previous_response_id": asked["id"]}
        async with self._system.http() as http:
            # The same decision from several clients at the same time.
            named = [{"idempotency-key": f"decision-{n}"} for n in range(4)]
            sent = [http.post(PATH, json=body, headers=headers) for headers in named]
            answers = await asyncio.gather(*sent)
        model.stop()
        statuses = sorted(answer.status_code for answer in answers)
        made = [self._tool.made[f"{asked['id']}/{number}"] for number in range(2)]
        if made != [1, 1]:
            found.append(f"G2 the calls were made {made} times")
        if statuses[:1] != [200] or statuses.count(200) > 1:
            found.append(f"G2 one decision should count: {statuses}")
        return found


async def _events_of(got: httpx.Response) -> AsyncIterator[Any]:
    async for line in got.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))
