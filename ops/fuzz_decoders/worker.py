"""A process that fuzzes one target with atheris, which is libFuzzer over Python's bytecode.

An exception that is no answer does not end the run: the first input of each kind is stored. Inputs
that hang or take too much memory do, by libFuzzer, which stores them likewise.
"""

import hashlib
import os
import sys
import traceback
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["shared", "workers", "email"]):
    from ops.fuzz_decoders.mutation import mutate_header, mutate_value
    from ops.fuzz_decoders.target import FuzzTarget
    from ops.fuzz_decoders.targets import TARGETS as TARGETS

MAX_LEN = 4096
HANG_S = 20
MAX_MEMORY_MIB = 4096


def fuzz_in_child(target: FuzzTarget, seconds: int, folder: Path) -> str:
    """Fuzz in a fork, because libFuzzer ends its process, and return what it has written.

    The fork saves the import of instrumented modules, which takes longer than many a run.
    """
    log = folder / "log"
    pid = os.fork()
    if pid == 0:
        try:
            with log.open("wb") as file:
                os.dup2(file.fileno(), 2)
            _fuzz(target, seconds, folder)
        finally:
            os._exit(1)
    os.waitpid(pid, 0)
    return log.read_text(errors="replace")


def _fuzz(target: FuzzTarget, seconds: int, folder: Path) -> None:
    kinds: set[tuple[str, str, int]] = set()

    def run(data: bytes) -> None:
        try:
            target.answer(data)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            kind = (type(error).__name__, place.filename, place.lineno or 0)
            if kind not in kinds:
                kinds.add(kind)
                digest = hashlib.sha256(data).hexdigest()[:16]
                (folder / "crashes" / f"crash-{digest}").write_bytes(data)
                text = "".join(traceback.format_exception(error, limit=-4))
                sys.stderr.write(f"CRASH in {target.name} by {data[:200]!r}\n{text}\n")
                sys.stderr.flush()

    def mutate(data: bytes, max_len: int, seed: int) -> bytes:
        changed: bytes | None = None
        if seed % 2:
            if target.form == "envelope":
                changed = mutate_header(data, seed)
            elif target.form != "bytes":
                changed = mutate_value(data, target.form, seed)
        if changed is None or len(changed) > max_len:
            changed = bytes(atheris.Mutate(data, max_len))
        return changed

    options = [f"-max_total_time={seconds}", f"-max_len={MAX_LEN}", f"-timeout={HANG_S}"]
    options += [f"-rss_limit_mb={MAX_MEMORY_MIB}", "-print_final_stats=1"]
    options += [f"-artifact_prefix={folder}/crashes/", str(folder / "corpus")]
    atheris.Setup([sys.argv[0], *options], run, custom_mutator=mutate)
    atheris.Fuzz()
