"""Compare Pagemill with other engines that are installed, on the same models and in one run.

    python -m ops.bench.peers --peers FOLDER [--out FILE]

`install.sh FOLDER`, next to this file, creates the peers' environments and the models. All have
bfloat16 weights, a thread for each core, at most 32 sequences, a KV cache of 1 GiB and prefix
caching. Answers are greedy and of full length.

- single     one request, 32 tokens in, 128 out
- batch32    32 at once, 64 to 256 in, 64 out
- prefix16   16 at once with the same first 512 tokens and 32 others, 32 out
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
    options = _arguments()
    console = Console(stderr=True)
    began_s = time.monotonic()
    logs = Path(tempfile.mkdtemp(prefix="pagemill-bench-peers-"))
    console.print(f"logs of the peers: {logs}")
    plan = Plan(
        peers=options.peers,
        models=options.peers / "models",
        specs=[spec for spec in ROSTER if spec.name in options.only],
        workloads=[workload for workload in WORKLOADS if workload.name in options.workloads],
        repetitions=options.repetitions,
        setup=Setup("", options.threads, profile=options.profile),
        logs=logs,
        log=lambda news: console.print(f"{time.monotonic() - began_s:5.0f} s  {news}"),
    )
    missing = [model for model in options.models if not (plan.models / model).is_dir()]
    if missing:
        raise SystemExit(f"{plan.models}: no {', '.join(missing)}; see ops/bench/peers/install.sh")
    with machine.alone():
        before = limits(options.threads)
        rows = [row for model in options.models for row in measure_model(plan, model)]
        best = before.best(limits(options.threads))
    about = records.Machine(machine.cpu_model(), options.threads, date.today().isoformat(), best)
    if options.out:
        records.write(options.out, about, rows)
    report.print_report(about, rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [spec.name for spec in ROSTER]
    workloads = [workload.name for workload in WORKLOADS]
    parser.add_argument("--peers", type=Path, required=True, help="folder with environments")
    parser.add_argument("--models", nargs="+", default=MODELS, help="these models")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these peers")
    parser.add_argument(
        "--workloads", nargs="+", choices=workloads, default=workloads, help="these workloads"
    )
    parser.add_argument("--repetitions", type=int, default=2, help="after the warm-up")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each peer")
    parser.add_argument("--profile", action="store_true", help="ours alone: time by phase")
    parser.add_argument("--out", type=Path, help="a file for all figures, as JSON lines")
    options = parser.parse_args()
    if options.repetitions < 1:
        parser.error("--repetitions: at least 1")
    if options.profile:
        options.only = [OURS]
    return options


if __name__ == "__main__":
    main()
