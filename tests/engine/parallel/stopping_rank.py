"""A process that meets rank 0, computes for a while in the first layer, and then stops."""

import os
import signal
import sys
import time

import msgspec
import torch
import torch.distributed as dist

from workers.engine.parallel import messages

WIDTH, DTYPE = 64, torch.float64
"""Width and type of the model's embeddings, which have one row of positions."""
COMPUTING_S = 1.0

commands = sys.stdin.buffer
start = messages.starts.decode(messages.receive(commands) or b"")
messages.send(sys.stdout.buffer, msgspec.msgpack.encode(messages.Loaded()))
options = dist.ProcessGroupGloo._Options()
options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
group = dist.ProcessGroupGloo(dist.FileStore(start.store, 2), start.rank, 2, options)
step: messages.Command = messages.NewCache(0, 0)
while not isinstance(step, messages.Step):
    step = messages.commands.decode(messages.receive(commands) or b"")
num_tokens = step.query_start_loc[-1]
embeddings = torch.empty(num_tokens, WIDTH, dtype=DTYPE)
group.broadcast(embeddings, 0).wait()
group.broadcast(torch.empty(1, num_tokens, dtype=torch.int64), 0).wait()
until_s = time.process_time() + COMPUTING_S
while time.process_time() < until_s:
    pass
group.allreduce([embeddings]).wait()
sys.stderr.write("computed\n")
sys.stderr.flush()
os.kill(os.getpid(), signal.SIGSTOP)
