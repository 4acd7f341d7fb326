"""Agents that are killed at any moment: no call is made twice, and every response ends."""

import asyncio
import random
from typing import Any

from openai import AsyncOpenAI

from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.steps import Result, Sending, Step, decode_step
from shared.responses.state import state_of
from tests.agent.conftest import AgentRig, call
from tests.agent.test_mcp import respond
from workers.agent import plan
from workers.agent.plan import next_action

ROUNDS, AT_ONCE = 4, 12


async def test_no_call_is_made_twice_and_every_response_ends(
    rig: AgentRig, openai_client: AsyncOpenAI, agent_bus: Bus
) -> None:
    rng = random.Random(19)
    logs: list[tuple[str, str, list[Step]]] = []
    for number in range(ROUNDS):
        started = [
            await start(rig, openai_client, f"kill {number} {i}", "safe" if i % 3 == 0 else "free")
            for i in range(AT_ONCE)
        ]
        await asyncio.sleep(rng.uniform(0.0, 0.5))
        agent = rig.agents[-1]
        agent.kill()
        rig.start_agent()
        for text, label, response_id in started:
            events = await openai_client.responses.retrieve(response_id, stream=True)
            kinds = [event.type async for event in events]
            assert kinds[-1] == "response.completed"
            stored = await agent_bus.read(subjects.STEPS_STREAM, subjects.steps("", response_id))
            steps = [step for message in stored if (step := decode_step(message.data)) is not None]
            logs.append((text, label, steps))
    assert any(
        isinstance(step, Result) and step.outcome == "unknown" for *_, s in logs for step in s
    )
    for text, label, steps in logs:
        check(rig, text, label, steps)


async def start(rig: AgentRig, client: AsyncOpenAI, text: str, label: str) -> tuple[str, str, str]:
    pause_s = random.Random(text).uniform(0.0, 0.3)
    turns = [call(f"{label}__book", title=f"{text}/{turn}", pause_s=pause_s) for turn in range(2)]
    rig.scripts[text] = [*turns, "Booked."]
    tool: Any = {"type": "mcp", "server_label": label}
    begun = await respond(client, text, tool, background=True)
    return text, label, begun.id


def check(rig: AgentRig, text: str, label: str, steps: list[Step]) -> None:
    sendings = [step for step in steps if isinstance(step, Sending)]
    for turn in range(2):
        num_calls = rig.calls.made[f"{text}/{turn}"]
        attempts = [step for step in sendings if step.turn == turn]
        (outcome,) = [s.outcome for s in steps if isinstance(s, Result) and s.turn == turn]
        assert num_calls <= len(attempts)
        if label == "safe":
            # The server would know the call by its key, so it is made again.
            assert outcome == "result"
            assert len({step.key for step in attempts}) == 1
        else:
            assert len(attempts) == 1
            assert num_calls <= 1
        if outcome == "result":
            assert num_calls >= 1
        else:
            # The kill fell between the step and the result.
            assert outcome == "unknown"
            assert next(i for i, s in enumerate(steps) if s in attempts) + 1 == next(
                i for i, s in enumerate(steps) if isinstance(s, Result) and s.turn == turn
            )
    # The steps before each step have planned it.
    for length in range(1, len(steps)):
        action, step = next_action(state_of("resp", steps[:length])), steps[length]
        if isinstance(step, Sending):
            assert isinstance(action, plan.CallTools)
            assert [call.attempt for call in action.calls] == [step.attempt]
