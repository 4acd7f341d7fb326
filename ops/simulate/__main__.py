"""Print the tables of docs/contribute/scaling.md that compare routers and autoscalers."""

import argparse
import sys
from pathlib import Path

from ops.simulate.loads import recorded
from ops.simulate.report import routing_tables, scaling_tables


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ops.simulate", description=__doc__)
    parser.add_argument("--engines", type=int, default=16, help="engines of the routing tables")
    parser.add_argument("--requests", type=int, default=20_000, help="requests of these tables")
    parser.add_argument("--seed", type=int, default=1, help="seed of the loads")
    parser.add_argument(
        "--replay",
        type=Path,
        help="log of a deployment, for the table of autoscalers with its requests alone",
    )
    options = parser.parse_args()
    if options.replay is not None:
        with options.replay.open(encoding="utf-8") as log:
            requests = recorded(log)
        for line in scaling_tables(options.seed, requests):
            sys.stdout.write(f"{line}\n")
        return
    for line in routing_tables(options.engines, options.requests, options.seed):
        sys.stdout.write(f"{line}\n")
    for line in scaling_tables(options.seed):
        sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
