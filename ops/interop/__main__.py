"""Compare Pagemill and vLLM, each as renderer and as engine of the other, on random weights.

    python -m ops.interop --peers FOLDER

FOLDER has vLLM's environment as `vllm`, see ops/bench/peers/install.sh. Both serve a small model of
each family in float32 and decode greedily, so that each request has one right answer. Bodies are
sent unchanged from one server to the other, except for the hashes of images with other pixels.
Exits 0 only if everything that must be equal is.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from ops.bench.models import write_tiny
from ops.bench.servers import vllm_of_command_line
from ops.interop import models
from ops.interop.checks import Finding, check_all, check_cases, check_masked
from ops.interop.media_cases import omni_cases, sound_cases, video_cases
from ops.interop.pairs import Pair, Report, serve_both

Check = Callable[..., Iterator[Finding]]
"""Compares the two servers of a pair."""
MODELS: dict[str, tuple[Callable[[Path], None], Check]] = {
    "tiny-qwen2vl": (write_tiny, check_all),
    "qwen2vl": (models.write_qwen2vl, partial(check_cases, video_cases)),
    "qwen25vl": (models.write_qwen25vl, partial(check_cases, video_cases)),
    "qwen3vl": (models.write_qwen3vl, partial(check_masked, video_cases)),
    "qwen2audio": (models.write_qwen2audio, partial(check_cases, sound_cases)),
    "omni": (models.write_omni, partial(check_cases, omni_cases)),
}


async def compare_all(binary: Path) -> int:
    report = Report()
    for name, (write, check) in MODELS.items():
        async with serve_both(binary, name, write) as pair:
            await report.add(_named(name, check, pair))
    return report.end()


def _named(model: str, check: Check, pair: Pair) -> Iterator[Finding]:
    for finding in check(*pair):
        yield replace(finding, name=f"{model}: {finding.name}")


if __name__ == "__main__":
    if (binary := vllm_of_command_line(__doc__)) is not None:
        raise SystemExit(asyncio.run(compare_all(binary)))
