"""`make wheel-check`: the built wheel alone, installed as a tool, serves and answers.

The environment is new, only PATH and HOME are inherited, and the working folder is empty, so that
nothing comes from a checkout. Only the cache of compiled kernels belongs to the user. With
`--kernels`, the wheel has the kernels for this processor, and there is neither a cache nor a
compiler.
"""

import argparse
import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
import wave
from collections.abc import Iterator
from pathlib import Path

from ops import install
from shared.native import targets
from shared.native.library import processor_flags

IMAGE = Path(__file__).parent / "demo_images" / "red.png"
QUESTION = "What color is this image?"
TEXT = "a red circle on blue"
# Twenty characters take a second; a speech that breaks off at once has a few frames.
MIN_SOUND_S = 0.5
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
READY_S = 240
# Characters of a log in an error.
MAX_SHOWN = 4000


class CheckFailed(Exception):
    """A step of the check has failed; the message has its output."""


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


def run(command: list[str], env: dict[str, str], folder: Path, timeout_s: int = 120) -> str:
    done = subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if done.returncode != 0:
        words = " ".join(command)
        raise CheckFailed(f"{words} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


@contextlib.contextmanager
def kernels_for_this_machine() -> Iterator[None]:
    """Have the kernels in the checkout while a wheel is built."""
    name = next(n for n, target in targets.TARGETS.items() if target.needs <= processor_flags())
    targets.compile_targets([name], targets.FOLDER)
    try:
        yield
    finally:
        shutil.rmtree(targets.FOLDER)


def install_wheel(folder: Path) -> Path:
    """Build the wheel and install it with `uv tool install`; return the command."""
    uv, pinned = install.UV, ["--build-constraints", str(install.LOCK)]
    build = [
        uv,
        "build",
        "--wheel",
        "--quiet",
        "--system-certs",
        "--out-dir",
        str(folder / "dist"),
        *pinned,
    ]
    run([*build, str(install.ROOT)], dict(os.environ), folder)
    (wheel,) = (folder / "dist").glob("*.whl")
    env = os.environ | {
        "UV_TOOL_DIR": str(folder / "tools"),
        "UV_TOOL_BIN_DIR": str(folder / "bin"),
    }
    options = ["--constraints", str(install.LOCK), *install.choose_torch()]
    tool = [uv, "tool", "install", "--quiet", "--system-certs", "--python", sys.executable]
    run([*tool, *options, *install.index_options(), str(wheel)], env, folder, 600)
    return folder / "bin" / "pagemill"


@contextlib.contextmanager
def running(pagemill: Path, env: dict[str, str], folder: Path) -> Iterator[None]:
    """Run `pagemill up` until it is ready, and hold it to a clean end."""
    output = folder / "stderr"
    with output.open("wb") as stderr:
        up = subprocess.Popen([str(pagemill), "up"], env=env, cwd=folder, stderr=stderr)
    try:
        deadline = time.monotonic() + READY_S
        while b"ready at" not in output.read_bytes():
            if up.poll() is not None or time.monotonic() > deadline:
                log = folder / "data" / "pagemill.log"
                logged = log.read_text()[-MAX_SHOWN:] if log.exists() else ""
                raise CheckFailed(f"pagemill up was never ready:\n{output.read_text()}\n{logged}")
            time.sleep(0.1)
        yield
    finally:
        up.send_signal(signal.SIGINT)
        code = up.wait(60)
    if code != 0:
        raise CheckFailed(f"pagemill up ended with {code}:\n{output.read_text()}")


def check(folder: Path, has_kernels: bool) -> None:
    with kernels_for_this_machine() if has_kernels else contextlib.nullcontext():
        pagemill = install_wheel(folder)
    home, (nats, gateway) = folder / "home", free_ports(2)
    home.mkdir()
    kernels = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    env = {"PATH": os.defpath, "HOME": str(home), "XDG_CACHE_HOME": kernels}
    if has_kernels:
        env |= {"PATH": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    say(f"pagemill {run([str(pagemill), '--version'], env, home).strip()}, from a wheel")
    if "requests" not in run([str(pagemill), "--help"], env, home):
        raise CheckFailed("the help names no commands")
    env |= {"PAGEMILL_NATS__PORT": str(nats), "PAGEMILL_GATEWAY__PORT": str(gateway)}
    with running(pagemill, env, home):
        ask = [str(pagemill), "ask", f"{QUESTION} @{IMAGE}"]
        answer = run(ask, env, home).strip()
        check_sound(run_saving(pagemill, ["say", TEXT], home / "out.wav", env))
        check_image(run_saving(pagemill, ["draw", TEXT], home / "out.png", env))
        with urllib.request.urlopen(f"http://127.0.0.1:{gateway}/", timeout=30) as page:
            if b"<html" not in page.read():
                raise CheckFailed("the gateway's web page is missing")
    if has_kernels:
        check_kernels(home)
    if "red" not in answer.lower():
        raise CheckFailed(f"the answer is wrong: {answer!r}")
    say(f"{QUESTION} {answer}")


def run_saving(pagemill: Path, command: list[str], file: Path, env: dict[str, str]) -> Path:
    run([str(pagemill), *command, "-o", str(file)], env, file.parent)
    return file


def check_kernels(home: Path) -> None:
    log = (home / "data" / "pagemill.log").read_text()
    if "native_kernels_unavailable" in log or list((home / "cache").rglob("native-*.so")):
        raise CheckFailed(f"the running kernels are not from the wheel:\n{log[-MAX_SHOWN:]}")
    say("the kernels are from the wheel, without a compiler")


def check_sound(file: Path) -> None:
    with wave.open(str(file)) as sound:
        length_s = sound.getnframes() / sound.getframerate()
        is_silent = not any(sound.readframes(sound.getnframes()))
    if length_s < MIN_SOUND_S or is_silent:
        raise CheckFailed(f"the speech is {length_s:.2f} s long, silent: {is_silent}")
    say(f"{TEXT!r} is spoken in {length_s:.2f} s of sound")


def check_image(file: Path) -> None:
    data = file.read_bytes()
    # The header of a PNG file has the signature, a chunk's length and name, and the size.
    width, height = struct.unpack(">8x8xII", data[:24])
    if not data.startswith(PNG_SIGNATURE) or min(width, height) < 1:
        raise CheckFailed(f"the image is no PNG file: it begins with {data[:24]!r}")
    say(f"{TEXT!r} is painted in {width} x {height} pixels")


def say(text: str) -> None:
    sys.stdout.write(f"wheel-check: {text}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="make wheel-check", description=__doc__)
    parser.add_argument("--kernels", action="store_true", help="with kernels for this processor")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pagemill-wheel-") as folder:
        try:
            check(Path(folder), arguments.kernels)
        except (CheckFailed, subprocess.TimeoutExpired) as error:
            say(f"failed: {error}")
            return 1
    used = os.times()
    cpu_s = used.user + used.system + used.children_user + used.children_system
    say(f"passed in {time.monotonic() - began:.0f} s, {cpu_s:.0f} s of CPU time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
