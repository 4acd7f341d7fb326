"""An agent in a process of its own, with a planted bug if one is named."""

import sys
from pathlib import Path

import uvloop

from ops.chaos.agents.bugs import BUGS
from shared.stage import runtime
from workers.agent.worker import main
from workers.cli import settings
from workers.roles import AGENT

if __name__ == "__main__":
    _, config_file, url, bug = sys.argv
    if bug:
        plant, _ = BUGS[bug]
        plant()
    config = settings.load_config(Path(config_file))
    sys.exit(uvloop.run(runtime.run(AGENT, main, config, url, None, None)))
