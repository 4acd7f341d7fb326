"""The life of a worker process, run as a separate process."""

import asyncio
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared.bus.embedded_server import EmbeddedServer
from tests import preloaded

ROOT = Path(__file__).parents[3]

# The process gets a separate terminal.
WITH_TERMINAL = """
import contextlib, fcntl, os, pty, termios
_, slave = pty.openpty()
with contextlib.suppress(PermissionError):  # It leads a session already.
    os.setsid()
fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
"""

# The worker sends itself `before` signals in its main, and one more after it has drained.
WORKER = """
import asyncio, os, signal, sys
import uvloop
from shared.config.schema import Config, NatsConfig
from shared.stage import runtime

async def main(context):
    context.ready([], dict)
    for event in (context.shutdown.asked, context.shutdown.hurry)[: int(sys.argv[2])]:
        os.kill(os.getpid(), getattr(signal, sys.argv[3]))
        await event.wait()

config = Config(models={}, nats=NatsConfig(unchecked=True))
code = uvloop.run(runtime.run("coordinator", main, config, sys.argv[1], None, None))
os.kill(os.getpid(), getattr(signal, sys.argv[3]))
sys.exit(code)
"""


# A second SIGHUP does not hurry a drain.
CASES = [(n, name) for n in (0, 1, 2) for name in ("SIGTERM", "SIGINT", "SIGHUP")][:-1]


@pytest.mark.parametrize(("num_before", "name"), CASES)
async def test_a_signal_after_the_drain_does_not_kill_the_worker(
    broker: EmbeddedServer, num_before: int, name: str
) -> None:
    done = await run_script(WITH_TERMINAL + WORKER, broker.url, str(num_before), name)
    assert done.returncode == 0, done.stderr
    assert "drained" in done.stderr


# A shell sends SIGHUP when its terminal closes, and then the kernel does.
CLOSED_TERMINAL = """
import asyncio, os, signal, sys
import uvloop
from shared.config.schema import Config, NatsConfig
from shared.stage import runtime

async def main(context):
    context.ready([], dict)
    os.kill(os.getpid(), signal.SIGHUP)
    await context.shutdown.asked.wait()
    os.kill(os.getpid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGUSR1)
    await seen.wait()
    assert not context.shutdown.hurry.is_set(), "the second SIGHUP has hurried the drain"
    os.kill(os.getpid(), signal.SIGTERM)
    await context.shutdown.hurry.wait()

async def run():
    global seen
    seen = asyncio.Event()
    loop = asyncio.get_running_loop()
    signal.signal(signal.SIGUSR1, lambda *_: loop.call_soon_threadsafe(seen.set))
    config = Config(models={}, nats=NatsConfig(unchecked=True))
    return await runtime.run("coordinator", main, config, sys.argv[1], None, None)

sys.exit(uvloop.run(run()))
"""


async def test_a_second_hangup_does_not_hurry_the_drain(broker: EmbeddedServer) -> None:
    done = await run_script(WITH_TERMINAL + CLOSED_TERMINAL, broker.url)
    assert done.returncode == 0, done.stderr


NOHUP = """
import signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
"""
OUTLIVES_ITS_TERMINAL = """
import os, signal, sys
import uvloop
from shared.config.schema import Config, NatsConfig
from shared.stage import runtime

async def main(context):
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

config = Config(models={}, nats=NatsConfig(unchecked=True))
sys.exit(uvloop.run(runtime.run("coordinator", main, config, sys.argv[1], None, None)))
"""


async def test_a_worker_under_nohup_outlives_its_terminal(broker: EmbeddedServer) -> None:
    done = await run_script(NOHUP + OUTLIVES_ITS_TERMINAL, broker.url)
    assert done.returncode == 0, done.stderr


