"""A pair of servers, vLLM's and ours, on one model, and the report of what was compared."""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import httpx
from rich.console import Console

from ops.bench.servers import pagemill, vllm
from ops.interop.checks import Finding

TIMEOUT_S = 120.0
Pair = tuple[httpx.Client, httpx.Client]
"""Clients of our server and of vLLM's."""


@contextlib.contextmanager
def serve_both(
    console: Console, binary: Path, name: str, write: Callable[[Path], None]
) -> Iterator[Pair]:
    """Write a model and serve it with both."""
    began_s, path = time.monotonic(), f"models/{name}"
    with tempfile.TemporaryDirectory(prefix="pagemill-interop-") as scratch:
        folder = Path(scratch)
        (folder / path).mkdir(parents=True)
        write(folder / path)
        with vllm(binary, folder, path) as theirs, pagemill(folder, path) as ours:
            console.print(f"{time.monotonic() - began_s:.0f} s  both serve {name}")
            with (
                httpx.Client(base_url=ours, timeout=TIMEOUT_S, trust_env=False) as us,
                httpx.Client(base_url=theirs, timeout=TIMEOUT_S, trust_env=False) as them,
            ):
                yield us, them


def report(console: Console, findings: Iterable[Finding]) -> None:
    """Print each finding and their number. Exits, with 0 only if none differs."""
    equal = [_print(console, finding).equal for finding in findings]
    differing = len(equal) - sum(equal)
    console.print(f"{len(equal)} compared, {differing} differ")
    raise SystemExit(min(differing, 1))


def _print(console: Console, finding: Finding) -> Finding:
    mark = "[green]equal[/]" if finding.equal else "[red]DIFFERS[/]"
    console.print(f"{mark}  {finding.what}", highlight=False)
    if finding.detail:
        console.print(f"         {finding.detail}", markup=False, highlight=False)
    return finding
