"""A worker of the product that writes down how long each step of its engine takes.

`python -m ops.simulate.fit.timed_worker worker ROLE …` takes the arguments of `pagemill`; FIT_STEPS
names the folder in which each process writes a file. Times are those of the monotonic clock, which
the processes of a machine share.
"""

import os
import time
from pathlib import Path
from typing import Any

import msgspec

from ops.simulate.fit.measurement import FirstToken, Step
from workers import __main__ as product
from workers.engine.core.engine import EngineCore
from workers.engine.core.sequence import Batch, EngineRequest, RequestOutput
from workers.engine.step_thread import StepThread


def watch(folder: Path) -> None:
    """Wrap the engine's steps in this process.

    A step lasts from the end of the last one as long as there was work in between.
    """
    file = (folder / f"{os.getpid()}.jsonl").open("wb", buffering=0)
    add, run_batch, step = StepThread.add, EngineCore._run_batch, EngineCore.step
    added_s: dict[str, float] = {}
    batches: list[Batch] = []
    ended_s = ended_cpu_s = 0.0

    def watched_add(self: StepThread[Any], request: EngineRequest, owner: Any) -> None:
        added_s[request.request_id] = time.monotonic()
        add(self, request, owner)

    def watched_run(self: EngineCore, batch: Batch) -> Any:
        batches.append(batch)
        return run_batch(self, batch)

    def watched_step(self: EngineCore) -> list[RequestOutput]:
        nonlocal ended_s, ended_cpu_s
        began_s, began_cpu_s = ended_s or time.monotonic(), ended_cpu_s or time.thread_time()
        batches.clear()
        outputs = step(self)
        now_s, now_cpu_s = time.monotonic(), time.thread_time()
        lines: list[Step | FirstToken] = [
            FirstToken(output.request_id, added_s.pop(output.request_id), now_s)
            for output in outputs
            if output.request_id in added_s
        ]
        if len(batches) == 1:
            lines.append(Step(began_s, now_s, now_cpu_s - began_cpu_s, *_counts(batches[0])))
        file.write(msgspec.json.Encoder().encode_lines(lines))
        ended_s, ended_cpu_s = (now_s, now_cpu_s) if self.has_work else (0.0, 0.0)
        return outputs

    StepThread.add = watched_add  # type: ignore[method-assign]
    EngineCore._run_batch = watched_run  # type: ignore[method-assign]
    EngineCore.step = watched_step  # type: ignore[method-assign]


def _counts(batch: Batch) -> tuple[int, int, bool]:
    """Return the tokens of a batch, the context of its decoding sequences, and if it prefills."""
    decoding = [s for s in batch.scheduled if s.num_new_tokens == 1]
    context = sum(s.sequence.num_computed_tokens for s in decoding)
    return batch.num_tokens, context, len(decoding) < len(batch.scheduled)


if __name__ == "__main__":
    watch(Path(os.environ["FIT_STEPS"]))
    product.main()
