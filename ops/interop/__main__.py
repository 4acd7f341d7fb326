"""Compare Pagemill and vLLM, each as renderer and as engine of the other, on random weights.

    python -m ops.interop --peers FOLDER

FOLDER has vLLM's environment as `vllm`, see ops/bench/peers/install.sh. Both serve a small Qwen2-VL
in float32 and decode greedily, so that each request has one right answer. Bodies go unchanged from
one server to the other, except for the hashes of images with other pixels. Exits 0 only if
everything that must be equal is.
"""

import tempfile
import time
from pathlib import Path

import httpx
from rich.console import Console

from ops.bench.models import write_tiny
from ops.bench.servers import pagemill, vllm, vllm_of_command_line
from ops.interop.checks import Finding, check_all

MODEL_PATH = "models/tiny-qwen2vl"
TIMEOUT_S = 120.0


def main() -> None:
    console = Console(soft_wrap=True)
    binary = vllm_of_command_line(__doc__, console)
    if binary is None:
        return
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pagemill-interop-") as name:
        folder = Path(name)
        write_tiny(folder / MODEL_PATH)
        with vllm(binary, folder, MODEL_PATH) as theirs, pagemill(folder, MODEL_PATH) as ours:
            console.print(f"{time.monotonic() - began_s:.0f} s  both are ready")
            with (
                httpx.Client(base_url=ours, timeout=TIMEOUT_S, trust_env=False) as us,
                httpx.Client(base_url=theirs, timeout=TIMEOUT_S, trust_env=False) as them,
            ):
                findings = [_print(console, finding) for finding in check_all(us, them)]
    differing = sum(not finding.equal for finding in findings)
    console.print(f"{len(findings)} compared, {differing} differ")
    raise SystemExit(min(differing, 1))


def _print(console: Console, finding: Finding) -> Finding:
    mark = "[green]equal[/]" if finding.equal else "[red]DIFFERS[/]"
    console.print(f"{mark}  {finding.what}", highlight=False)
    if finding.detail:
        console.print(f"         {finding.detail}", markup=False, highlight=False)
    return finding


if __name__ == "__main__":
    main()
