"""Compare Pagemill and vLLM, each as renderer and as engine of the other, on random weights.

    python -m ops.interop --peers FOLDER

FOLDER has vLLM's environment as `vllm`, see ops/bench/peers/install.sh. Both serve a small Qwen2-VL
in float32 and decode greedily, so that each request has one right answer. Bodies go unchanged from
one server to the other, except for the hashes of images with other pixels. Exits 0 only if
everything that must be equal is.
"""

import asyncio
from pathlib import Path

from ops.bench.models import write_tiny
from ops.bench.servers import vllm_of_command_line
from ops.interop.checks import check_all
from ops.interop.pairs import Report, serve_both


async def compare(binary: Path) -> int:
    report = Report()
    async with serve_both(binary, "tiny-qwen2vl", write_tiny) as pair:
        await report.add(check_all(*pair))
    return report.end()


if __name__ == "__main__":
    if (binary := vllm_of_command_line(__doc__)) is not None:
        raise SystemExit(asyncio.run(compare(binary)))
