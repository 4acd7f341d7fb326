"""vLLM's server, and configurations of ours for the same model."""

import argparse
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from ops.bench.peers.roster import ROSTER, environment
from ops.harness.tables import console
from shared.bus.embedded_server import free_port
from workers.settings import DEMO_MODEL

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


def vllm_of_command_line(doc: str | None) -> Path | None:
    """Return vLLM's binary in the folder of --peers, or print that there is none."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--peers", type=Path, required=True, help="folder with environments")
    peers = parser.parse_args().peers.absolute()
    binary = vllm_binary(peers)
    if binary is None:
        console.print(f"skipped: there is no vLLM in {peers}; see ops/bench/peers/install.sh")
    return binary


def model_in(peers: Path, name: str) -> Path:
    """Return the folder of a model, or the demo model if it is not there."""
    folder = peers / "models" / name
    return folder if folder.is_dir() else DEMO_MODEL


def vllm_binary(peers: Path) -> Path | None:
    """Return vLLM's binary, or None if it is not installed."""
    python = _VLLM.python(peers)
    binary = python and python.with_name("vllm")
    return binary if binary and binary.exists() else None


@contextlib.contextmanager
def vllm_if_installed(
    peers: Path, folder: Path, path: str, options: Sequence[str], *, patient: bool = True
) -> Iterator[str | None]:
    """Run vLLM's server and yield its URL, or yield None if it is not installed."""
    with contextlib.ExitStack() as stack:
        binary = vllm_binary(peers)
        server = binary and vllm(binary, folder, path, options, patient=patient)
        yield stack.enter_context(server) if server else None


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

    `path` is the path of the model, relative to `folder`; the string is part of every hash. With
    `patient`, idle threads do not spin, which would starve another server.
    """
    port = free_port()
    url, log = f"http://127.0.0.1:{port}", folder / "vllm.log"
    command = [str(binary), "serve", path, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", MODEL, *options]
    variables = environment(_VLLM, binary, os.cpu_count() or 1, kv_cache_gib=1)
    del variables["PYTHONPATH"]
    if patient:
        variables |= {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=variables, stdout=file, stderr=file, start_new_session=True
        )
    try:
        _wait(process, log, f"{url}/health")
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def bench_tree(model: Path, max_model_len: int) -> dict[str, Any]:
    """Return a configuration of a model in bfloat16, with room for 32 sequences.

    The demo model is in float32.
    """
    dtype = "float32" if model == DEMO_MODEL else "bfloat16"
    engine = {"threads": os.cpu_count(), "kv_cache_mib": 1024, "max_num_seqs": 32}
    served = {"path": str(model), "dtype": dtype, "max_model_len": max_model_len}
    return {"models": {MODEL: served}, "engine": engine}


def interop_tree(folder: Path, path: str) -> dict[str, Any]:
    """Return a configuration with the answers and hashes of vLLM with `COMPARABLE`."""
    model = {"path": str(folder / path), "dtype": "float32", "max_model_len": MAX_MODEL_LEN}
    return {
        "models": {MODEL: model | {"hash_model_id": path}},
        "engine": {"max_num_seqs": MAX_SEQS, "kv_cache_mib": 256},
    }


def _wait(process: "subprocess.Popen[bytes]", log: Path, url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _answers(url):
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{process.args!r} is not ready:\n{log.read_text()[-4000:]}")
        time.sleep(0.3)


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, trust_env=False).status_code == 200
    return False
