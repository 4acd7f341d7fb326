"""Measure responses: the first event, what a call of a tool costs, the hand-over to the next turn,
and what responses that wait for approval take.

Times of calls and turns are those at which the broker has stored the steps and token records.
"""

import argparse
import asyncio
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop
from openai import AsyncOpenAI
from rich.console import Console
from rich.table import Table
from starlette.requests import Request
from starlette.responses import JSONResponse

from ops.serving import MODEL
from ops.tool_server import LocalToolServer
from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.items import ListedTool, MessageItem
from shared.protocol.records import Usage
from shared.protocol.requests import FunctionCall
from shared.protocol.steps import (
    Answered,
    Asked,
    Begun,
    Ended,
    Listed,
    Result,
    ServerUse,
    Step,
    decode_step,
    turn_id,
)
from shared.state.step_log import StepLog
from shared.telemetry import logs
from workers.cli import settings
from workers.cli.local_cluster import LocalCluster
from workers.roles import AGENT, WorkerSpec, default_workers

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
AT_ONCE = 64
# The broker keeps the last block that it has written in memory for a while, and collects garbage
# every two minutes.
REST_S = 150.0


class ToolServer(LocalToolServer):
    """A server of one tool, which measures its own time."""

    def __init__(self) -> None:
        super().__init__({"name": "add", "inputSchema": SCHEMA})
        self.took_ms: list[float] = []

    async def answer(self, request: Request) -> JSONResponse:
        began = time.perf_counter()
        answer = await super().answer(request)
        if (await request.json())["method"] == "tools/call":
            self.took_ms.append(1000 * (time.perf_counter() - began))
        return answer

    async def call(self, arguments: dict[str, Any]) -> str:
        return "7"


@asynccontextmanager
async def running(url: str) -> AsyncIterator[tuple[AsyncOpenAI, Bus, Path]]:
    """Run a system with the demo model, an agent, and the tool server in its configuration."""
    server = {"url": url, "require_approval": "never"}
    with tempfile.TemporaryDirectory(prefix="pagemill-") as name:
        folder = Path(name)
        tree = {
            "models": {
                "demo": {
                    "path": str(MODEL),
                    "max_model_len": 1024,
                    "sampling_defaults": {"temperature": 0.0, "max_tokens": 80},
                }
            },
            "nats": {"store_dir": f"{folder}/nats", "port": 0},
            "gateway": {"port": 0},
            "agent": {"servers": {"calc": server}, "mcp_networks": ["127.0.0.0/8"]},
        }
        file = folder / "pagemill.yaml"
        file.write_text(json.dumps(tree))
        config = settings.load_config(file)
        logs.configure_logging("warning", role="bench")
        workers = [*default_workers(config), WorkerSpec(AGENT), WorkerSpec("gateway")]
        cluster = LocalCluster(config, file, workers, log_file=folder / "workers.log")
        try:
            await cluster.start()
            bus = await Bus.connect(cluster.url, "bench")
            async with AsyncOpenAI(
                base_url=f"{cluster.gateway_url}/v1", api_key="none", max_retries=0
            ) as client:
                yield client, bus, folder
            await bus.close()
        finally:
            await cluster.stop()


async def first_events(client: AsyncOpenAI, count: int) -> dict[str, list[float]]:
    """Return the milliseconds to the first event and to the first text, and those of chat."""
    found: dict[str, list[float]] = {}
    for number in range(count):
        text = f"What is red? {number}"
        began = time.perf_counter()
        events = await client.responses.create(
            model="demo", input=text, stream=True, max_output_tokens=4
        )
        async for event in events:
            name = {"response.created": "first event", "response.output_text.delta": "first text"}
            if event.type in name:
                took = found.setdefault(f"responses: {name[event.type]}", [])
                if len(took) == number:
                    took.append(1000 * (time.perf_counter() - began))
        began = time.perf_counter()
        chunks = await client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": text}], stream=True, max_tokens=4
        )
        took = found.setdefault("chat: first chunk", [])
        async for _ in chunks:
            if len(took) == number:
                took.append(1000 * (time.perf_counter() - began))
    return found


