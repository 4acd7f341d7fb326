"""The README's quickstart is run as it stands there, but for the port."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.gateway.conftest import Gateway
from tests.gateway.openai.test_chat import ROOT

_SECTION = re.compile(r"<!-- quickstart.*?-->(.*?)<!-- end -->", re.DOTALL)
_BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
RUN_BY = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}


def snippets() -> dict[str, str]:
    (section,) = _SECTION.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    return dict(_BLOCK.findall(section))


@pytest.mark.parametrize("language", RUN_BY)
def test_the_quickstart(gateway: Gateway, language: str) -> None:
    if language == "bash" and shutil.which("curl") is None:
        pytest.skip("needs curl")
    source = snippets()[language]
    assert "http://127.0.0.1:8000/v1" in source
    source = source.replace("http://127.0.0.1:8000", gateway.url)
    env = os.environ | {"no_proxy": "*", "NO_PROXY": "*"}
    done = subprocess.run(
        [*RUN_BY[language], source],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    text = done.stdout
    if language == "bash":
        assert text.endswith("data: [DONE]\n\n")
        text = "".join(re.findall(r'"content":"(.*?)"', text))
    assert "red" in text.lower()
