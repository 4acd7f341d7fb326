"""Run one section in this process, or divide its items among several processes.

`python -m ops.gpu run` starts this for each section. By hand it shows the output at once:

    python -m ops.gpu section ops.gpu.sections.kernels --dry
"""

import argparse
import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run_shares(argv: Sequence[str], num_processes: int) -> int:
    """Run the shares of a section at once; return 0 if all processes do."""
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "ops.gpu", "section", *argv, "--processes", "1"]
    shares = [
        subprocess.Popen([*command, "--share", f"{index}/{num_processes}"], env=environment)
        for index in range(num_processes)
    ]
    return max(abs(share.wait()) for share in shares)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m ops.gpu section", description=__doc__)
    parser.add_argument("module", help="module of the section, such as ops.gpu.sections.kernels")
    parser.add_argument("--name", help="name in the results; by default the module's")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder of the results")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--processes", type=int, default=1, help="number of processes")
    parser.add_argument("--share", default="0/1", help="share of the items: INDEX/NUMBER")
    arguments = parser.parse_args(argv)
    if arguments.processes > 1:
        # This process does not import torch: only the shares use the device.
        return run_shares(argv, arguments.processes)
    if arguments.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it at its import.
    from ops.gpu.session import Session

    index, number = map(int, arguments.share.split("/"))
    name = arguments.name or arguments.module.rpartition(".")[2]
    session = Session(name, arguments.out, dry=arguments.dry, share=(index, number))
    importlib.import_module(arguments.module).run(session)
    return 0
