"""`make fuzz-decoders`: fuzz every decoder of bytes from outside, one after the other.

The run prints executions, edges and crashes of each target. Inputs that reach new edges are added
to `tests/recorded/fuzz`. So are inputs that crash a decoder, and then the run fails.
"""

import argparse
import re
import resource
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

# The first one: it instruments what it imports.
from ops.fuzz_decoders.worker import TARGETS, fuzz_in_child  # isort: skip

from ops.fuzz_decoders.corpus import choose, read_corpus, write_corpus
from ops.fuzz_decoders.target import FuzzTarget

_EXECUTIONS = re.compile(r"stat::number_of_executed_units:\s+(\d+)")
_COVERAGE = re.compile(r"\bcov: (\d+)")


class Outcome(NamedTuple):
    executions: int
    coverage: int
    """Branches and comparisons that libFuzzer counts, including instrumented libraries."""
    edges: int
    """Edges between lines of our code."""
    crashes: int


def main(names: Sequence[str], seconds: int) -> int:
    """Fuzz for `seconds` altogether; return the exit code."""
    results = [fuzz(TARGETS[name], max(1, seconds // len(names))) for name in names]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    sys.stdout.write(
        f"{'all':<20}{sum(f.executions for f in results):>12} executions"
        f"{sum(f.crashes for f in results):>27} crashes,"
        f" {(used.ru_utime + used.ru_stime) / 60:.1f} CPU minutes\n"
    )
    return int(any(f.crashes for f in results))


def fuzz(target: FuzzTarget, seconds: int) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        corpus, crashes = Path(folder) / "corpus", Path(folder) / "crashes"
        corpus.mkdir()
        crashes.mkdir()
        recorded = read_corpus(target.name)
        for number, data in enumerate([*target.seeds(), *recorded]):
            (corpus / f"seed-{number}").write_bytes(data)
        log = fuzz_in_child(target, seconds, Path(folder))
        crashing = [file.read_bytes() for file in crashes.iterdir()]
        chosen, num_edges = choose(target, [file.read_bytes() for file in corpus.iterdir()])
    executions = _EXECUTIONS.search(log)
    if executions is None and not crashing:
        raise SystemExit(f"{target.name} was not fuzzed:\n{log[-4000:]}")
    if crashing:
        sys.stdout.write(log[-8000:] if executions is None else _tracebacks(log))
    write_corpus(target.name, dict.fromkeys([*crashing, *chosen]))
    coverage = max((int(number) for number in _COVERAGE.findall(log)), default=0)
    result = Outcome(int(executions[1]) if executions else 0, coverage, num_edges, len(crashing))
    sys.stdout.write(
        f"{target.name:<20}{result.executions:>12} executions{result.coverage:>6} cov"
        f"{result.edges:>6} edges{result.crashes:>5} crashes\n"
    )
    sys.stdout.flush()
    return result


def _tracebacks(log: str) -> str:
    return "".join(re.findall(r"^CRASH in .*?\n\n", log, re.DOTALL | re.MULTILINE))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fuzz decoders.")
    parser.add_argument("--seconds", type=int, default=1800, help="for all targets together")
    parser.add_argument("names", nargs="*", choices=[[], *TARGETS], help="targets, by default all")
    arguments = parser.parse_args()
    sys.exit(main(arguments.names or list(TARGETS), arguments.seconds))
