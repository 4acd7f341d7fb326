"""transformers' continuous batching on the 1.5B of `serving`, with the attention that it has."""

import gc
from functools import partial

from ops.gpu.load import SHAPES, TINY, Load, Shape, build, measure_transformers
from ops.gpu.session import Session
from ops.gpu.summary import PEER

LOADS = (Load(256, 512, 64), Load(1, 512, 64))


def run(session: Session) -> None:
    measure_shape(session, SHAPES["1.5B"])


def measure_shape(session: Session, shape: Shape) -> None:
    if session.dry:
        shape = TINY
    for load in (Load(2, 8, 3),) if session.dry else LOADS:
        what = f"{PEER}{shape.name}, {load.num_streams} streams"
        session.attempt(what, partial(_measure, session, what, shape, load))


def _measure(session: Session, what: str, shape: Shape, load: Load) -> None:
    gc.collect()
    session.empty_cache()
    model = build(shape, session.dtype, session.device)
    # The first run compiles and allocates workspaces.
    rates = [measure_transformers(model, load) for _ in range(2)][-1]
    session.add(
        what,
        prefill_tok_s=rates.prefill,
        decode_tok_s=rates.decode,
        attention=model.config._attn_implementation,
    )