async def calls(client: AsyncOpenAI, bus: Bus, count: int) -> dict[str, list[float]]:
    """Return the milliseconds from an answer with a call to its result, and to the next text."""
    tool: Any = {"type": "mcp", "server_label": "calc"}
    found: dict[str, list[float]] = {"call: answer → result": [], "call: result → next text": []}
    for number in range(count):
        made = await client.responses.create(
            model="demo",
            input=f"Add {number}.",
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
        )
        at: dict[type[Step], float] = {}
        for stored in await bus.read(subjects.STEPS_STREAM, subjects.steps("", made.id)):
            step = decode_step(stored.data)
            if step is not None:
                at.setdefault(type(step), stored.stored_ms)
        text = await bus.read(subjects.TOKENS_STREAM, subjects.tokens(turn_id(made.id, 1)))
        if Result in at and text:
            found["call: answer → result"].append(at[Result] - at[Answered])
            found["call: result → next text"].append(text[0].stored_ms - at[Result])
    return found


async def waiting(bus: Bus, count: int, broker_bytes: Callable[[], int]) -> tuple[int, float]:
    """Return the bytes that the broker has gained at once, and the seconds that storing took."""
    before, began = broker_bytes(), time.perf_counter()
    limit = asyncio.Semaphore(AT_ONCE)
    listed = [ListedTool("add", SCHEMA)]
    message = MessageItem("user", "Add 7.", "msg_1")
    steps: list[Step] = [
        Begun(0, 1, "demo", "", [message], {}, servers=[ServerUse("calc")], parser="hermes"),
        Listed(0, "calc", listed),
        Asked(0, 0),
        Answered(0, 0, "", [FunctionCall("calc__add", '{"a": 7}')], Usage(20, 9)),
        Ended(0, "completed", 2),
    ]

    async def store(number: int) -> None:
        async with limit:
            # As long as the id of a response, of which the broker keeps the subject.
            name = hashlib.sha256(f"waiting {number}".encode()).hexdigest()[:48]
            log = StepLog(bus, "", f"resp_{name}")
            for step in steps:
                await log.append(step)
            assert log.state.approvals

    await asyncio.gather(*(store(number) for number in range(count)))
    return broker_bytes() - before, time.perf_counter() - began


def memory_of_broker(folder: Path) -> int:
    """Return the resident bytes of the embedded broker."""
    pid = int((folder / "nats" / "nats-server.pid").read_text().split()[0])
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


async def main(count: int, num_waiting: int) -> None:
    console, server = Console(), ToolServer()
    table = Table("", "p50 ms", "p95 ms", "n")
    async with running(server.start()) as (client, bus, folder):
        await first_events(client, 5)
        found = await first_events(client, count)
        found |= await calls(client, bus, count)
        found["call: the server's own time"] = server.took_ms
        for name, took_ms in found.items():
            cuts = statistics.quantiles(took_ms, n=100)
            table.add_row(name, f"{cuts[49]:.1f}", f"{cuts[94]:.1f}", str(len(took_ms)))
        console.print(table)
        before = memory_of_broker(folder)
        gained, took_s = await waiting(bus, num_waiting, lambda: memory_of_broker(folder))
        await asyncio.sleep(REST_S)
        at_rest = memory_of_broker(folder) - before
    console.print(
        f"{num_waiting} responses that wait for approval: the broker has {gained / 2**20:.1f} MiB"
        f" more at once, and {at_rest / 2**20:.1f} MiB at rest; 5 steps each were stored in"
        f" {took_s:.0f} s"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--waiting", type=int, default=10_000)
    arguments = parser.parse_args()
    uvloop.run(main(arguments.count, arguments.waiting))
