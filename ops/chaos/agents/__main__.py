"""Kill and stop agents while they call a tool that counts, and check every response.

python -m ops.chaos.agents --kills 500
python -m ops.chaos.agents --bugs
python -m ops.chaos.agents --restarts
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from ops.chaos.agents.bugs import BUGS
from ops.chaos.agents.checks import AgentRun, violations
from ops.chaos.agents.restarts import Restarts
from ops.chaos.agents.scripted_model import MODEL, ScriptedModel
from ops.chaos.agents.tool_server import MAX_PAUSE_S, CountingServer
from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.config import DeliveryConfig, NatsConfig
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.items import MessageItem
from shared.protocol.requests import GenerateRequest
from shared.protocol.steps import Begun, ResponseTask, ServerUse, decode_step
from shared.state.step_log import StepLog

TURNS = 2
CALLS = 2
"""Calls of one turn, which are made at the same time."""
ACK_WAIT_S = 1.0
# After a fault, the responses of an agent come back after the ack wait.
END_S = 60.0
TICK_S = 0.5
REPEATABLE, PLAIN = "safe", "plain"


def script(request: GenerateRequest, request_id: str) -> str:
    """Book twice in each turn but the last one."""
    response_id, _, turn = request_id.rpartition("-t")
    if int(turn) >= TURNS:
        return "Booked."
    (tool, *_) = request.tools
    calls = [
        {"name": tool.function.name, "arguments": {"call": f"{response_id}/{turn}/{number}"}}
        for number in range(CALLS)
    ]
    return "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


class AgentScenario:
    """A broker, a scripted model, a counting tool, and two agents that die and stand still."""

    def __init__(self, folder: Path, bug: str, seed: int) -> None:
        self._folder, self._bug = folder, bug
        self._rng = random.Random(seed)
        self._broker = EmbeddedServer(folder / "nats")
        self._tool = CountingServer(random.Random(seed))
        self._agents: list[subprocess.Popen[bytes]] = []

    async def run(self, faults: int, at_once: int) -> list[str]:
        """Return all violations."""
        self._broker.start()
        server = {"url": self._tool.start(), "require_approval": "never"}
        servers = {PLAIN: server, REPEATABLE: server | {"idempotency": "header"}}
        tree = {
            "models": {MODEL: {"path": str(self._folder)}},
            "nats": {"unchecked": True},
            "delivery": {"ack_wait_s": ACK_WAIT_S, "drain_s": 1.0},
            "agent": {"servers": servers, "mcp_networks": ["127.0.0.0/8"]},
        }
        (self._folder / "pagemill.yaml").write_text(json.dumps(tree))
        bus = await Bus.connect(self._broker.url, "chaos")
        await bus.prepare(NatsConfig(unchecked=True), DeliveryConfig())
        model = ScriptedModel(self._broker.url, script)
        model.start()
        self._agents = [self._start_agent() for _ in range(2)]
        found: list[str] = []
        try:
            for number in range(faults):
                found += await self._round(bus, number, at_once)
        finally:
            for agent in self._agents:
                agent.kill()
                agent.wait()
            model.stop()
            await bus.close()
            self._broker.stop()
        return found

    def _start_agent(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "ops.chaos.agents.worker"]
        config = str(self._folder / "pagemill.yaml")
        with (self._folder / "agents.log").open("ab") as log:
            return subprocess.Popen([*command, config, self._broker.url, self._bug], stderr=log)

    async def _round(self, bus: Bus, number: int, at_once: int) -> list[str]:
        """Begin responses, let one fault happen, and check them when they have ended."""
        logs = [await self._begin(bus, number, i) for i in range(at_once)]
        await asyncio.sleep(self._rng.uniform(0, 2.5 * MAX_PAUSE_S))
        victim = self._rng.randrange(len(self._agents))
        if number % 4 == 3:
            # A worker that stands still is taken for dead, and wakes up again.
            os.kill(self._agents[victim].pid, signal.SIGSTOP)
            await asyncio.sleep(2.5 * ACK_WAIT_S)
            os.kill(self._agents[victim].pid, signal.SIGCONT)
        else:
            self._agents[victim].kill()
            self._agents[victim].wait()
            self._agents[victim] = self._start_agent()
        ends = asyncio.gather(*(_read_to_end(log) for log in logs), return_exceptions=True)
        for _ in range(round(END_S / TICK_S)):  # A pause of this process is one tick.
            await asyncio.wait({ends}, timeout=TICK_S)
            if ends.done():
                break
        # The checks name the responses that have not ended, or have no order.
        ends.cancel()
        await asyncio.wait({ends})
        await asyncio.sleep(0.5)  # Calls of a worker that wakes up.
        return [text for log in logs for text in await self._check(bus, log)]

    async def _begin(self, bus: Bus, number: int, i: int) -> StepLog:
        label = REPEATABLE if i % 3 == 0 else PLAIN
        log = StepLog(bus, "", f"resp_{number}-{i}")
        await log.append(
            Begun(
                0,
                1,
                MODEL,
                "",
                [MessageItem("user", "Book.", "msg_1")],
                {},
                servers=[ServerUse(label, approval="never")],
                parser="hermes",
            )
        )
        task = to_json(ResponseTask(log.response_id, ""))
        await bus.publish(subjects.response(MODEL), task, log.response_id)
        return log

    async def _check(self, bus: Bus, log: StepLog) -> list[str]:
        stored = await bus.read(subjects.STEPS_STREAM, subjects.steps("", log.response_id))
        steps = [step for message in stored if (step := decode_step(message.data)) is not None]
        name = log.response_id
        made = {
            (turn, number): self._tool.made[f"{name}/{turn}/{number}"]
            for turn in range(TURNS)
            for number in range(CALLS)
        }
        begun = steps[0]
        assert isinstance(begun, Begun)
        repeatable = begun.servers[0].label == REPEATABLE
        return list(violations(AgentRun(log.response_id, steps, made, repeatable)))


async def _read_to_end(log: StepLog) -> None:
    async for _ in log.follow():
        pass


def run_scenario(bug: str, faults: int, at_once: int, seed: int) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="pagemill-agents-") as name:
        return asyncio.run(AgentScenario(Path(name), bug, seed).run(faults, at_once))


def run_restarts() -> list[str]:
    with tempfile.TemporaryDirectory(prefix="pagemill-restarts-") as name:
        return asyncio.run(Restarts(Path(name), CountingServer(random.Random(1))).run())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bug", choices=[*BUGS], default="")
    parser.add_argument("--bugs", action="store_true", help="plant each bug; each must be found")
    parser.add_argument(
        "--restarts", action="store_true", help="kill gateways, and restart all while a call waits"
    )
    arguments = parser.parse_args()
    console, began = Console(), time.monotonic()
    if arguments.restarts:
        found = run_restarts()
        console.print(*found, f"{len(found)} violations", sep="\n")
        return bool(found)
    if not arguments.bugs:
        bug, kills = arguments.bug, arguments.kills
        found = run_scenario(bug, kills, arguments.at_once, arguments.seed)
        for text in found[:20]:
            console.print(text)
        took_s = time.monotonic() - began
        responses = kills * arguments.at_once
        console.print(
            f"{kills} faults, {responses} responses, {len(found)} violations, {took_s:.0f} s"
        )
        return bool(found)
    missed = 0
    for bug, (_, expected) in BUGS.items():
        found = run_scenario(bug, 8, arguments.at_once, arguments.seed)
        of_bug = [text for text in found if text.startswith(expected)]
        missed += not of_bug
        console.print(f"{bug}: {of_bug[0] if of_bug else 'NOT FOUND'}")
    return missed


if __name__ == "__main__":
    sys.exit(main())
