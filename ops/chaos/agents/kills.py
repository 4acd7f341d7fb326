"""Agents that die and stand still while they call a tool that counts."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

from msgspec import Struct

from ops.chaos.agents.checks import AgentRun, violations
from ops.chaos.agents.process import AgentProcess
from ops.chaos.agents.scripted_model import MODEL, ScriptedModel
from ops.chaos.agents.tool_server import MAX_PAUSE_S, CountingServer
from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.config.schema import DeliveryConfig, NatsConfig
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.items import MessageItem
from shared.protocol.requests import GenerateRequest
from shared.protocol.steps import Begun, ResponseTask, Result, Sending, ServerUse, decode_step
from shared.state.step_log import StepLog

TURNS = 2
CALLS = 2
"""Calls of one turn, which are made at the same time."""
ACK_WAIT_S = 1.0
START_S = 60.0
# After a fault, the responses of an agent come back after the ack wait.
END_S = 60.0
TICK_S = 0.5
POLL_S = 0.01
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


class Verdict(Struct):
    """What was found, and how much the faults have hit."""

    num_faults: int = 0
    """Faults that have hit an agent at work; each has its responses checked."""
    num_misses: int = 0
    """Faults that came too late, and were drawn anew."""
    num_responses: int = 0
    num_held: int = 0
    """Responses that agents held when a fault hit them."""
    num_unknown: int = 0
    """Calls of which nobody knows the outcome: the fault fell between the step and the result."""
    num_repeated: int = 0
    violations: list[str] = []

    def __str__(self) -> str:
        return (
            f"{self.num_faults} faults hit agents at work, which held {self.num_held} of"
            f" {self.num_responses} responses; {self.num_misses} came too late and were drawn anew;"
            f" {self.num_unknown} calls with an unknown outcome, {self.num_repeated} made again;"
            f" {len(self.violations)} violations"
        )


class AgentScenario:
    """A broker, a scripted model, a counting tool, and two agents that die and stand still."""

    def __init__(self, folder: Path, bug: str, seed: int) -> None:
        self._folder, self._bug = folder, bug
        self._rng = random.Random(seed)
        self._broker = EmbeddedServer(folder / "nats")
        self._tool = CountingServer(random.Random(seed))
        self._agents: list[AgentProcess] = []
        self._num_started = 0
        self._num_rounds = 0
        self._verdict = Verdict()

    async def run(self, faults: int, at_once: int, expected: str = "") -> Verdict:
        """Let so many faults hit, or fewer once a violation begins with the `expected` text."""
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
        await bus.streams.prepare(NatsConfig(unchecked=True), DeliveryConfig())
        model = ScriptedModel(self._broker.url, script)
        model.start()
        self._agents = [self._start_agent() for _ in range(2)]
        try:
            while self._verdict.num_faults < faults:
                await self._round(bus, at_once)
                if expected and any(v.startswith(expected) for v in self._verdict.violations):
                    break
        finally:
            for agent in self._agents:
                agent.kill()
            model.stop()
            await bus.close()
            self._broker.stop()
        return self._verdict

    def _start_agent(self) -> AgentProcess:
        self._num_started += 1
        report = self._folder / f"agent-{self._num_started}"
        config = self._folder / "pagemill.yaml"
        return AgentProcess(config, self._broker.url, self._bug, report)

    async def _round(self, bus: Bus, at_once: int) -> None:
        """Begin responses, let one fault happen, and check them when they have ended.

        A fault that comes when no agent holds a response any more has tested nothing.
        """
        await self._until_ready(bus)
        logs = [await self._begin(bus, i) for i in range(at_once)]
        self._num_rounds += 1
        await self._until_taken(logs)
        await asyncio.sleep(self._rng.uniform(0, 2.5 * MAX_PAUSE_S))
        held = await self._strike()
        self._verdict.num_held += len(held)
        if held:
            self._verdict.num_faults += 1
        else:
            self._verdict.num_misses += 1
        await _await_ends(logs)
        await asyncio.sleep(0.5)  # Calls of a worker that wakes up.
        for log in logs:
            await self._check(bus, log)

    async def _until_ready(self, bus: Bus) -> None:
        """Wait for both agents: one that is still starting holds nothing."""
        pids = {agent.pid for agent in self._agents}

        async def are_ready() -> bool:
            return pids <= {beat.pid for beat in await bus.heartbeats.read()}

        await _until(are_ready)

    async def _until_taken(self, logs: list[StepLog]) -> None:
        names = {log.response_id for log in logs}

        async def is_one_taken() -> bool:
            return any(agent.taken & names for agent in self._agents)

        await _until(is_one_taken)

    async def _strike(self) -> set[str]:
        """Kill or stop an agent, and return the responses that it held."""
        victim = self._rng.choice([agent for agent in self._agents if agent.held] or self._agents)
        if self._num_rounds % 4:
            victim.kill()
            self._agents[self._agents.index(victim)] = self._start_agent()
            return victim.held
        # A worker that stands still is taken for dead, and wakes up again.
        victim.stop()
        held = victim.held
        await asyncio.sleep(2.5 * ACK_WAIT_S)
        victim.wake()
        return held

    async def _begin(self, bus: Bus, i: int) -> StepLog:
        label = REPEATABLE if i % 3 == 0 else PLAIN
        log = StepLog(bus, "", f"resp_{self._num_rounds}-{i}")
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

    async def _check(self, bus: Bus, log: StepLog) -> None:
        stored = await bus.read(subjects.STEPS_STREAM, subjects.steps("", log.response_id))
        steps = [step for message in stored if (step := decode_step(message.data)) is not None]
        name, verdict = log.response_id, self._verdict
        made = {
            (turn, number): self._tool.made[f"{name}/{turn}/{number}"]
            for turn in range(TURNS)
            for number in range(CALLS)
        }
        begun = steps[0]
        assert isinstance(begun, Begun)
        repeatable = begun.servers[0].label == REPEATABLE
        verdict.num_responses += 1
        verdict.num_unknown += sum(isinstance(s, Result) and s.outcome == "unknown" for s in steps)
        verdict.num_repeated += sum(isinstance(s, Sending) and s.attempt > 0 for s in steps)
        run = AgentRun(name, steps, made, repeatable, must_complete=True)
        verdict.violations += violations(run)


async def _until(is_met: Callable[[], Awaitable[bool]]) -> None:
    """Ask until a condition of other processes is met. Raises TimeoutError."""
    async with asyncio.timeout(START_S):
        while True:
            if await is_met():
                return
            await asyncio.sleep(POLL_S)


async def _await_ends(logs: list[StepLog]) -> None:
    """Wait until all responses have ended, or for END_S; the checks name those that have not."""
    ends = [asyncio.create_task(_read_to_end(log)) for log in logs]
    for _ in range(round(END_S / TICK_S)):  # A pause of this process is one tick.
        _, following = await asyncio.wait(ends, timeout=TICK_S)
        if not following:
            break
    for task in ends:
        task.cancel()
    await asyncio.gather(*ends, return_exceptions=True)


async def _read_to_end(log: StepLog) -> None:
    async for _ in log.follow():
        pass
