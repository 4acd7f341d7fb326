"""A broker, a scripted model, agents and a gateway, which can be killed and started again."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from ops.chaos.agents.scripted_model import MODEL, Script, ScriptedModel
from ops.harness.deployment import write_config
from ops.harness.processes import Command, Processes, worker_command
from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.config.schema import DeliveryConfig, NatsConfig

ROLES = ("gateway", "agent")


class AgentSystem:
    """A system with a `ScriptedModel` instead of renderers and engines."""

    def __init__(
        self, folder: Path, agent: dict[str, Any], ack_wait_s: float = 10.0, **delivery: Any
    ) -> None:
        """`agent` is the part of the configuration about agents."""
        self.broker = EmbeddedServer(folder / "nats")
        self.processes = Processes(self.broker.url, folder / "workers.log")
        self.url = ""
        """URL of the gateway, once it has started."""
        self._folder = folder
        self._num_reports = 0
        tree = {
            "models": {MODEL: {"path": str(folder)}},
            "nats": {"unchecked": True},
            "delivery": {"ack_wait_s": ack_wait_s, "drain_s": 1.0} | delivery,
            "agent": agent | {"mcp_networks": ["127.0.0.0/8"]},
        }
        self._config = write_config(tree, folder)

    @asynccontextmanager
    async def running(self, script: Script) -> AsyncIterator[ScriptedModel]:
        """Run the broker and a scripted model; at the end, kill all processes."""
        self.broker.start()
        model = ScriptedModel(self.broker.url, script)
        try:
            async with self.bus() as bus:
                await bus.streams.prepare(NatsConfig(unchecked=True), DeliveryConfig())
            model.start()
            yield model
        finally:
            await self.kill()
            model.stop()
            self.broker.stop()

    async def start(self, *roles: str) -> None:
        """Start workers of the product, and return when they are ready."""
        config, url = self._config, self.broker.url
        await self._open(
            {role: worker_command(role, config=config, url=url) for role in roles or ROLES}
        )

    async def start_watched(
        self, name: str, role: str, *, bug: str = "", dies_after: Iterable[str] = ()
    ) -> Path:
        """Start a worker of `ops.chaos.agents.worker`, and return the file of its report."""
        self._num_reports += 1
        report = self._folder / f"report-{self._num_reports}"
        report.touch()
        files = (str(self._config), self.broker.url, str(report))
        arguments = ("ops.chaos.agents.worker", role, *files, bug, "+".join(dies_after))
        await self._open({name: Command(arguments)})
        return report

    async def _open(self, commands: dict[str, Command]) -> None:
        await self.processes.start(commands)
        self.url = next(iter(await self.processes.gateways()), "")

    async def kill(self, *names: str) -> None:
        """Kill the processes of these names that run, or all."""
        names = tuple(n for n in names or [*self.processes.running] if n in self.processes.running)
        if names:
            await self.processes.kill(*names)

    @asynccontextmanager
    async def bus(self) -> AsyncIterator[Bus]:
        bus = await Bus.connect(self.broker.url, "chaos")
        try:
            yield bus
        finally:
            await bus.close()

    @asynccontextmanager
    async def http(self) -> AsyncIterator[httpx.AsyncClient]:
        async with httpx.AsyncClient(base_url=self.url, timeout=60, trust_env=False) as http:
            yield http
