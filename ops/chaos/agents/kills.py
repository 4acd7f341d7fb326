"""Agents that are killed and stopped while they call a tool that counts its calls."""

import asyncio
import json
import os
import random
import signal
import tempfile
from collections import Counter
from pathlib import Path

from msgspec import Struct

from ops.chaos.agents.checks import AgentRun, violations
from ops.chaos.agents.scripted_model import MODEL
from ops.chaos.agents.system import AgentSystem
from ops.chaos.agents.tool_server import MAX_PAUSE_S, CountingServer
from ops.chaos.agents.worker import held_in, taken_in
from ops.chaos.bugs.registry import BUGS
from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.items import MessageItem
from shared.protocol.requests import GenerateRequest
from shared.protocol.steps import Begun, ResponseTask, Result, Sending, ServerUse, decode_step
from shared.state.step_log import StepLog
from workers.roles import AGENT

TURNS = 2
AT_ONCE = 8
"""Responses in flight."""
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
    response_id, _, turn = request_id.rpartition("~t")
    if int(turn) >= TURNS:
        return "Booked."
    (tool, *_) = request.tools
    calls = [
        {"name": tool.function.name, "arguments": {"call": f"{response_id}/{turn}/{number}"}}
        for number in range(CALLS)
    ]
    return "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


class Verdict(Struct):
    """Violations, and the number of responses and calls that the faults affected."""

    num_faults: int = 0
    """Faults that hit an agent at work; the responses of each were checked."""
    num_misses: int = 0
    """Faults that came too late, and were repeated."""
    num_responses: int = 0
    num_held: int = 0
    """Responses that agents held when a fault hit them."""
    num_unknown: int = 0
    """Calls with an unknown outcome: the fault came between the step and the result."""
    num_repeated: int = 0
    violations: list[str] = []

    @property
    def invariants(self) -> Counter[str]:
        """Number of violations of each invariant."""
        return Counter(text.partition(" ")[0] for text in self.violations)

    def __str__(self) -> str:
        return (
            f"{self.num_faults} faults hit agents at work, which held {self.num_held} of"
            f" {self.num_responses} responses; {self.num_misses} came too late and were repeated;"
            f" {self.num_unknown} calls with an unknown outcome, {self.num_repeated} made again;"
            f" {len(self.violations)} violations"
        )


class AgentScenario:
    """A scripted model, a counting tool, and two agents that are killed and stopped."""

    def __init__(self, folder: Path, bug: str, seed: int) -> None:
        self._bug = bug
        self._rng = random.Random(seed)
        self._tool = CountingServer(random.Random(seed))
        server = {"url": self._tool.start(), "require_approval": "never"}
        servers = {PLAIN: server, REPEATABLE: server | {"idempotency": "header"}}
        self._system = AgentSystem(folder, {"servers": servers}, ACK_WAIT_S)
        self._agents: dict[str, Path] = {}
        """Reports of the agents that run."""
        self._num_started = 0
        self._num_rounds = 0
        self._verdict = Verdict()

    async def run(self, faults: int) -> Verdict:
        """Run until this many faults have hit, or until the planted bug is found."""
        invariants = BUGS[self._bug].invariants if self._bug else ()
        async with self._system.running(script), self._system.bus() as bus:
            await asyncio.gather(self._start_agent(), self._start_agent())
            while self._verdict.num_faults < faults:
                await self._round(bus)
                if self._verdict.invariants.keys() & invariants:
                    break
        return self._verdict

    async def _start_agent(self) -> None:
        self._num_started += 1
        name = f"agent-{self._num_started}"
        self._agents[name] = await self._system.start_watched(name, AGENT, bug=self._bug)

    async def _round(self, bus: Bus) -> None:
        """Begin responses, inject one fault, and check the responses when they have ended.

        A fault that comes when no agent holds a response any more tests nothing.
        """
        logs = [await self._begin(bus, i) for i in range(AT_ONCE)]
        self._num_rounds += 1
        await self._until_taken({log.response_id for log in logs})
        await asyncio.sleep(self._rng.uniform(0, 2.5 * MAX_PAUSE_S))
        held = await self._strike()
        self._verdict.num_held += len(held)
        if held:
            self._verdict.num_faults += 1
        else:
            self._verdict.num_misses += 1
        await _await_ends(logs)
        await asyncio.sleep(0.5)  # A resumed worker may still make calls.
        for log in logs:
            await self._check(bus, log)

    async def _until_taken(self, names: set[str]) -> None:
        async with asyncio.timeout(START_S):
            # Other processes write what this reads.
            while not any(taken_in(r.read_text()) & names for r in self._agents.values()):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)

    def _held_by(self, name: str) -> set[str]:
        return held_in(self._agents[name].read_text())

    async def _strike(self) -> set[str]:
        """Kill or stop an agent, and return the responses that it held."""
        holding = [name for name in self._agents if self._held_by(name)]
        victim = self._rng.choice(holding or [*self._agents])
        if self._num_rounds % 4:
            await self._system.kill(victim)
            held = self._held_by(victim)
            del self._agents[victim]
            await self._start_agent()
            return held
        # A stopped worker is taken for dead, and is resumed.
        pid = self._system.processes.running[victim].pid
        _stop(pid)
        held = self._held_by(victim)
        await asyncio.sleep(2.5 * ACK_WAIT_S)
        os.kill(pid, signal.SIGCONT)
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
        num_made = {
            (turn, number): self._tool.num_made[f"{name}/{turn}/{number}"]
            for turn in range(TURNS)
            for number in range(CALLS)
        }
        begun = steps[0]
        assert isinstance(begun, Begun)
        repeatable = begun.servers[0].label == REPEATABLE
        verdict.num_responses += 1
        verdict.num_unknown += sum(isinstance(s, Result) and s.outcome == "unknown" for s in steps)
        verdict.num_repeated += sum(isinstance(s, Sending) and s.attempt > 0 for s in steps)
        run = AgentRun(name, steps, num_made, repeatable, must_complete=True)
        verdict.violations += violations(run)


def _stop(pid: int) -> None:
    """Stop a process, and return when it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)


async def _await_ends(logs: list[StepLog]) -> None:
    """Wait until all responses have ended, at most END_S; the checks report the others."""
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


def run_agents(faults: int, seed: int = 1, bug: str = "") -> Verdict:
    """Run the scenario, with the planted bug named `bug`, if any."""
    with tempfile.TemporaryDirectory(prefix="pagemill-agents-") as folder:
        return asyncio.run(AgentScenario(Path(folder), bug, seed).run(faults))
