"""Run the sections within a budget of seconds, on a machine with a GPU or as a dry run.

Each section is a process, so a section that fails, hangs or loses the device costs only its own
time. The folder of the results has `results.jsonl`, with a line for each check and measured value,
`summary.txt`, which is written after each section, and `log.txt`. The exit status is 1 if a result
is wrong.

If the interpreter lacks the packages of Pagemill, they are installed from the folder .whl.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from ops.gpu.plan import SECTIONS, Section
from ops.gpu.summary import LEFT_OUT, is_wrong, read_results, summarise
from ops.install import has_gpu

BUDGET_S, DRY_BUDGET_S = 400, 3600
DRY_FACTOR = 10
"""A dry run computes in Python, so its sections have longer limits."""
MIN_SECTION_S = 8
KILL_AFTER_S = 5
STATUS_OF_LIMIT = 124
"""Status of a section that took longer than its limit, as of the command `timeout`."""
SCRATCH = Path(tempfile.gettempdir()) / "pagemill-gpu"


class Run:
    """A run of sections, and the folder of its results."""

    def __init__(
        self, folder: Path, budget_s: float, dry: bool, environment: Mapping[str, str]
    ) -> None:
        self._began_s = time.monotonic()
        self._folder = folder.resolve()
        self._budget_s = budget_s
        self._dry = dry
        self._environment = dict(environment)
        self._folder.mkdir(parents=True, exist_ok=True)
        for name in ("results.jsonl", "log.txt", "summary.txt"):
            (self._folder / name).write_text("")

    def run(self, sections: Sequence[Section]) -> int:
        """Run the sections in order; return the exit status."""
        for section in sections:
            if section.tool and (self._dry or shutil.which(section.tool[0]) is None):
                continue
            self._run_section(section)
            text = summarise(self._results())
            (self._folder / "summary.txt").write_text(text)
        say((self._folder / "summary.txt").read_text() + f"took {self._elapsed_s():.0f} s")
        return int(is_wrong(self._results()))

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def _results(self) -> list[dict[str, object]]:
        return read_results((self._folder / "results.jsonl").read_text().splitlines())

    def _run_section(self, section: Section) -> None:
        at_s = self._elapsed_s()
        left_s = self._budget_s - at_s
        if left_s < MIN_SECTION_S:
            self._add(section, LEFT_OUT, None)
            return
        limit_s = min(left_s, section.limit_s * (DRY_FACTOR if self._dry else 1))
        say(f"== {section.name}: {section.question} (at {at_s:.0f} s, limit {limit_s:.0f} s)")
        code = self._execute(self._command_of(section), limit_s)
        seconds = self._elapsed_s() - at_s
        self._add(section, "section", code == 0, status=code, limit_s=limit_s, seconds=seconds)

    def _command_of(self, section: Section) -> list[str]:
        if section.arguments:
            return [sys.executable, *section.arguments]
        command = [*section.tool, sys.executable, "-m", "ops.gpu", "section", section.module]
        command += ["--name", section.name, "--out", str(self._folder)]
        if section.share:
            command += ["--share", section.share]
        if self._dry:
            return [*command, "--dry"]
        return [*command, "--processes", str(section.num_processes)]

    def _execute(self, command: Sequence[str], limit_s: float) -> int:
        """Run a command; return its status, or STATUS_OF_LIMIT if it was killed."""
        with (self._folder / "log.txt").open("a") as log:
            log.write(f"\n$ {shlex.join(command)}\n")
            log.flush()
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=self._environment, process_group=0
            )
            try:
                return process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return STATUS_OF_LIMIT
            finally:
                if process.poll() is None:
                    _kill_group(process)

    def _add(self, section: Section, what: str, ok: bool | None, /, **values: object) -> None:
        result = {"section": section.name, "what": what, "ok": ok, **values}
        with (self._folder / "results.jsonl").open("a") as file:
            file.write(json.dumps(result) + "\n")


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and the processes that it has started."""
    for number, wait_s in ((signal.SIGTERM, KILL_AFTER_S), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(wait_s)
        except subprocess.TimeoutExpired:
            continue


def make_environment(dry: bool) -> dict[str, str]:
    """Return the environment of sections, with the packages that the interpreter lacks."""
    environment = dict(os.environ)
    environment |= {
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    environment.setdefault("TRITON_CACHE_DIR", str(SCRATCH / "triton"))
    environment.pop("TRITON_INTERPRET", None)
    if dry:
        environment["TRITON_INTERPRET"] = "1"
    elif find_spec("nats") is None:
        environment["PYTHONPATH"] = str(_install_packages(SCRATCH / "site"))
    return environment


def _install_packages(site: Path) -> Path:
    """Install the prepared wheels, unless an earlier run on this machine has; return the folder."""
    complete = site / "complete"
    if complete.exists():
        return site
    wheels = sorted(map(str, Path(".whl").glob("*.whl")))
    if not wheels or not Path(".gpu").is_dir():
        raise SystemExit(
            "this interpreter lacks the packages of Pagemill, and there are no folders .whl and"
            " .gpu: run `python -m ops.gpu prepare` in the checkout, and carry both folders"
        )
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    pip += ["--no-compile", "--no-cache-dir", "--upgrade", "--target", str(site)]
    if subprocess.run([*pip, *wheels], check=False).returncode:
        raise SystemExit("the wheels of .whl were not installed")
    # The checkout is not installed, and workers look up the version of the package.
    for metadata in Path(".gpu").glob("*.dist-info"):
        shutil.copytree(metadata, site / metadata.name, dirs_exist_ok=True)
    complete.touch()
    return site


def choose_sections(names: str) -> list[Section]:
    """Return the sections of these names, in the order of the run. Raises SystemExit."""
    chosen = names.replace(",", " ").split()
    known = [section.name for section in SECTIONS]
    if unknown := set(chosen) - set(known):
        unknown_names, known_names = ", ".join(sorted(unknown)), ", ".join(known)
        raise SystemExit(f"unknown sections: {unknown_names}; the sections are {known_names}")
    return [section for section in SECTIONS if not chosen or section.name in chosen]


def _has_device() -> bool:
    if has_gpu():
        return True
    probe = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    command = [sys.executable, "-c", probe]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m ops.gpu run", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--only", default="", metavar="NAMES", help="sections, such as env,kernels")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="time of the whole run")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder of the results")
    arguments = parser.parse_args(argv)
    if not Path("workers/engine/cuda").is_dir():
        raise SystemExit("run this in the root of a checkout of Pagemill")
    sections = choose_sections(arguments.only)
    if not arguments.dry and not _has_device():
        raise SystemExit("there is no CUDA device here; try --dry")
    budget_s = arguments.budget or (DRY_BUDGET_S if arguments.dry else BUDGET_S)
    environment = make_environment(arguments.dry)
    return Run(arguments.out, budget_s, arguments.dry, environment).run(sections)
