"""A renderer that is killed when it has fetched and pinned, and is about to forward.

Arguments: the configuration file and the broker's URL.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import uvloop

from shared.stage import runtime
from shared.stage.stage import Stage
from workers import settings
from workers.renderer import worker


async def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    Stage.forward = die  # type: ignore[method-assign]
    config = settings.load_config(Path(sys.argv[1]))
    sys.exit(uvloop.run(runtime.run("renderer", worker.main, config, sys.argv[2], None, None)))
