"""Run vLLM's load client, `vllm bench serve`, against the gateway: every request must succeed.

    python -m ops.interop.load --peers FOLDER

FOLDER has vLLM's environment as `vllm`, see ops/bench/peers/install.sh. 1, 8 and 32 clients at once
use the demo model through both endpoints. Exits 0 only if no request failed.
"""

import asyncio
import os
import subprocess
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import msgspec
from rich.console import Console

from ops.bench.servers import vllm_of_command_line
from ops.serving import MODEL, serving

BACKENDS = {"openai-chat": "/v1/chat/completions", "openai": "/v1/completions"}
LOADS = (1, 8, 32)
ROUNDS = 4
INPUT_LEN, OUTPUT_LEN = 64, 32


class Result(msgspec.Struct, frozen=True):
    """The fields of the client's report that are read here; times are in milliseconds."""

    completed: int
    failed: int
    total_output_tokens: int
    output_throughput: float
    median_ttft_ms: float
    p99_ttft_ms: float


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the client: an endpoint and a number of concurrent requests."""

    backend: str
    load: int

    @property
    def num_requests(self) -> int:
        return ROUNDS * self.load

    def command(self, binary: Path, url: str, file: Path) -> list[str]:
        return [
            str(binary), "bench", "serve", "--backend", self.backend, "--base-url", url,
            "--endpoint", BACKENDS[self.backend], "--model", "demo", "--tokenizer", str(MODEL),
            "--dataset-name", "random", "--random-input-len", str(INPUT_LEN),
            "--random-output-len", str(OUTPUT_LEN), "--ignore-eos", "--seed", str(self.load),
            "--num-prompts", str(self.num_requests), "--max-concurrency", str(self.load),
            "--save-result", "--result-dir", str(file.parent), "--result-filename", file.name,
            "--disable-tqdm",
        ]  # fmt: skip

    def passed(self, result: Result) -> bool:
        # Numbers of tokens differ, because the client tokenizes the text again.
        return result.failed == 0 and result.completed == self.num_requests


def main() -> None:
    console = Console(soft_wrap=True)
    binary = vllm_of_command_line(__doc__, console)
    if binary is None:
        return
    raise SystemExit(asyncio.run(_run_all(binary, console)))


async def _run_all(binary: Path, console: Console) -> int:
    """Run all loads; return the number of runs that failed."""
    failed = 0
    async with serving() as (url, folder):
        for backend, load in product(BACKENDS, LOADS):
            run, file = Run(backend, load), folder / f"{backend}-{load}.json"
            output = await asyncio.to_thread(_call, run.command(binary, url, file), folder)
            result = msgspec.json.decode(file.read_bytes(), type=Result) if file.exists() else None
            passed = result is not None and run.passed(result)
            failed += not passed
            console.print(
                f"{'ok' if passed else 'FAILED'}  {_describe(run, result)}", highlight=False
            )
            if not passed:
                console.print(output[-4000:], markup=False, highlight=False)
    return failed


def _call(command: list[str], folder: Path) -> str:
    quiet = {"DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | quiet,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout


def _describe(run: Run, result: Result | None) -> str:
    where = f"{BACKENDS[run.backend]}, {run.load} at once"
    if result is None:
        return f"{where}: no result"
    return (
        f"{where}: {result.completed} answers, {result.failed} errors;"
        f" {result.output_throughput:,.0f} tokens/s,"
        f" TTFT {result.median_ttft_ms:.0f} ms, p99 {result.p99_ttft_ms:.0f}"
    )


if __name__ == "__main__":
    main()
