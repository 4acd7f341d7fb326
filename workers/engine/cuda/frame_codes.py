"""Choice of a talker's further codes on a GPU, by the kernels of the sampler."""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from workers.engine.core.sequence import Sequence
from workers.engine.cuda.kernels.sampling import NUM_FLOATS, NUM_INTS, Parameters, choose_tokens
from workers.engine.cuda.sampler import DeviceSampler
from workers.engine.model.flat_model import DecoderModel
from workers.engine.model.talker import Talker
from workers.engine.sampling.frame_codes import TOP_K, TOP_P, are_drawn, points_of
from workers.engine.transfers import upload_parts


class DeviceFrameCodes:
    """Implements `workers.engine.sampling.frame_codes.FrameCodes`; the host does not wait."""

    def __init__(self, device: torch.device, sequences: list[Sequence], num_codebooks: int) -> None:
        """Upload what the draws of all codebooks need."""
        num_rows, is_drawn = len(sequences), are_drawn(sequences)
        # The temperature is 1, or 0 for greedy requests. The rows have no processors.
        floats = np.zeros((num_rows, NUM_FLOATS), np.float32)
        floats[:, 0] = is_drawn
        ints = np.full((num_rows, NUM_INTS), -1, np.int32)
        ints[:, 0] = TOP_K
        top_p, none = np.full(num_rows, TOP_P), np.empty(0, np.int32)
        parts = [none, floats, top_p, ints, none, none, none.astype(np.float32)]
        on_device = upload_parts([*parts, *points_of(sequences, num_codebooks)], device)
        self._counts, *columns = on_device[: len(parts)]
        self._parameters = Parameters(*columns)
        self._points = on_device[len(parts) :]
        self._is_any_drawn = bool(is_drawn.any())

    def choose(self, logits: Tensor, codebook: int) -> Tensor:
        """See `FrameCodes.choose`."""
        outcome = choose_tokens(
            logits,
            self._parameters,
            self._points[codebook - 1],
            self._counts,
            num_processed=0,
            is_drawn=self._is_any_drawn,
            is_filtered=self._is_any_drawn,
        )
        return outcome[:, 0]


def sample_on_device(model: DecoderModel) -> None:
    """Have tokens drawn on the GPU of a model, and the further codes of a talker."""
    model.draw = DeviceSampler(model.device).draw
    if isinstance(model.family, Talker):
        model.family.new_frame_codes = partial(DeviceFrameCodes, model.device)
