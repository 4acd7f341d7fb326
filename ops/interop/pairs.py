"""A pair of servers, vLLM's and ours, on one model, and the report of what was compared."""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import httpx
from rich.console import Console

from ops.bench.servers import interop_tree, vllm
from ops.harness.deployment import deployment
from ops.interop.checks import Finding

TIMEOUT_S = 120.0
Pair = tuple[httpx.Client, httpx.Client]
"""Clients of our server and of vLLM's."""
console = Console(soft_wrap=True, highlight=False)


@contextlib.asynccontextmanager
async def serve_both(binary: Path, name: str, write: Callable[[Path], None]) -> AsyncIterator[Pair]:
    """Write a model and serve it with both."""
    began_s, path = time.monotonic(), f"models/{name}"
    with tempfile.TemporaryDirectory(prefix="pagemill-interop-") as scratch:
        folder = Path(scratch)
        (folder / path).mkdir(parents=True)
        write(folder / path)
        with vllm(binary, folder, path) as theirs:
            async with deployment(interop_tree(folder, path)) as site:
                console.print(f"{time.monotonic() - began_s:.0f} s  both serve {name}")
                with (
                    httpx.Client(base_url=site.http, timeout=TIMEOUT_S, trust_env=False) as us,
                    httpx.Client(base_url=theirs, timeout=TIMEOUT_S, trust_env=False) as them,
                ):
                    yield us, them


class Report:
    """Prints findings, and counts those that differ."""

    def __init__(self) -> None:
        self._num_compared = self._num_different = 0

    async def add(self, findings: Iterable[Finding]) -> None:
        """Print findings as they are made, in a thread: the checks wait for both servers."""
        await asyncio.to_thread(self._print_all, findings)

    def end(self) -> int:
        """Print the number of findings; return 0 only if none differs."""
        console.print(f"{self._num_compared} compared, {self._num_different} differ")
        return min(self._num_different, 1)

    def _print_all(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self._num_compared += 1
            self._num_different += not finding.equal
            mark = "[green]equal[/]" if finding.equal else "[red]DIFFERS[/]"
            console.print(f"{mark}  {finding.name}")
            if finding.detail:
                console.print(f"         {finding.detail}", markup=False)
