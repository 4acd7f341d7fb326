"""Run popular clients, unchanged, against the demo, and compare with plain HTTP.

    python -m ops.interop.clients [NAME ...]

Each client is a program in this folder with an environment from the registry of its language. It
prints the result of each check; requests to the demo are greedy, so that results must be equal.
Exits 0 only if all are, and if requests that a client has left are cancelled.
"""

import asyncio
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from ops.demo import HEARING
from ops.harness.deployment import ROOT, deployment, preload_for
from ops.harness.tables import console, print_table
from ops.interop.clients.plain import final_state, make_cases, plain_results
from ops.interop.environments import CONSTRAINTS, NODE, PROGRAMS, node_with_packages, python_with
from workers import settings
from workers.supervisor.preloader import Preloader

TIMEOUT_S = 300.0
MANIFEST = PROGRAMS / "package.json"
CHECKS = (
    "chat", "stream", "tools", "streamed_tools", "structured", "embeddings", "speech",
    "transcription", "image", "responses", "batch", "tokens", "failures", "timeout", "cancel",
)  # fmt: skip
EQUAL = "equal"
OPENAI = ("NotFoundError 404", "BadRequestError 400", "APITimeoutError")
LANGCHAIN = ("OpenAIModelNotFoundError 404", "OpenAIInvalidRequestError 400", "OpenAITimeoutError")


@dataclass(frozen=True, slots=True)
class Client:
    package: str
    program: str
    failures: tuple[str, str, str]
    """Exceptions for an unknown model, for a bad field, and for a request that takes too long."""

    @property
    def version(self) -> str:
        if self.is_node:
            return str(json.loads(MANIFEST.read_bytes())["dependencies"][self.package])
        return str(re.findall(f"(?m)^{self.package}==([^ \n]+)", CONSTRAINTS.read_text())[0])

    @property
    def is_node(self) -> bool:
        return self.program.endswith(".mjs")

    def install(self) -> tuple[Path, list[str]]:
        """Install the client unless it is, and return the program's folder and command."""
        if self.is_node:
            return node_with_packages(), [NODE, self.program]
        module = f"ops.interop.clients.{Path(self.program).stem}"
        return ROOT, [str(python_with(self.package)), "-m", module]

    def run(self, url: str) -> dict[str, Any]:
        """Return the results of the program. Raises CalledProcessError if it breaks off."""
        folder, command = self.install()
        names = {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": "none",
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "none",
            # Without it, LiteLLM loads a table of prices from the network.
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | names,
            input=json.dumps(make_cases(Path(self.program).name)),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=TIMEOUT_S,
        )
        return dict(json.loads(done.stdout))


CLIENTS = {
    "openai": Client("openai", "with_openai.py", OPENAI),
    "openai-node": Client("openai", "with_openai.mjs", (*OPENAI[:2], "APIConnectionTimeoutError")),
    "litellm": Client("litellm", "with_litellm.py", (*OPENAI[:2], "Timeout 408")),
    "langchain": Client("langchain-openai", "with_langchain.py", LANGCHAIN),
    "vercel": Client(
        "ai", "with_vercel.mjs", ("APICallError 404", "APICallError 400", "DOMException")
    ),
    "anthropic": Client("anthropic", "with_anthropic.py", OPENAI),
    "anthropic-node": Client(
        "@anthropic-ai/sdk", "with_anthropic.mjs", (*OPENAI[:2], "APIConnectionTimeoutError")
    ),
}


def compare(client: Client, url: str, http: httpx.Client, plain: dict[str, Any]) -> dict[str, str]:
    """Return "equal" or the difference for each check of a client."""
    results, name = client.run(url), Path(client.program).name
    expected = plain | {
        "failures": list(client.failures[:2]),
        "timeout": [client.failures[2], "cancelled"],
        "cancel": [None, "cancelled"],
    }
    for check in ("timeout", "cancel"):
        results[check] = [results[check], final_state(http, f"{check}-{name}")]
    return {
        check: EQUAL if is_equal(result, expected[check]) else f"{result} != {expected[check]}"
        for check, result in results.items()
    }


def is_equal(left: Any, right: Any) -> bool:
    """Whether two results are equal. Inputs of one batch share steps, which round differently."""
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(is_equal, left, right))
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, abs_tol=1e-4)
    return bool(left == right)


def compare_all(url: str, clients: dict[str, Client]) -> int:
    """Print the table of all clients; return 0 only if all results are equal."""
    verdicts: dict[str, dict[str, str]] = {}
    with httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False) as http:
        plain = plain_results(http)
        for name, client in clients.items():
            verdicts[name] = compare(client, url, http, plain)
            for check, verdict in verdicts[name].items():
                if verdict != EQUAL:
                    console.print(f"{name}: {check}: {verdict}", markup=False)
    rows = [[check, *(_mark(found.get(check)) for found in verdicts.values())] for check in CHECKS]
    names = [f"{name} {client.version}" for name, client in clients.items()]
    print_table("results equal to plain HTTP", ["check", *names], rows)
    return int(any(text != EQUAL for found in verdicts.values() for text in found.values()))


def _mark(verdict: str | None) -> str:
    if verdict is None:
        return "-"
    return "yes" if verdict == EQUAL else "no"


def demo_tree() -> dict[str, Any]:
    """Return the embedded configuration with a model that hears and one that never stops."""
    tree: dict[str, Any] = msgspec.yaml.decode(settings.EMBEDDED)
    hearing = msgspec.yaml.decode(HEARING.read_bytes())["models"]["hearing"]
    endless = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 3000}
    tree["models"] |= {
        "hearing": hearing | {"path": str(HEARING.parent)},
        "endless": {"path": str(settings.DEMO_MODEL), "sampling_defaults": endless},
    }
    return tree | {"agent": {}, "batch": {}}


async def serve(clients: dict[str, Client], folder: Path, preloader: Preloader | None) -> int:
    async with deployment(demo_tree(), folder=folder, preloader=preloader) as site:
        return await asyncio.to_thread(compare_all, site.http, clients)


def main() -> int:
    clients = {name: CLIENTS[name] for name in sys.argv[1:] or CLIENTS}
    for client in clients.values():
        client.install()
    with tempfile.TemporaryDirectory(prefix="pagemill-clients-") as name:
        folder = Path(name)
        return asyncio.run(serve(clients, folder, preload_for(demo_tree(), folder)))


if __name__ == "__main__":
    sys.exit(main())
