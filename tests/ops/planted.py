"""A section with a right result, a wrong one, and an item that fails."""

import torch

from ops.gpu.session import Session
from workers.engine.cuda.kernels.activation import silu_mul


def run(session: Session) -> None:
    gate_up = torch.ones(2, 16, device=session.device)
    actual = silu_mul(gate_up)
    expected = torch.nn.functional.silu(gate_up[:, :8])
    session.check_close("right", actual, expected)
    session.check_close("planted", actual, 1.5 * expected)
    session.attempt("failing", lambda: 1 // 0)
    session.add("measured", us=1234.5)
