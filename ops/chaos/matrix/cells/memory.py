"""Has the kernel's OOM killer kill one process."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

_MEMORY = Path("/sys/fs/cgroup/memory")


_GREEDY = "import sys\nx = []\nwhile True: x.append(bytearray(b'x' * 4_000_000))"


def starve(pid: int, limit_mib: int = 48) -> None:
    """Have the kernel's OOM killer kill `pid`, in a memory cgroup with a greedy process."""
    group = _MEMORY / f"pagemill-{os.getpid()}"
    group.mkdir(exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(f"{limit_mib}M")
    try:
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
        (group / "cgroup.procs").write_text(str(pid))
        script = f'echo $$ > {group}/cgroup.procs; echo -900 > /proc/$$/oom_score_adj; exec "$@"'
        greedy = subprocess.Popen(
            ["sh", "-c", script, "sh", sys.executable, "-c", _GREEDY], stderr=subprocess.DEVNULL
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            greedy.wait(10)
        greedy.kill()
        greedy.wait()
    except (ProcessLookupError, FileNotFoundError):
        return
    finally:
        _remove_group(group)


def _remove_group(group: Path) -> None:
    for pid in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):
            (_MEMORY / "cgroup.procs").write_text(pid)
    with contextlib.suppress(OSError):
        group.rmdir()


def why_no_memory_limit() -> str | None:
    """Return why memory cannot be limited here, or None if it can."""
    return None if os.access(_MEMORY / "cgroup.procs", os.W_OK) else "no memory cgroup (version 1)"
