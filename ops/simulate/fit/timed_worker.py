"""A worker of the product that writes down how long each step of its engine takes.

`python -m ops.simulate.fit.timed_worker worker ROLE …` takes the arguments of `pagemill`; FIT_STEPS
names the folder in which each process writes a file.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from workers import __main__ as product
from workers.engine.core.engine import EngineCore
from workers.engine.core.sequence import Batch, RequestOutput


def watch(folder: Path) -> None:
    """Wrap the engine's step in this process.

    Seconds of a step count from the end of the last one as long as there was work in between.
    """
    file = (folder / f"{os.getpid()}.jsonl").open("w", buffering=1)
    run_batch, step = EngineCore._run_batch, EngineCore.step
    batches: list[Batch] = []
    ended_s = 0.0

    def watched_run(self: EngineCore, batch: Batch) -> Any:
        batches.append(batch)
        return run_batch(self, batch)

    def watched_step(self: EngineCore) -> list[RequestOutput]:
        nonlocal ended_s
        began_s = ended_s or time.perf_counter()
        batches.clear()
        outputs = step(self)
        now_s = time.perf_counter()
        if len(batches) == 1:
            file.write(json.dumps([*_counts(batches[0]), now_s - began_s]) + "\n")
        ended_s = now_s if self.has_work else 0.0
        return outputs

    EngineCore._run_batch = watched_run  # type: ignore[method-assign]
    EngineCore.step = watched_step  # type: ignore[method-assign]


def _counts(batch: Batch) -> tuple[int, int]:
    """Return the tokens of a batch, and the context of its decoding sequences."""
    decoding = (s for s in batch.scheduled if s.num_new_tokens == 1)
    return batch.num_tokens, sum(s.sequence.num_computed_tokens for s in decoding)


if __name__ == "__main__":
    watch(Path(os.environ["FIT_STEPS"]))
    product.main()
