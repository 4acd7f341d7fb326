"""Run one worker of a chaos run: `python -m ops.chaos.worker ROLE --config FILE --nats URL`."""

import sys

from ops.chaos.worker.watched_worker import app

sys.exit(app(result_action="return_value"))
