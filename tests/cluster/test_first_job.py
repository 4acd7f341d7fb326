"""The commands of the page "Your first job from a queue", as a reader would type them."""

import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import CONFIG, ROOT, Cluster, reader_env, start_cluster, stop_cluster
from tests.gateway.conftest import needs_curl
from tests.npm import install, needs_npm

PAGE = ROOT / "docs" / "guide" / "first-job.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCKS = BLOCK.findall(PAGE.read_text())
SHOWN = [line for language, block in BLOCKS if not language for line in block.splitlines()]
PAINTER = f"""max_model_len: 1024
    stages:
      dit:
        role: generator
        path: {ROOT / "ops" / "demo_painter"}
        inputs: {{prompt: {{from: request, function: paint}}}}
        output: {{name: image, kind: image}}
        sizes: [120x120]
        sampling_defaults: {{steps: 4, guidance: 1.0}}
"""
WITH_PAINTER = CONFIG.replace("max_model_len: 1024\n", PAINTER) + "gateway: {tenant: local}\n"
needs_tools = pytest.mark.skipif(
    not all(shutil.which(tool) for tool in ("bash", "jq", "openssl")),
    reason="needs bash, jq and openssl",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = start_cluster(tmp_path_factory.mktemp("cluster"), WITH_PAINTER)
    yield running
    stop_cluster(running)


class Reader:
    """A terminal of a reader, in a folder with the examples."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._folder, self._job = folder, ""
        self._http_url = cluster.http_url
        shutil.copytree(ROOT / "ops" / "examples", folder / "ops" / "examples")
        programs = folder / "bin"
        programs.mkdir()
        self._env = reader_env(cluster, programs)

    def type(self, line: str) -> str:
        """Run a line of the page, with the id of the last job in place of `ID`."""
        line = re.sub(r"\bID\b", self._job, line).replace("http://127.0.0.1:8000", self._http_url)
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self._folder,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        if re.search(r"\b(ask|paint) \"", line):
            self._job = done.stdout.strip()
            assert re.fullmatch(r"[0-9a-f-]{32,36}", self._job)
        return done.stdout

    def size_of(self, image: str) -> tuple[int, int]:
        data = (self._folder / image).read_bytes()
        assert data.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", data[16:24])
        return width, height


@pytest.fixture
def reader(cluster: Cluster, tmp_path: Path) -> Reader:
    return Reader(cluster, tmp_path)


def run_program(reader: Reader, program: str) -> str:
    """Run the lines of the page with a program, and return the answer."""
    ask, read, paint, save = (line for line in SHOWN if line.startswith(program))
    reader.type(ask)
    answer = reader.type(read)
    reader.type(paint)
    reader.type(save)
    assert reader.size_of("circle.png") == (120, 120)
    return answer


@needs_curl
def test_a_job_is_found_by_its_id(reader: Reader) -> None:
    answer = run_program(reader, "python ops/examples/job.py")
    assert len(answer) > 10
    reader.type('python ops/examples/job.py ask "What can you do?"')
    where, curl = (line for line in SHOWN if line.startswith(("pagemill where", "curl")))
    assert reader.type("python ops/examples/job.py read ID") == answer
    assert "finished" in reader.type(where)
    assert '"state":"finished"' in reader.type(curl)


@needs_npm
def test_the_node_program_gets_the_same_answer(reader: Reader, tmp_path: Path) -> None:
    install(tmp_path / "ops" / "examples")
    answer = run_program(reader, "node ops/examples/job.mjs")
    reader.type('python ops/examples/job.py ask "What can you do?"')
    assert reader.type("python ops/examples/job.py read ID") == answer


@needs_tools
def test_the_shell_program_gets_the_same_answer(reader: Reader) -> None:
    answer = run_program(reader, "bash ops/examples/job.sh")
    reader.type('python ops/examples/job.py ask "What can you do?"')
    assert reader.type("python ops/examples/job.py read ID") == answer


@needs_tools
@pytest.mark.parametrize("program", ["python ops/examples/job.py", "bash ops/examples/job.sh"])
def test_a_job_that_does_not_exist_is_an_error(reader: Reader, program: str) -> None:
    with pytest.raises(AssertionError, match="there is no request with this id"):
        reader.type(f"{program} read never-queued")


@pytest.mark.parametrize(
    ("program", "file"),
    [(sys.executable, "job.py"), pytest.param("node", "job.mjs", marks=needs_npm)],
)
def test_a_program_without_a_server_says_so(program: str, file: str, tmp_path: Path) -> None:
    examples = tmp_path / "examples"
    shutil.copytree(ROOT / "ops" / "examples", examples)
    if program == "node":
        install(examples)
    done = subprocess.run(
        [program, file, "ask", "Hello"],
        cwd=examples,
        env=os.environ | {"NATS_URL": "nats://127.0.0.1:1", "NATS_NKEY": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "cannot connect to nats://127.0.0.1:1" in done.stderr
    assert len(done.stderr.splitlines()) <= 4
