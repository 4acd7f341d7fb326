"""Process of a rank other than 0, which rank 0 runs with `python -m`.

Its stdin has the messages of rank 0, and its stdout has the answers.
"""

import os
import signal
import sys

import msgspec
import torch.distributed as dist

from shared.errors import ConfigError
from shared.helpers.forking import SIGNALS, end_with_parent, leave_process_group
from shared.vision.rank_plan import Share
from workers.engine.cuda.profiling import ClaimedMemory, CudaMemory
from workers.engine.loader import load_rank
from workers.engine.parallel import messages
from workers.engine.parallel.messages import Loaded
from workers.engine.parallel.process_group import ProcessGroup
from workers.engine.parallel.sharded_model import follow


def main() -> None:
    leave_process_group()
    end_with_parent(signal.SIGKILL)
    for number in SIGNALS:
        # Rank 0 drains, and this process ends with it.
        signal.signal(number, signal.SIG_IGN)
    commands = sys.stdin.buffer
    # Libraries that print must not write into the answer.
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        message = messages.receive(commands)
        if message is None:
            return
        start = messages.starts.decode(message)
        share, loaded = Share(start.rank, start.engine.tensor_parallel), Loaded()
        try:
            if (memory := ClaimedMemory.claim(start.engine)) is not None:
                loaded = Loaded(memory_limit=memory.limit, free_memory=memory.free)
            model = load_rank(start.model, start.engine, share)
        except ConfigError as error:
            messages.send(answers, msgspec.msgpack.encode(Loaded(error.message)))
            return
        messages.send(answers, msgspec.msgpack.encode(loaded))
        store = dist.FileStore(start.store, share.num_ranks)
        group = ProcessGroup(store, share, model.device)
        follow(model, group, commands, answers, CudaMemory())


if __name__ == "__main__":
    main()
