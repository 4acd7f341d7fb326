"""The life of a worker process, in a process of its own."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from shared.bus.embedded_server import EmbeddedServer

ROOT = Path(__file__).parents[3]

# The worker sends itself `before` signals in its main, and one more after it has drained.
WORKER = """
import asyncio, os, signal, sys
import uvloop
from shared.config import Config, NatsConfig
from shared.stage import runtime

async def main(context):
    for event in (context.shutdown.asked, context.shutdown.hurry)[: int(sys.argv[2])]:
        os.kill(os.getpid(), getattr(signal, sys.argv[3]))
        await event.wait()

config = Config(models={}, nats=NatsConfig(unchecked=True))
code = uvloop.run(runtime.run("coordinator", main, config, sys.argv[1], None, None))
os.kill(os.getpid(), getattr(signal, sys.argv[3]))
sys.exit(code)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("num_before", [0, 1, 2])
async def test_a_signal_after_the_drain_does_not_kill_the_worker(
    broker: EmbeddedServer, num_before: int, name: str
) -> None:
    command = [sys.executable, "-c", WORKER, broker.url, str(num_before), name]
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "drained" in done.stderr
