"""`make install`: .venv with the locked packages, and the build of torch for this machine.

This runs in the system's Python and imports only the standard library. uv installs: it takes a
tenth of pip's time, shows what it downloads, and links what another checkout has downloaded.
Sizes below were measured with torch 2.13.0 for Linux on x86-64.
"""

import argparse
import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "requirements.lock"
LOWEST = ROOT / "requirements-lowest.txt"
VENV = ROOT / ".venv"
LOWEST_VENV = VENV / "lowest"
PYTHON, UV = str(VENV / "bin" / "python"), str(VENV / "bin" / "uv")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu/torch/"
PYPI = "https://pypi.org/simple/"
EXIT_INTERRUPTED = 130
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
IMPORTS = """
import importlib
from workers.roles import all_roles
for role in all_roles():
    importlib.import_module(role.module)
"""
# No step is silent for longer than five seconds.
PROBE_TIMEOUT_S = 4


def make_venv() -> int:
    """Make .venv with pip and uv, if it has no uv that runs; return the exit code.

    An interrupted installation leaves half of a package, which pip takes for a whole one: then
    .venv is made from nothing. venv's own way to install pip is silent for seconds, and compiles
    it: the system's uv or pip installs both, where there is one.
    """
    if is_running(UV):
        return 0
    venv = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(VENV)]
    subprocess.run(venv, check=True)
    say("pip and uv, 20 MB to download")
    tools = ["pip>=25.1", "uv>=0.11"]
    if uv := shutil.which("uv"):
        command = [uv, "pip", "install", "--python", PYTHON, "--system-certs", *tools]
        return subprocess.run(command, check=False).returncode
    pip = [sys.executable, "-m", "pip", "--python", PYTHON]
    if importlib.util.find_spec("pip") is None:
        subprocess.run([PYTHON, "-m", "ensurepip"], check=True)
        pip = [PYTHON, "-m", "pip"]
    return subprocess.run([*pip, "install", "--no-compile", *tools], check=False).returncode


def is_running(program: str) -> bool:
    """Return whether a program exists, is complete, and prints its version."""
    try:
        return (
            subprocess.run([program, "--version"], capture_output=True, check=False).returncode == 0
        )
    except OSError:
        return False


def has_gpu() -> bool:
    """Return whether the driver of NVIDIA lists a GPU."""
    if any(Path("/proc/driver/nvidia/gpus").glob("*")):
        return True
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and b"GPU " in done.stdout


def is_reachable(url: str, *, is_index: bool = False) -> bool:
    """Return whether a URL can be read, or for an index, whether it answers at all."""
    request = urllib.request.Request(url, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=PROBE_TIMEOUT_S):
            return True
    except urllib.error.HTTPError:
        return is_index
    except (OSError, ValueError):
        return False


def has_cpu_wheel(place: str) -> bool:
    """Return whether a folder of wheels has the CPU build of the locked torch for this Python."""
    version = locked_torch().partition("==")[2]
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    folder = Path(place.removeprefix("file://"))
    return any(folder.glob(f"torch-{version}+cpu-{python}-*.whl"))


def choose_torch() -> list[str]:
    """Return uv's options for the build of torch that fits this machine, and print the choice."""
    if os.environ.get("UV_TORCH_BACKEND"):
        say(f"torch's build is set by UV_TORCH_BACKEND={os.environ['UV_TORCH_BACKEND']}")
        return []
    if has_gpu():
        say("NVIDIA GPU found: torch's CUDA build, 2 GB to download, 5 GB on disk")
        return []
    if is_reachable(TORCH_INDEX):
        say("no NVIDIA GPU: torch's CPU build, 0.2 GB to download, 0.7 GB on disk")
        return ["--torch-backend", "cpu"]
    if any(map(has_cpu_wheel, pip_settings().get("find-links", "").split())):
        say("no NVIDIA GPU: torch's CPU build, from the configured folder of wheels")
        return []
    say("no NVIDIA GPU, and PyTorch's index of CPU builds cannot be reached")
    say("torch is the build of the configured index: PyPI's has 2 GB to download, 5 GB on disk")
    say("for the CPU build, 0.2 GB, press Ctrl-C and set one of these, then run it again:")
    say("  HTTPS_PROXY=http://HOST:PORT, if a proxy reaches download.pytorch.org")
    say("  UV_INDEX=URL of a mirror of https://download.pytorch.org/whl/cpu")
    say("  PIP_FIND_LINKS=a folder with the wheel of torch's CPU build")
    return []


