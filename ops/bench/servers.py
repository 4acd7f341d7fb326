"""Starts vLLM's server and Pagemill on one model folder, under the same model path."""

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import yaml
from rich.console import Console

from ops.bench.peers.roster import ROSTER, environment

Ready = Callable[[], bool]

MODEL = "m"
MAX_MODEL_LEN = 2048
MAX_SEQS = 8
# Options for answers equal to ours, and for vLLM's endpoints that exchange rendered requests.
COMPARABLE = (
    "--dtype", "float32", "--enforce-eager", "--enable-scale-out",
    "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_SEQS),
)  # fmt: skip
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
_VLLM = next(spec for spec in ROSTER if spec.name == "vllm")
_ROOT = Path(__file__).parents[2]
_READY = re.compile(rb"ready at .*?(http://[0-9.]+:\d+)", re.DOTALL)


def vllm_of_command_line(doc: str, console: Console) -> Path | None:
    """Return vLLM's binary in the folder of --peers, or print that there is none."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--peers", type=Path, required=True, help="folder with environments")
    peers = parser.parse_args().peers.absolute()
    binary = vllm_binary(peers)
    if binary is None:
        console.print(f"skipped: there is no vLLM in {peers}; see ops/bench/peers/install.sh")
    return binary


def vllm_binary(peers: Path) -> Path | None:
    """Return vLLM's binary, or None if it is not installed."""
    python = _VLLM.python(peers)
    found = python and python.with_name("vllm")
    return found if found and found.exists() else None


@contextlib.contextmanager
def vllm(
    binary: Path,
    folder: Path,
    path: str,
    options: Sequence[str] = COMPARABLE,
    *,
    patient: bool = True,
) -> Iterator[str]:
    """Run vLLM's server; yield its URL.

    `path` is that of the model relative to `folder`; the string is part of every hash. With
    `patient`, idle threads do not spin, which would starve another server.
    """
    port = _free_port()
    command = [str(binary), "serve", path, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", MODEL, *options]
    variables = environment(_VLLM, binary, os.cpu_count() or 1, kv_cache_gib=1)
    del variables["PYTHONPATH"]
    if patient:
        variables |= {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
    url = f"http://127.0.0.1:{port}"
    with _process(command, folder, folder / "vllm.log", variables) as process:
        _wait(process, folder / "vllm.log", lambda: _answers(f"{url}/health"))
        yield url


@contextlib.contextmanager
def pagemill(folder: Path, path: str) -> Iterator[str]:
    """Run Pagemill; yield the URL of its gateway."""
    model = {"path": path, "dtype": "float32", "max_model_len": MAX_MODEL_LEN}
    tree = {
        "models": {MODEL: model | {"hash_model_id": path}},
        "engine": {"max_num_seqs": MAX_SEQS, "kv_cache_mib": 256},
        "nats": {"port": 0, "store_dir": str(folder / "nats")},
        "gateway": {"port": 0},
    }
    with serving(folder, tree) as url:
        yield url


@contextlib.contextmanager
def serving(folder: Path, tree: Mapping[str, object]) -> Iterator[str]:
    """Run `pagemill up` with a configuration, in a folder; yield the URL of its gateway."""
    config, log = folder / "pagemill.yaml", folder / "pagemill.log"
    config.write_text(yaml.safe_dump(dict(tree)))
    command = [sys.executable, "-m", "workers", "up", "--config", str(config)]
    variables = os.environ | {"PYTHONPATH": str(_ROOT), "COLUMNS": "400"}
    with _process(command, folder, log, variables) as process:
        _wait(process, log, lambda: _READY.search(log.read_bytes()) is not None)
        found = _READY.search(log.read_bytes())
        assert found is not None
        yield found.group(1).decode()


@contextlib.contextmanager
def _process(
    command: list[str], folder: Path, log: Path, variables: dict[str, str]
) -> Iterator["subprocess.Popen[bytes]"]:
    with log.open("ab") as written:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=variables,
            stdout=written,
            stderr=written,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: "subprocess.Popen[bytes]", log: Path, ready: Ready) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{process.args!r} is not ready:\n{log.read_text()[-4000:]}")
        time.sleep(0.3)


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, trust_env=False).status_code == 200
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
