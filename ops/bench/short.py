"""Measure short requests: how many a second, and the processor time of each process for one.

Each request has a short prompt and an answer of one token, so nearly all of its time is the cost of
queues, logs and processes. A fixed number of requests is in flight at any time.

    python -m ops.bench.short [--at-once 64] [--tokens 1]
"""

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvloop

from ops.bench.burst import Burst
from ops.harness.deployment import demo_tree, deployment
from ops.harness.samples import Samples
from ops.harness.tables import print_table
from shared.bus.bus import Bus
from shared.client import ask, new_request_id
from shared.protocol.records import Finish
from shared.protocol.requests import GenerateRequest, Message
from shared.protocol.sampling import SamplingParams
from shared.telemetry import logs

WARM_UP_S, ROUND_S = 3.0, 6.0


class Load:
    """A client that keeps a number of requests in flight."""

    def __init__(self, bus: Bus, num_tokens: int) -> None:
        self._bus = bus
        self._sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        self.ended_s: list[float] = []
        """Seconds that each request has taken."""

    @asynccontextmanager
    async def running(self, at_once: int) -> AsyncIterator[None]:
        runners = [asyncio.create_task(self._run()) for _ in range(at_once)]
        try:
            yield
        finally:
            for runner in runners:
                runner.cancel()
            await asyncio.gather(*runners, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            request_id, began_s = new_request_id(), time.perf_counter()
            message = Message("user", f"What is {request_id}?")
            request = GenerateRequest("demo", [message], self._sampling)
            last = [record async for record in ask(self._bus, request, request_id)][-1]
            assert isinstance(last, Finish), last
            self.ended_s.append(time.perf_counter() - began_s)


async def measure(at_once: int, num_tokens: int, rounds: int) -> None:
    rows = []
    async with deployment(demo_tree(), gateway=False) as site, site.bus() as bus:
        load = Load(bus, num_tokens)
        async with load.running(at_once):
            await asyncio.sleep(WARM_UP_S)
            for _ in range(rounds):
                load.ended_s.clear()
                run = Burst()
                with run.timed(site.processes()):
                    await asyncio.sleep(ROUND_S)
                ended = len(load.ended_s)
                times = Samples(1000 * each for each in load.ended_s)
                cpu = {name: 1000 * each / ended for name, each in run.cpu_s.items()}
                rows.append(
                    (
                        f"{ended / run.took_s:.0f}",
                        *(f"{each:.2f}" for each in cpu.values()),
                        f"{sum(cpu.values()):.2f}",
                        f"{times.median:.0f} / {times.p99:.0f}",
                    )
                )
    columns = ("requests/s", *cpu, "all", "p50 / p99 ms")
    print_table(f"{at_once} at once, ms of processor time of each request", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--at-once", type=int, default=64, help="requests in flight")
    parser.add_argument("--tokens", type=int, default=1, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3, help=f"rounds of {ROUND_S:g} s")
    options = parser.parse_args()
    logs.configure_logging("warning", role="bench")
    uvloop.run(measure(options.at_once, options.tokens, options.rounds))


if __name__ == "__main__":
    main()