def pip_settings() -> dict[str, str]:
    """Return the settings of pip by name."""
    command = [PYTHON, "-m", "pip", "config", "list"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    # Variables of the environment override files.
    settings: dict[str, str] = {}
    for line in sorted(lines, key=lambda line: line.startswith(":env:")):
        key, _, value = line.partition("=")
        settings[key.rpartition(".")[2]] = str(ast.literal_eval(value))
    return settings


def index_options() -> list[str]:
    """Return pip's configured index and its folders of wheels as options of uv.

    uv reads none of pip's settings. Its own variables come first.
    """
    settings, options = pip_settings(), []
    if "index-url" in settings and not {"UV_DEFAULT_INDEX", "UV_INDEX_URL"} & os.environ.keys():
        options += ["--default-index", settings["index-url"]]
    for place in settings.get("find-links", "").split():
        options += ["--find-links", place]
    return options


def uv_command(packages: list[str], options: list[str]) -> list[str]:
    """Return the command that installs `wanted`; the lock file has versions and hashes of all."""
    install = [UV, "pip", "install", "--python", PYTHON, "--system-certs"]
    pinned = ["--constraints", str(LOCK), "--build-constraints", str(LOCK)]
    return [*install, *pinned, *options, *packages]


def locked_torch() -> str:
    lines = LOCK.read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def pip_commands(folder: Path) -> Iterator[list[str]]:
    """Yield the commands of pip, for an index that uv cannot use: the whole lock file.

    pip checks hashes only of files in which every package has one.
    """
    hashed = folder / "requirements.txt"
    text, torch = LOCK.read_text(encoding="utf-8"), locked_torch()
    hashed.write_text(text.replace(f"{torch}\n", ""), encoding="utf-8")
    pip = [PYTHON, "-m", "pip", "install", "--no-compile"]
    yield [*pip, "--no-deps", "--require-hashes", "--requirement", str(hashed)]
    yield [*pip, torch]
    yield [*pip, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)]


def install(packages: list[str]) -> int:
    """Install with uv, or else with pip; return the exit code."""
    code = subprocess.run(uv_command(packages, [*choose_torch(), *index_options()]), check=False)
    if code.returncode == 0:
        return 0
    say("uv has failed; pip installs all of requirements.lock, which takes some minutes")
    with tempfile.TemporaryDirectory() as folder:
        for command in pip_commands(Path(folder)):
            if (code := subprocess.run(command, check=False)).returncode:
                return code.returncode
    return 0


def install_lowest() -> int:
    """Make .venv/lowest with the versions of requirements-lowest.txt; return the exit code.

    torch is the locked one: an older one is in no index without gigabytes of CUDA packages.
    """
    make = [UV, "venv", "--quiet", "--clear", "--python", PYTHON, str(LOWEST_VENV)]
    install = [UV, "pip", "install", "--quiet", "--python", str(LOWEST_VENV / "bin" / "python")]
    install += ["--system-certs", "--no-deps", "--build-constraints", str(LOCK)]
    install += [*choose_torch(), *index_options(), "--requirement", str(LOWEST), locked_torch()]
    for command in (make, [*install, "--editable", str(ROOT)]):
        if code := subprocess.run(command, check=False).returncode:
            return code
    return 0


def write_bytecode() -> None:
    """Compile what workers import, if this environment tells Python to keep no bytecode.

    The first import writes it elsewhere. Compiling all packages would take a minute.
    """
    if not sys.dont_write_bytecode:
        return
    say("compiling what workers import, because PYTHONDONTWRITEBYTECODE is set: 10 s or more")
    variables = {name: os.environ[name] for name in os.environ if name != NO_BYTECODE}
    subprocess.run([PYTHON, "-c", IMPORTS], cwd=ROOT, env=variables, check=False)


def size_of(folder: Path) -> int:
    """Return the bytes of all files below `folder`."""
    return sum(
        os.lstat(os.path.join(path, name)).st_size
        for path, _, names in os.walk(folder)
        for name in names
    )


def say(text: str) -> None:
    sys.stdout.write(f"install: {text}\n")
    sys.stdout.flush()


def say_reason() -> None:
    """Print why an installation has failed, if that is the network."""
    own = os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("UV_INDEX_URL")
    index = own or pip_settings().get("index-url", PYPI)
    if not is_reachable(index, is_index=True):
        say("the package index cannot be reached; check the network or the proxy")


def main() -> int:
    parser = argparse.ArgumentParser(description="Install from requirements.lock.")
    parser.add_argument("--group", help="a dependency group of pyproject.toml; default: Pagemill")
    parser.add_argument("--tools", action="store_true", help="only .venv with pip and uv")
    parser.add_argument(
        "--lowest", action="store_true", help="only .venv/lowest, from requirements-lowest.txt"
    )
    arguments = parser.parse_args()
    began = time.monotonic()
    if (code := make_venv()) == 0 and not arguments.tools:
        group = ["--group", arguments.group]
        packages = group if arguments.group else ["--editable", str(ROOT)]
        code = install_lowest() if arguments.lowest else install(packages)
    if code:
        say_reason()
    if code or arguments.tools or arguments.lowest:
        return code
    if not arguments.group:
        write_bytecode()
    # A broker's first writes would otherwise wait for a gigabyte of packages.
    say("writing to disk")
    os.sync()
    say(f"done in {time.monotonic() - began:.0f} s; .venv has {size_of(VENV) / 1e9:.1f} GB")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say("interrupted; run make install again")
        sys.exit(EXIT_INTERRUPTED)
