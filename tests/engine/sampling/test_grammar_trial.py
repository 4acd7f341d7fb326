"""The trial of a grammar: CPU time and memory are the client's fault, a busy machine never is."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer

from shared.errors import GrammarNotTried, InvalidGrammar, Overloaded
from shared.helpers import syscall_filter
from shared.helpers.forking import Ended, Forks, read_end, read_pid
from shared.protocol.sampling import StructuredOutputs
from tests.support.waiting import until
from workers.engine.sampling import grammar as grammars_module
from workers.engine.sampling import grammar_trial
from workers.engine.sampling.grammar import Grammar, GrammarCompiler
from workers.engine.sampling.grammar_trial import check_grammar

YES_OR_NO = StructuredOutputs(choice=["yes", "no"])
SLOW = StructuredOutputs(
    json_schema={"allOf": [{"type": "string", "pattern": f"w{i}"} for i in range(32)]}
)
"""Compiling it takes more than 20 s."""


def new_compiler(max_held: int = 64) -> GrammarCompiler:
    return GrammarCompiler(LLTokenizer("byte"), max_held)


async def compile_with(
    compiler: GrammarCompiler,
    form: StructuredOutputs,
    tenant: str = "",
    lane: str = "interactive",
) -> Grammar:
    async def no_progress() -> None:
        pass

    async with asyncio.timeout(60):
        return await compiler.compile(form, tenant, no_progress, lane)


def on_each_start(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> None:
    """Call `act` with the id of each sandbox process, before it has its grammar."""

    def started(message: bytes) -> int:
        pid = read_pid(message)
        act(pid)
        return pid

    monkeypatch.setattr(grammar_trial, "read_pid", started)


def before_each_grammar(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[], Awaitable[None]]
) -> None:
    """Await `act` before a sandbox process gets its grammar."""
    exchange = grammar_trial._exchange

    async def exchange_later(channel: socket.socket, definition: bytes) -> bytes:
        await act()
        return await exchange(channel, definition)

    monkeypatch.setattr(grammar_trial, "_exchange", exchange_later)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


# -- whose fault it is ----------------------------------------------------------------------------


async def test_a_trial_without_time_is_a_retryable_fault_and_not_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = new_compiler()
    with monkeypatch.context() as patch:
        on_each_start(patch, stop)
        patch.setattr(grammar_trial, "TURN_S", 0.3)
        with pytest.raises(GrammarNotTried, match=r"within 0\.3 s") as caught:
            await compile_with(compiler, YES_OR_NO)
    error = caught.value
    assert (error.fault, error.retryable, error.field) == ("server", True, grammar_trial.FIELD)
    assert error.retry_after_s is not None
    assert isinstance(await compile_with(compiler, YES_OR_NO), Grammar)


async def test_a_trial_that_is_only_late_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    def pause(pid: int) -> None:
        stop(pid)
        asyncio.get_running_loop().call_later(0.5, os.kill, pid, signal.SIGCONT)

    on_each_start(monkeypatch, pause)
    assert isinstance(await compile_with(new_compiler(), YES_OR_NO), Grammar)


async def test_the_cpu_time_of_a_trial_is_the_grammars_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trial, "MAX_CPU_S", 1)
    ends: list[Ended] = []

    def ended(message: bytes) -> Ended:
        ends.append(read_end(message))
        return ends[-1]

    monkeypatch.setattr(grammar_trial, "read_end", ended)
    compiler = new_compiler()
    with pytest.raises(InvalidGrammar, match="more than 1 s of CPU time") as caught:
        await compile_with(compiler, SLOW, "a")
    assert 0.5 < ends[0].cpu_s < 2.5
    assert caught.value.field == grammar_trial.FIELD
    with pytest.raises(InvalidGrammar, match="more than 1 s of CPU time"):
        await compile_with(compiler, SLOW, "b")
    assert len(ends) == 1


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
async def test_a_trial_that_is_ended_from_outside_is_not_remembered(
    monkeypatch: pytest.MonkeyPatch, by: signal.Signals
) -> None:
    compiler = new_compiler()

    trials: list[int] = []

    def end_it(pid: int) -> None:
        trials.append(pid)
        asyncio.get_running_loop().call_later(0.5, os.kill, pid, by)

    with monkeypatch.context() as patch:
        on_each_start(patch, end_it)
        for _ in range(2):
            with pytest.raises(GrammarNotTried):
                await compile_with(compiler, SLOW)
    assert len(trials) == 2
    assert isinstance(await compile_with(compiler, YES_OR_NO), Grammar)


@pytest.mark.parametrize("executable", ["/bin/false", "/no/such/file"])
async def test_a_sandbox_that_does_not_start_is_no_fault_of_the_grammar(
    monkeypatch: pytest.MonkeyPatch, executable: str
) -> None:
    forks = Forks("workers.engine.sampling.grammar_sandbox")
    monkeypatch.setattr(grammar_trial, "_sandboxes", forks)
    monkeypatch.setattr("sys.executable", executable)
    with pytest.raises(GrammarNotTried, match="could not be started"):
        await compile_with(new_compiler(), YES_OR_NO)
    forks.close()


async def test_sandboxes_are_started_after_their_server_was_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler, forks = new_compiler(), Forks("workers.engine.sampling.grammar_sandbox")
    monkeypatch.setattr(grammar_trial, "_sandboxes", forks)
    for name in ("before", "after"):
        assert isinstance(await compile_with(compiler, named(name)), Grammar)
        assert forks.pid is not None
        os.kill(forks.pid, signal.SIGKILL)
        await asyncio.to_thread(os.waitid, os.P_PID, forks.pid, os.WEXITED | os.WNOWAIT)
    forks.close()


async def test_a_sandbox_without_a_waiter_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []
    on_each_start(monkeypatch, pids.append)
    task = asyncio.create_task(compile_with(new_compiler(), SLOW))
    await until(lambda: pids)
    task.cancel()
    async with asyncio.timeout(60):
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.kill(pids[0], 0)
                await asyncio.sleep(0.01)


async def test_grammars_of_the_batch_lane_are_tried_at_a_lower_priority(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    levels = []

    async def trial(_: str, __: Callable[[], bool], niceness: int) -> str:
        levels.append(niceness)
        return ""

    monkeypatch.setattr(grammars_module, "check_grammar", trial)
    compiler = new_compiler()
    for lane in ("interactive", "batch"):
        await compile_with(compiler, StructuredOutputs(choice=[lane]), lane=lane)
    assert levels == [0, grammars_module.BATCH_NICENESS]


async def test_a_sandbox_has_its_priority_before_its_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pids: list[int] = []
    level = min(19, os.nice(0) + 7)

    async def has_priority() -> bool:
        return os.getpriority(os.PRIO_PROCESS, pids[-1]) == level

    async def wait() -> None:
        await until(has_priority)

    on_each_start(monkeypatch, pids.append)
    before_each_grammar(monkeypatch, wait)
    await check_grammar("", lambda: False, 7)
    assert len(pids) == 1


async def test_a_trial_is_in_its_sandbox_before_its_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pids: list[int] = []

    def rights() -> dict[str, str]:
        lines = Path(f"/proc/{pids[-1]}/status").read_text().splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    async def look() -> None:
        if syscall_filter.is_available():
            await until(lambda: rights()["Seccomp"] == "2")  # with a filter
        await until(lambda: rights()["NoNewPrivs"] == "1")
        assert {int(rights()[f"Cap{kind}"], 16) for kind in ("Inh", "Prm", "Eff", "Bnd")} == {0}

    on_each_start(monkeypatch, pids.append)
    before_each_grammar(monkeypatch, look)
    assert await check_grammar(LLMatcher.grammar_from_regex("[a-z]+"), lambda: False, 0) == ""
    assert len(pids) == 1


async def test_the_memory_of_refusals_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    async def refuse(definition: str, _: Callable[[], bool], __: int) -> str:
        tried.append(definition)
        return "x" * 300

    monkeypatch.setattr(grammars_module, "check_grammar", refuse)
    monkeypatch.setattr(grammars_module, "MAX_REFUSAL_BYTES", 1000)
    compiler = new_compiler()
    large = [StructuredOutputs(choice=[f"{i}" + "y" * 100_000]) for i in range(4)]
    for form in (*large, large[-1], large[0]):
        with pytest.raises(InvalidGrammar):
            await compile_with(compiler, form)
    assert len(tried) == 5
    assert 0 < compiler._refused.num_bytes <= 1000


# -- turns ----------------------------------------------------------------------------------------


class HeldTrials:
    """Trials that last until they are released, in the order in which they have begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self._ends: list[asyncio.Event] = []
        monkeypatch.setattr(grammars_module, "check_grammar", self._try)

    async def _try(self, definition: str, _: Callable[[], bool], __: int) -> str:
        self.begun.append(definition)
        self._ends.append(asyncio.Event())
        await self._ends[-1].wait()
        return ""

    async def wait_for(self, num_begun: int) -> None:
        await until(lambda: len(self.begun) >= num_begun)

    def end(self, number: int) -> None:
        self._ends[number].set()


