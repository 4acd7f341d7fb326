"""Compare Pagemill and vLLM on videos and sounds, each as renderer and as engine of the other.

    python -m ops.interop.media --peers FOLDER

As `python -m ops.interop`, with a random model of each family that vLLM has and that sees videos or
hears sounds. Exits 0 only if everything that must be equal is.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx

from ops.bench.servers import vllm_of_command_line
from ops.interop import models
from ops.interop.cases import Case
from ops.interop.checks import (
    GENERATE,
    RENDER,
    Finding,
    check_cases,
    check_items,
    compare,
    post,
    tokens_of,
)
from ops.interop.media_cases import omni_cases, sound_cases, video_cases
from ops.interop.pairs import Report, serve_both

CHAT = "/v1/chat/completions"
Write = Callable[[Path], None]
Check = Callable[[Iterable[Case], httpx.Client, httpx.Client], Iterator[Finding]]


def check_masked(given: Iterable[Case], us: httpx.Client, them: httpx.Client) -> Iterator[Finding]:
    """Compare videos with text among their tokens.

    vLLM's generate endpoint has no mask of a range: such a body of its own, too, ends its engine.
    So what it renders is compared in our engine with its answer to the request itself.
    """
    for case in given:
        ours, theirs = (post(server, RENDER, case.chat) for server in (us, them))
        hashes = (sorted(body["features"]["mm_hashes"].items()) for body in (ours, theirs))
        yield compare(f"{case.name}: hashes", *hashes)
        yield from check_items(case, ours, theirs)
        right = post(them, CHAT, case.chat | {"return_token_ids": True})
        answer = post(us, GENERATE, theirs)
        yield compare(f"{case.name}: theirs → ours, tokens", tokens_of(answer), tokens_of(right))


MODELS: dict[str, tuple[Write, Callable[[], list[Case]], Check]] = {
    "qwen2vl": (models.write_qwen2vl, video_cases, check_cases),
    "qwen25vl": (models.write_qwen25vl, video_cases, check_cases),
    "qwen3vl": (models.write_qwen3vl, video_cases, check_masked),
    "qwen2audio": (models.write_qwen2audio, sound_cases, check_cases),
    "omni": (models.write_omni, omni_cases, check_cases),
}


async def compare_all(binary: Path) -> int:
    report = Report()
    for name, (write, cases, check) in MODELS.items():
        async with serve_both(binary, name, write) as pair:
            named = (replace(f, what=f"{name}: {f.what}") for f in check(cases(), *pair))
            await report.add(named)
    return report.end()


if __name__ == "__main__":
    if (binary := vllm_of_command_line(__doc__)) is not None:
        raise SystemExit(asyncio.run(compare_all(binary)))
