"""Print the tables of docs/contribute/scaling.md that compare routers and autoscalers."""

import argparse
import sys

from ops.simulate.report import routing_tables, scaling_table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ops.simulate", description=__doc__)
    parser.add_argument("--engines", type=int, default=16, help="engines of the routing tables")
    parser.add_argument("--requests", type=int, default=20_000, help="requests of these tables")
    parser.add_argument("--seed", type=int, default=1, help="seed of the loads")
    options = parser.parse_args()
    for line in routing_tables(options.engines, options.requests, options.seed):
        sys.stdout.write(f"{line}\n")
    for line in scaling_table(options.seed):
        sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
