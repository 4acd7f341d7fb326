import json
import subprocess
import sys

SCRIPT = """
from shared.telemetry import logs
log = logs.configure_logging("info", role="test")
for number in range(3):
    log.info("said", number=number, text="x" * 1000)
print("alive")
"""


def test_a_full_disk_under_the_log_does_not_stop_the_work() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=full)
    assert (done.returncode, done.stdout) == (0, b"alive\n")


def test_events_are_lines_with_bounded_fields() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, check=True)
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert [event["number"] for event in events] == [0, 1, 2]
    assert all(event["role"] == "test" and len(event["text"]) == 257 for event in events)
