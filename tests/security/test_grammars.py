"""Grammars on a starved machine: a valid one is not refused, and no refusal is cached.

A trial is starved by stopping and continuing its process, which does not depend on other load.
"""

import asyncio
import os
import signal
import sys
from itertools import count

import pytest
from llguidance import LLTokenizer

from shared.errors import GrammarNotTried, InvalidGrammar
from shared.helpers.forking import read_pid
from shared.protocol.sampling import StructuredOutputs
from workers.engine.sampling import grammar, grammar_trial
from workers.engine.sampling.grammar import Grammar, GrammarCompiler

VALID: dict[str, StructuredOutputs] = {
    "a schema": StructuredOutputs(json_schema={"type": "object", "required": ["a"]}),
    "a schema of arrays": StructuredOutputs(
        json_schema={"type": "array", "items": {"enum": [1, None, "x"]}}
    ),
    "any object": StructuredOutputs(json_object=True),
    "an expression": StructuredOutputs(regex=r"[a-z]{3,9}(-\d+)?"),
    "a choice": StructuredOutputs(choice=["yes", "no"]),
    "a grammar": StructuredOutputs(grammar='start: "a" start | "b"'),
}
INVALID: dict[str, StructuredOutputs] = {
    "an open bracket": StructuredOutputs(regex="[a-"),
    "a rule without a definition": StructuredOutputs(grammar="start: x"),
    "an unknown type": StructuredOutputs(json_schema={"type": "strange"}),
}
SLOW = StructuredOutputs(
    json_schema={"allOf": [{"type": "string", "pattern": f"w{i}"} for i in range(32)]}
)
"""Compiling it takes more than 20 s of CPU time."""


async def compile_with(
    compiler: GrammarCompiler, structure: StructuredOutputs, tenant: str = ""
) -> Grammar:
    async def no_progress() -> None:
        pass

    async with asyncio.timeout(120):
        return await compiler.compile(structure, tenant, no_progress)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stop each trial until it has been looked at five times; each look finds more CPU time."""
    looked_at: list[int] = []

    def started(message: bytes) -> int:
        pid = read_pid(message)
        os.kill(pid, signal.SIGSTOP)
        return pid

    def cpu_s(pid: int) -> float:
        looked_at.append(pid)
        if looked_at.count(pid) == 5:
            os.kill(pid, signal.SIGCONT)
        return len(looked_at)

    monkeypatch.setattr(grammar_trial, "read_pid", started)
    monkeypatch.setattr(grammar_trial, "TURN_S", 0.05)
    monkeypatch.setattr(grammar_trial, "_cpu_s", cpu_s)
    return looked_at


@pytest.mark.parametrize("name", VALID)
async def test_a_valid_grammar_is_used_however_slow_its_trial_is(
    looks: list[int], name: str
) -> None:
    compiled = await compile_with(GrammarCompiler(LLTokenizer("byte"), 64), VALID[name])
    assert isinstance(compiled, Grammar)
    assert len(looks) >= 5


@pytest.mark.parametrize("name", INVALID)
async def test_an_invalid_grammar_is_refused_by_what_it_says(looks: list[int], name: str) -> None:
    compiler = GrammarCompiler(LLTokenizer("byte"), 64)
    for _ in range(2):
        with pytest.raises(InvalidGrammar) as caught:
            await compile_with(compiler, INVALID[name])
        assert caught.value.field == grammar_trial.FIELD
    # The refusal is the grammar's own fault, and so it is remembered.
    assert len(set(looks)) == 1


async def test_a_slow_trial_gives_its_slot_to_another_tenant_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar, "MAX_COMPILING", 1)
    monkeypatch.setattr(grammar_trial, "TURN_S", 0.2)
    monkeypatch.setattr(grammar_trial, "MAX_CPU_S", 100)
    ticks = count(1)
    monkeypatch.setattr(grammar_trial, "_cpu_s", lambda _: next(ticks))
    compiler = GrammarCompiler(LLTokenizer("byte"), 64)
    slow = asyncio.create_task(compile_with(compiler, SLOW, "a"))
    other = asyncio.create_task(compile_with(compiler, StructuredOutputs(choice=["b"]), "b"))
    with pytest.raises(GrammarNotTried) as caught:
        await slow
    assert caught.value.retryable
    assert isinstance(await other, Grammar)
    assert not len(compiler._refused)


async def test_the_time_of_a_process_is_that_of_its_processor() -> None:
    busy = await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass")

    def cpu_s() -> float:
        return grammar_trial._cpu_s(busy.pid)

    try:
        async with asyncio.timeout(60):
            for wanted_s in (0.01, 0.05):
                while cpu_s() < wanted_s:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        busy.send_signal(signal.SIGSTOP)
        await asyncio.to_thread(os.waitid, os.P_PID, busy.pid, os.WSTOPPED | os.WNOWAIT)
        stopped = cpu_s()
        await asyncio.sleep(0.1)
        assert cpu_s() == stopped
    finally:
        busy.kill()
        await busy.wait()
    assert cpu_s() == 0
