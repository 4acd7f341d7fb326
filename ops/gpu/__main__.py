"""Check and measure the CUDA path: the commands of docs/contribute/gpu.md.

    python -m ops.gpu prepare       # the folders .whl and .gpu, for a machine without a network
    python -m ops.gpu run           # there: the sections, with their results in build/gpu
    python -m ops.gpu run --dry     # anywhere: tiny shapes in Triton's interpreter
    python -m ops.gpu aot           # without a GPU: registers and spills of the kernels for sm_90
    python -m ops.gpu host          # without a GPU: processor time and Python calls of a step
    python -m ops.gpu round-trips   # without a GPU: copies and synchronisations of a step

`python -m ops.gpu COMMAND --help` prints the options of a command.
"""

import argparse
import importlib
import os
import sys

COMMANDS = {
    "prepare": "ops.gpu.prepare",
    "run": "ops.gpu.run",
    "section": "ops.gpu.section",
    "aot": "ops.gpu.aot",
    "host": "ops.gpu.host",
    "round-trips": "ops.gpu.round_trips",
    "part-trips": "ops.gpu.part_trips",
}
COMPILING = ("aot", "round-trips", "part-trips")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ops.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="options of the command")
    arguments = parser.parse_args()
    if arguments.command in COMPILING:
        # Triton reads it at its import. Interpreted kernels are not compiled.
        os.environ.pop("TRITON_INTERPRET", None)
    # Only the chosen command is imported: a GPU machine has no packages for the others.
    module = importlib.import_module(COMMANDS[arguments.command])
    code: int = module.main(arguments.arguments)
    return code


if __name__ == "__main__":
    sys.exit(main())
