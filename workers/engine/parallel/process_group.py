"""Communication of tensors between the ranks of an engine."""

from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shared.vision.rank_plan import Share
from shared.vision.rank_weights import summed_modules
from workers.engine.parallel.rank_watch import RankWatch

# Limit on the time of a call. A rank may measure its kernels for minutes before the first step, and
# rank 0 gives up ranks that do nothing.
TIMEOUT = timedelta(hours=1)
# Limit on the time in which rank 0 meets the other ranks, which have loaded their parts.
MEETING = timedelta(minutes=1)


class ProcessGroup:
    """The ranks of an engine: NCCL on GPUs, gloo on the loopback interface elsewhere."""

    def __init__(
        self,
        store: dist.Store,
        share: Share,
        device: torch.device,
        watch: RankWatch | None = None,
    ) -> None:
        """Wait until all ranks have met at the store.

        Rank 0 comes last. On CPUs, it raises RuntimeError if it has not met another one in time,
        and gives up ranks that hang in a later call by its `watch`. NCCL has a watchdog.
        """
        self.share = share
        self._watch: RankWatch | None = None
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            self._group: dist.ProcessGroup = dist.ProcessGroupNCCL(store, *share, options)
            return
        # gloo has no authentication, so no other machine may reach it.
        settings = dist.ProcessGroupGloo._Options()
        settings._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        settings._timeout = TIMEOUT if share.rank else MEETING
        self._group = dist.ProcessGroupGloo(store, *share, settings)
        self._group._set_default_timeout(TIMEOUT)
        self._watch = watch

    def broadcast(self, tensor: Tensor) -> None:
        """Copy a contiguous tensor of rank 0 into this one.

        Raises ConfigError in rank 0 if the other ranks hang.
        """
        self._wait(self._group.broadcast(tensor, 0))

    def sum_outputs(self, model: torch.nn.Module) -> None:
        """Add the outputs of the model's divided layers over the ranks, in each step from now."""
        for module in summed_modules(model):
            module.register_forward_hook(self._sum)

    def _sum(self, module: torch.nn.Module, inputs: object, output: Tensor) -> Tensor:
        total = output.contiguous()
        self._wait(self._group.allreduce([total]))
        return total

    def _wait(self, work: dist.Work) -> None:
        if self._watch is None:
            work.wait()
        else:
            self._watch.wait(partial(_has_ended, work))


def _has_ended(work: dist.Work, limit_s: float) -> bool:
    """Wait for a call of gloo, and return whether it has ended. Raises RuntimeError if it failed.

    NCCL's calls end on the device.
    """
    try:
        work.wait(timedelta(seconds=limit_s))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()
    return True
