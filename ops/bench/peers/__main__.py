"""Compare Pagemill with other engines that are installed, on the same models and in one run.

    python -m ops.bench.peers --peers FOLDER [--out FILE]

`install.sh FOLDER` beside this file creates the peers' environments and the models. All have
bfloat16 weights, as many threads as the machine has cores, 32 sequences at most, a KV cache of
1 GiB and prefix caching; answers are greedy and of full length.

- single     one request, 32 tokens in, 128 out
- batch32    32 at once, 64 to 256 in, 64 out
- prefix16   16 at once with the same first 512 tokens, 32 of their own, 32 out
- mm16       16 at once, an image of 448 x 448 each, 32 out

The first repetition is a warm-up. Every repetition has new prompts and images.
"""

import argparse
import os
import tempfile
import time
from datetime import date
from pathlib import Path

from rich.console import Console

from ops.bench.peers import records, report
from ops.bench.peers.measure import Plan, limits, measure_model
from ops.bench.peers.protocol import Setup
from ops.bench.peers.roster import OURS, ROSTER
from ops.bench.peers.workloads import WORKLOADS
from ops.harness import machine

MODELS = ("smollm2-135m", "mid-qwen2vl")


def main() -> None:
    given = _arguments()
    console = Console(stderr=True)
    began_s = time.monotonic()
    logs = Path(tempfile.mkdtemp(prefix="pagemill-bench-peers-"))
    console.print(f"what the peers write: {logs}")
    plan = Plan(
        peers=given.peers,
        models=given.models_folder or given.peers / "models",
        specs=[spec for spec in ROSTER if spec.name in given.only],
        workloads=[workload for workload in WORKLOADS if workload.name in given.workloads],
        repetitions=given.repetitions,
        setup=Setup("", given.threads, profile=given.profile),
        logs=logs,
        apart=given.apart,
        tell=lambda news: console.print(f"{time.monotonic() - began_s:5.0f} s  {news}"),
    )
    missing = [model for model in given.models if not (plan.models / model).is_dir()]
    if missing:
        raise SystemExit(f"{plan.models}: no {', '.join(missing)}; see ops/bench/peers/install.sh")
    with machine.alone():
        before = limits(given.threads)
        rows = [row for model in given.models for row in measure_model(plan, model)]
        found = before.best(limits(given.threads))
    about = records.Machine(machine.cpu_model(), given.threads, date.today().isoformat(), found)
    if given.out:
        records.write(given.out, about, rows)
    report.print_report(about, rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [spec.name for spec in ROSTER]
    workloads = [workload.name for workload in WORKLOADS]
    parser.add_argument("--peers", type=Path, required=True, help="folder with environments")
    parser.add_argument("--models-folder", type=Path, help="by default models/ among the peers")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these peers")
    parser.add_argument("--workloads", nargs="+", choices=workloads, default=workloads)
    parser.add_argument("--repetitions", type=int, default=2, help="counted; one comes before")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--apart", action="store_true", help="never two peers in memory")
    parser.add_argument("--profile", action="store_true", help="ours alone: time by phase")
    parser.add_argument("--out", type=Path, help="a file for all figures, as JSON lines")
    given = parser.parse_args()
    if given.repetitions < 1:
        parser.error("--repetitions: at least 1")
    if given.profile:
        given.only = [OURS]
    return given


if __name__ == "__main__":
    main()
