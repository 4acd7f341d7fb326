"""Gateways that die while they begin a response: between its first step, its task and its turn.

G3  a response that has begun ends once, and one that has not begun does not exist; no first turn is
    generated twice; a client that repeats a request under the same name gets the response
"""

import asyncio
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from ops.chaos.agents.checks import AgentRun, violations
from ops.chaos.agents.scripted_model import MODEL, ScriptedModel
from ops.chaos.agents.system import AgentSystem
from ops.chaos.agents.worker import STEP, TASK, TURN
from shared.bus.bus import Bus
from shared.bus.connection import BROKER_DEADLINE_S
from shared.protocol import subjects
from shared.protocol.requests import GenerateRequest
from shared.protocol.steps import decode_step, turn_id

PATH = "/v1/responses"
BODY = {"model": MODEL, "input": "Hello."}
DEATH_S = 60.0
# A gateway gives a named request to agents after its first step, and they publish the first turn.
NAMED = ({STEP}, {STEP, TASK})
UNNAMED = (
    {STEP},
    {TASK},
    {TURN},
    {STEP, TASK},
    {STEP, TURN},
    {TASK, TURN},
    {STEP, TASK, TURN},
)


def script(request: GenerateRequest, request_id: str) -> str:
    return "Hello yourself."


class _Beginning(Struct):
    """Parts of a response that a gateway stored before it died."""

    parts: set[str]
    response_id: str
    headers: dict[str, str]

    @property
    def ends_well(self) -> bool:
        """Whether the response completes without its client."""
        return {STEP, TASK} <= self.parts


class Beginnings:
    """Kills gateways after each part of a beginning, and checks the ends of the responses."""

    def __init__(self, folder: Path) -> None:
        # After this time and a pause, a gateway ends a response that no agent has continued.
        self._system = AgentSystem(folder, {}, 1.0, default_timeout_s=60.0)
        self._model: ScriptedModel

    async def run(self) -> list[str]:
        """Return all violations."""
        async with self._system.running(script) as self._model, self._system.bus() as bus:
            await self._system.start()
            named = await self._kill_and_check(bus, NAMED, are_named=True)
            return named + await self._kill_and_check(bus, UNNAMED, are_named=False)

    async def _kill_and_check(
        self, bus: Bus, beginnings: Sequence[set[str]], *, are_named: bool
    ) -> list[str]:
        left = [await self._kill_after(parts, is_named=are_named) for parts in beginnings]
        await self._system.start("gateway")
        await asyncio.sleep(BROKER_DEADLINE_S + 1)  # An agent waits this long for a first step.
        return [text for beginning in left for text in await self._violations(bus, beginning)]

    async def _kill_after(self, parts: set[str], *, is_named: bool) -> _Beginning:
        headers = {"idempotency-key": secrets.token_hex(8)} if is_named else {}
        await self._system.kill("gateway")
        report = await self._system.start_watched("gateway", "gateway", dies_after=parts)
        async with self._system.http() as http:
            request = asyncio.create_task(http.post(PATH, json=BODY, headers=headers))
            async with asyncio.timeout(DEATH_S):
                await self._system.processes.running["gateway"].wait()
            await asyncio.gather(request, return_exceptions=True)
        return _Beginning(parts, report.read_text(), headers)

    async def _violations(self, bus: Bus, beginning: _Beginning) -> list[str]:
        name = f"{beginning.response_id}, {'+'.join(sorted(beginning.parts))}"
        async with self._system.http() as http:
            if beginning.headers:
                again = await http.post(PATH, json=BODY, headers=beginning.headers)
                answer: dict[str, Any] = again.json()
                if (answer.get("id"), answer.get("status")) != (beginning.response_id, "completed"):
                    return [f"G3 {name}: the repeated request got {again.text}"]
            # A stream follows a response to its end, also to a failed one.
            followed = await http.get(f"{PATH}/{beginning.response_id}?stream=true")
        num_answers = self._model.answered[turn_id("", beginning.response_id, 0)]
        faults = [f"G3 {name}: {num_answers} answers"] if num_answers > 1 else []
        has_begun = beginning.headers or STEP in beginning.parts
        if followed.is_success != bool(has_begun):
            faults.append(f"G3 {name}: {followed.text}")
        stored = await bus.read(subjects.STEPS_STREAM, subjects.steps("", beginning.response_id))
        steps = [step for message in stored if (step := decode_step(message.data)) is not None]
        if has_begun:
            must_complete = bool(beginning.headers) or beginning.ends_well
            run = AgentRun(name, steps, {}, may_repeat=False, must_complete=must_complete)
            faults += [f"G3 {text}" for text in violations(run)]
        elif steps:
            faults.append(f"G3 {name}: it has steps")
        return faults
