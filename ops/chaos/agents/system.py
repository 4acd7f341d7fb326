"""A broker, an agent and a gateway, each of which can be killed and started again."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from ops.chaos.agents.scripted_model import MODEL
from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.config.schema import DeliveryConfig, NatsConfig

ROLES = ("gateway", "agent")
START_S = 60.0


class AgentSystem:
    """A system without workers of models, whose place a `ScriptedModel` takes."""

    def __init__(
        self, folder: Path, agent: dict[str, Any], ack_wait_s: float = 10.0, **delivery: Any
    ) -> None:
        """`agent` is the part of the configuration about agents."""
        self.broker = EmbeddedServer(folder / "nats")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.url = ""
        self._folder = folder
        self._num_reports = 0
        self._config = folder / "pagemill.yaml"
        tree = {
            "models": {MODEL: {"path": str(folder)}},
            "nats": {"unchecked": True},
            "delivery": {"ack_wait_s": ack_wait_s, "drain_s": 1.0} | delivery,
            "gateway": {"port": 0},
            "agent": agent | {"mcp_networks": ["127.0.0.0/8"]},
        }
        self._config.write_text(json.dumps(tree))

    async def start(self, *roles: str) -> None:
        """Start workers, and return when they are ready."""
        for role in roles or ROLES:
            options = ["--config", str(self._config), "--nats", self.broker.url]
            self._open(role, "workers", "worker", role, *options)
        await self._until_ready()

    async def start_dying_gateway(self, parts: Iterable[str]) -> Path:
        """Replace the gateway by one that dies behind these parts of the first response, and return
        where it writes the response's id."""
        self.kill("gateway")
        report = self._folder / f"begun-{self._num_reports}"
        self._num_reports += 1
        module, config = "ops.chaos.agents.dying_gateway", str(self._config)
        self._open("gateway", module, config, self.broker.url, "+".join(parts), str(report))
        await self._until_ready()
        return report

    async def _until_ready(self) -> None:
        bus = await Bus.connect(self.broker.url, "chaos")
        await bus.streams.prepare(NatsConfig(unchecked=True), DeliveryConfig())
        try:
            async with asyncio.timeout(START_S):
                while True:
                    if await self._is_ready(bus):
                        return
                    await asyncio.sleep(0.1)
        finally:
            await bus.close()

    def _open(self, role: str, *command: str) -> None:
        with (self._folder / "workers.log").open("ab") as log:
            self.processes[role] = subprocess.Popen([sys.executable, "-m", *command], stderr=log)

    async def _is_ready(self, bus: Bus) -> bool:
        pids = {process.pid for process in self.processes.values()}
        beats = [beat for beat in await bus.heartbeats.read() if beat.pid in pids]
        self.url = next((beat.url for beat in beats if beat.url), "")
        return len(beats) == len(pids) and bool(self.url)

    def kill(self, *roles: str) -> None:
        for role in roles or ROLES:
            if role in self.processes:
                process = self.processes.pop(role)
                process.kill()
                process.wait()

    @asynccontextmanager
    async def http(self) -> AsyncIterator[httpx.AsyncClient]:
        async with httpx.AsyncClient(base_url=self.url, timeout=60, trust_env=False) as http:
            yield http