# The thread would keep a usual exit waiting for its end.
STARTS = """
import asyncio, sys, time
import uvloop
from shared.config.schema import Config, NatsConfig
from shared.stage import runtime

async def main(context):
    print("loading", flush=True)
    await asyncio.to_thread(time.sleep, 600)

config = Config(models={}, nats=NatsConfig(unchecked=True, connect_timeout_s=600))
print("connecting", flush=True)
sys.exit(uvloop.run(runtime.run("coordinator", main, config, sys.argv[1], None, None)))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("step", ["connecting", "loading"])
def test_a_worker_that_starts_ends_at_once(
    broker: EmbeddedServer, number: signal.Signals, step: str
) -> None:
    # Nothing answers there, and the connection is tried again.
    url = broker.url if step == "loading" else "nats://127.0.0.1:9"
    command = [sys.executable, "-c", WITH_TERMINAL + STARTS, url]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as worker:
        try:
            assert worker.stdout is not None
            while worker.stdout.readline().strip() != step:
                assert worker.poll() is None
            if step == "connecting":
                wait_for_handler(worker.pid)
            worker.send_signal(number)
            # Long enough for a busy machine, and far shorter than what the worker waits for.
            assert worker.wait(30) == 0
        finally:
            worker.kill()


def wait_for_handler(pid: int) -> None:
    """Wait until a process catches SIGTERM, which Python does not do by itself."""
    status = Path(f"/proc/{pid}/status")
    for _ in range(3000):
        caught = re.search(r"SigCgt:\s*(\w+)", status.read_text())
        if caught is not None and int(caught[1], 16) >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.01)
    raise AssertionError("no handler")


COMMAND = """
import signal, sys
from workers import __main__ as pagemill
sys.argv = ["pagemill", "worker", "engine"]
pagemill.run_app = lambda _: print(signal.getsignal(signal.SIGTERM), "nats" in sys.modules)
pagemill.main()
"""


async def test_a_worker_has_its_handlers_before_it_imports_its_modules() -> None:
    # Without a handler the first process of a container ignores SIGTERM.
    done = await run_script(COMMAND)
    assert done.stdout.startswith("<function"), done.stdout + done.stderr
    assert done.stdout.endswith("False\n"), done.stdout


def test_a_forked_worker_that_starts_ends_at_once(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        worker = preloaded.start(
            ["worker", "engine", "--nats", "nats://127.0.0.1:9"], cwd=tmp_path, stderr=log
        )
        try:
            worker.terminate()
            assert worker.wait(30) in (0, -signal.SIGTERM)
        finally:
            worker.kill()


# The thread reports; the loop publishes meanwhile.
SLOW_START = """
import asyncio, sys
import uvloop
from shared.config.schema import Config, ModelConfig, NatsConfig
from shared.stage import runtime

async def main(context):
    read = 0

    def measure():
        nonlocal read
        read += 100
        return read, 1000

    context.step("reading weights", measure)
    async def reports():
        while not (found := await context.bus.heartbeats.read_starts()):
            await asyncio.sleep(0.02)
        return found
    (report,) = await reports()
    while report.step != "reading weights":
        (report,) = await reports()
        await asyncio.sleep(0.02)
    assert (report.role, report.worker) == (context.role, context.worker)
    assert report.done_bytes % 100 == 0 < report.done_bytes
    assert report.total_bytes == 1000
    assert await context.bus.heartbeats.read() == [], "a starting worker counts as ready"
    context.ready(["demo"], dict)
    while not await context.bus.heartbeats.read():
        await asyncio.sleep(0.02)
    assert await context.bus.heartbeats.read_starts() == []

config = Config(models={"demo": ModelConfig(path="unused")}, nats=NatsConfig(unchecked=True))
sys.exit(uvloop.run(runtime.run("engine", main, config, sys.argv[1], "demo", None)))
"""


async def test_a_worker_that_starts_reports_what_it_does_and_is_not_ready(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    await asyncio.to_thread(server.start)
    try:
        done = await run_script(SLOW_START, server.url)
    finally:
        await asyncio.to_thread(server.stop)
    assert done.returncode == 0, done.stderr


async def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *arguments]
    return await asyncio.to_thread(
        subprocess.run, command, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