def named(name: str) -> StructuredOutputs:
    return StructuredOutputs(choice=[name])


async def test_a_flood_of_one_tenant_leaves_the_next_trial_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trials, compiler = HeldTrials(monkeypatch), new_compiler()
    flood = [asyncio.create_task(compile_with(compiler, named(f"a{i}"), "a")) for i in range(20)]
    await trials.wait_for(grammars_module.MAX_COMPILING)
    # Also a definition that the flood has at its end.
    others = [asyncio.create_task(compile_with(compiler, named(n), "b")) for n in ("b", "a19")]
    await asyncio.sleep(0)
    for i in range(4):
        trials.end(i)
        await trials.wait_for(3 + i)
    order = ["b" if '"b"' in text else "a19" if '"a19"' in text else "a" for text in trials.begun]
    assert order == ["a", "a", "a", "b", "a", "a19"]
    trials.end(5)
    trials.end(3)
    assert all(isinstance(grammar, Grammar) for grammar in await asyncio.gather(*others))
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)


async def test_slow_trials_of_the_batch_lane_hold_up_no_interactive_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trials, compiler = HeldTrials(monkeypatch), new_compiler()
    batch = [
        asyncio.create_task(compile_with(compiler, named(f"a{i}"), "a", "batch")) for i in range(4)
    ]
    await trials.wait_for(grammars_module.MAX_COMPILING_BATCH)
    # One of them has the definition that the batch lane is trying.
    others = [asyncio.create_task(compile_with(compiler, named(name), "a")) for name in ("b", "a0")]
    await trials.wait_for(grammars_module.MAX_COMPILING_BATCH + 2)
    for i in (1, 2):
        trials.end(i)
    assert all(isinstance(grammar, Grammar) for grammar in await asyncio.gather(*others))
    for task in batch:
        task.cancel()
    await asyncio.gather(*batch, return_exceptions=True)


async def test_a_flood_gives_up_its_places_to_another_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trials, compiler = HeldTrials(monkeypatch), new_compiler(max_held=4)
    flood = [asyncio.create_task(compile_with(compiler, named(f"a{i}"), "a")) for i in range(5)]
    with pytest.raises(Overloaded, match="4 grammars wait"):
        await flood[4]
    other = asyncio.create_task(compile_with(compiler, named("b"), "b"))
    with pytest.raises(Overloaded):
        await flood[3]
    for i in range(4):
        await trials.wait_for(i + 1)
        trials.end(i)
    assert isinstance(await other, Grammar)
    await asyncio.gather(*flood[:3])


async def test_a_definition_that_another_tenant_has_had_compiled_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammars_module, "MAX_COMPILING", 1)
    trials, compiler = HeldTrials(monkeypatch), new_compiler()
    both = [asyncio.create_task(compile_with(compiler, named("x"), tenant)) for tenant in "ab"]
    await trials.wait_for(1)
    trials.end(0)
    first, second = await asyncio.gather(*both)
    assert first is second
    assert len(trials.begun) == 1
