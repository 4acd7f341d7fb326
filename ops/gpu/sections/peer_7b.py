"""transformers' continuous batching on the 7B of `serving`."""

from ops.gpu.load import SHAPES
from ops.gpu.sections.peer import measure_shape
from ops.gpu.session import Session


def run(session: Session) -> None:
    measure_shape(session, SHAPES["7B"])
