"""An agent in a process of its own, with a planted bug if one is named."""

import sys
from pathlib import Path

import uvloop

from ops.chaos.agents.bugs import BUGS
from ops.chaos.agents.process import LEFT, TAKEN
from ops.chaos.patching import replace_attribute
from shared.stage import runtime
from shared.stage.job import Job
from workers import settings
from workers.agent.worker import Agent, main
from workers.roles import AGENT


def report_responses() -> None:
    """Have the agent write on standard output which responses it takes, and which it leaves."""
    handle = Agent._handle

    async def reported(self: Agent, job: Job) -> None:
        _write(f"{TAKEN}{job.request_id}")
        try:
            await handle(self, job)
        finally:
            _write(f"{LEFT}{job.request_id}")

    replace_attribute(Agent, "_handle", reported)


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _, config_file, url, bug = sys.argv
    if bug:
        plant, _ = BUGS[bug]
        plant()
    report_responses()
    config = settings.load_config(Path(config_file))
    sys.exit(uvloop.run(runtime.run(AGENT, main, config, url, None, None)))
