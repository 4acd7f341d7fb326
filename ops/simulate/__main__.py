"""Run the simulator.

`report` prints the tables of the documentation, `big` a run with 10,000 engines.
"""

import argparse
import resource
import sys
import time

from ops.simulate.cells import Cells, cell_tables, scaled_table
from ops.simulate.loads import bursty_chat
from ops.simulate.report import (
    MAX_ENGINES,
    SCALED_RATE,
    SCALED_REQUESTS,
    routing_tables,
    scaling_table,
)
from ops.simulate.simulation import Simulation, quantile

BIG_ENGINES, BIG_REQUESTS, BIG_CELLS = 10_000, 1_000_000, 64
BIG_RATE = 9.0
CELL_ENGINES = 64


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ops.simulate", description=__doc__)
    parser.add_argument("run", choices=("report", "big"))
    parser.add_argument("--engines", type=int)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.run == "report":
        for line in routing_tables(options.engines or 16, options.requests or 20_000, options.seed):
            say(line)
        for line in scaling_table(options.seed):
            say(line)
        for line in cell_tables(CELL_ENGINES, options.requests or 20_000, options.seed):
            say(line)
        for line in scaled_table(SCALED_REQUESTS, MAX_ENGINES, SCALED_RATE, options.seed):
            say(line)
    else:
        run_big(options.engines or BIG_ENGINES, options.requests or BIG_REQUESTS, options.seed)


def run_big(num_engines: int, num_requests: int, seed: int) -> None:
    """Run 64 cells, and print the processor time and memory of the run itself."""
    began_s = time.process_time()
    requests = bursty_chat(num_requests, BIG_RATE * num_engines, seed)
    figures = Simulation(requests, Cells(BIG_CELLS), num_engines).run()
    cpu_s = time.process_time() - began_s
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    ttft = [quantile(figures.ttft_s, part) for part in (0.5, 0.99)]
    say(f"{num_engines} engines, {num_requests} requests in {requests[-1].arrived_s:.0f} s")
    say(f"TTFT p50 {ttft[0]:.3f} s, p99 {ttft[1]:.3f} s; from cache {figures.hit_rate:.1%}")
    say(f"CPU {cpu_s:.0f} s, {peak_mib} MiB")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
