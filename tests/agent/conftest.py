"""Agents and a gateway in front of a scripted model, and MCP servers of several kinds."""

import json
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from ops.chaos.agents.scripted_model import MODEL, ScriptedModel
from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.protocol.requests import GenerateRequest
from tests import preloaded
from tests.agent.tool_server import Calls, attacker, counted, legacy, new_tools, serving
from tests.cluster.conftest import ROOT
from tests.gateway.conftest import Gateway, Process, start_gateway_at

TOKEN = "mark-of-the-token"
PAINTER: dict[str, Any] = {
    "dit": {
        "role": "generator",
        "path": str(ROOT / "ops" / "demo_painter"),
        "inputs": {"prompt": {"from": "request", "function": "paint"}},
        "output": {"name": "image", "kind": "image"},
        "sizes": ["16x16", "12x8"],
    }
}

EDITOR = "editor"
"""Name of a model that edits one image, and writes no text."""
EDITS: dict[str, Any] = {
    "renderer": {"enabled": False},
    "engine": {"enabled": False},
    "dit": PAINTER["dit"] | {"input_images": 1},
}


@dataclass
class AgentRig:
    broker: EmbeddedServer
    gateway: Gateway
    tree: dict[str, Any]
    folder: Path
    calls: Calls
    model: ScriptedModel
    scripts: dict[str, list[str]] = field(default_factory=dict)
    """Texts of the turns, by the last message of a user in the first turn."""
    agents: list[Process] = field(default_factory=list)

    def start_agent(self) -> Process:
        config = self.folder / "agent.yaml"
        config.write_text(json.dumps(self.tree))
        command = ["worker", "agent", "--config", str(config), "--nats", self.broker.url]
        env = os.environ | {"CALC_TOKEN": TOKEN}
        with (self.folder / "agent.log").open("ab") as stderr:
            agent = preloaded.start(command, cwd=self.folder, env=env, stderr=stderr)
        self.agents.append(agent)
        return agent

    def names_in(self, text: str) -> list[str]:
        """Return the scripts that a text names; with images it is one of several parts."""
        return [name for name in self.scripts if text == name or f"text='{name}'" in text]

    def script(self, request: GenerateRequest, request_id: str) -> str:
        number = int(request_id.rpartition("~t")[2])
        messages = request.messages or []
        # Messages of the responses before belong to earlier scripts.
        texts = [str(m.content) for m in (messages if number else messages[-1:])]
        scripts = (self.scripts[name] for text in reversed(texts) for name in self.names_in(text))
        turns = next(scripts, [])
        return turns[number] if number < len(turns) else "Done."


def call(name: str, **arguments: Any) -> str:
    """A call as the model writes it."""
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


@pytest.fixture(scope="session")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentRig]:
    """A separate broker, because the scripted model takes every request of its broker."""
    folder, calls = tmp_path_factory.mktemp("agent"), Calls()
    broker = EmbeddedServer(folder / "nats")
    broker.start()
    with (
        serving(counted(new_tools(calls).streamable_http_app(), calls)) as tools,
        serving(legacy(calls)) as old,
        serving(attacker()) as attacks,
    ):
        calc = {"url": f"{tools}/mcp", "headers_env": {"Authorization": "CALC_TOKEN"}}
        servers: dict[str, Any] = {
            "calc": calc,
            "free": calc | {"require_approval": "never"},
            "safe": calc | {"require_approval": "never", "idempotency": "header"},
            "old": {"url": f"{old}/mcp", "require_approval": "never"},
            "closed": {"url": "http://127.0.0.1:9/mcp", "require_approval": "never"},
            "outside": {"url": "http://127.0.0.2:9/mcp"},
        }
        for path in attacks_of(attacker()):
            servers[path] = {"url": f"{attacks}/{path}", "require_approval": "never"}
        agent = {"servers": servers, "mcp_networks": ["127.0.0.1/32"], "call_timeout_s": 3.0}
        tree = {
            "models": {
                MODEL: {"path": str(ROOT / "ops" / "demo_model"), "stages": PAINTER},
                EDITOR: {"path": str(ROOT / "ops" / "demo_painter"), "stages": EDITS},
            },
            "nats": {"unchecked": True},
            "delivery": {"ack_wait_s": 1.5, "drain_s": 2.0},
            "gateway": {"port": 0},
            "agent": agent | {"max_answer_mib": 1},
        }
        gateway = start_gateway_at(broker.url, tree, folder)
        running = AgentRig(broker, gateway, tree, folder, calls, None)  # type: ignore[arg-type]
        running.model = ScriptedModel(broker.url, running.script)
        running.model.start()
        running.start_agent()
        yield running
        running.model.stop()
        for process in running.agents:
            if process.poll() is None:
                process.kill()
                process.wait(10)
        gateway.stop()
    broker.stop()


def attacks_of(app: Any) -> list[str]:
    return [route.path.removeprefix("/") for route in app.routes]


@pytest.fixture
async def openai_client(rig: AgentRig) -> AsyncIterator[AsyncOpenAI]:
    url = f"{rig.gateway.url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
async def agent_bus(rig: AgentRig) -> AsyncIterator[Bus]:
    connection = await Bus.connect(rig.broker.url, "test")
    yield connection
    await connection.close()
