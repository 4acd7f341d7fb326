"""Run the blocks of README and docs that are marked `<!-- run -->`, as a reader would type them.

`<!-- run: TEXT -->` also expects TEXT, in any case, in the output. All blocks share one running
`pagemill up`; the address of the test's gateway replaces the address in a block.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cluster.conftest import Cluster, reader_env
from tests.gateway.conftest import Gateway, needs_curl
from tests.gateway.routes.test_chat import ROOT

_MARKED = re.compile(r"^<!-- run(?:: (.+?))? -->\n\n```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
RUN_BY = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}


class Block(NamedTuple):
    page: str
    expected: str
    language: str
    source: str


def marked_blocks() -> list[Block]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [
        Block(str(page.relative_to(ROOT)), *groups)
        for page in pages
        for groups in _MARKED.findall(page.read_text(encoding="utf-8"))
    ]


BLOCKS = marked_blocks()


def run(block: Block, gateway: Gateway, env: dict[str, str]) -> str:
    done = subprocess.run(
        [*RUN_BY[block.language], block.source.replace("http://127.0.0.1:8000", gateway.url)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(
            block,
            id=f"{block.page}-{number}",
            marks=[needs_curl] if "curl " in block.source else [],
        )
        for number, block in enumerate(BLOCKS)
    ],
)
def test_a_marked_block_runs(
    block: Block, gateway: Gateway, cluster: Cluster, tmp_path: Path
) -> None:
    text = run(block, gateway, reader_env(cluster, tmp_path))
    if "data: " in text:
        assert text.endswith("data: [DONE]\n\n")
        text = "".join(re.findall(r'"content":"(.*?)"', text))
    assert block.expected.lower() in text.lower()


def test_the_readme_starts_with_curl_and_python() -> None:
    blocks = [block for block in BLOCKS if block.page == "README.md"]
    assert [block.language for block in blocks] == ["bash", "python"]
    for block in blocks:
        assert block.expected == "red"
        assert "http://127.0.0.1:8000/v1" in block.source
