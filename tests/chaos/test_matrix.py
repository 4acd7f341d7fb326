"""The table of the fault matrix is whole: every cell runs, or says why it does not."""

from ops.chaos.matrix.deployments import DEPLOYMENTS
from ops.chaos.matrix.table import CELLS


def test_every_cell_is_there_once() -> None:
    """The 86 of the design; four roads of payloads, two ends of encoders, two changes of slots'
    leaders, killed decoders, clients without a gateway, five attacks of tenants, five faults of
    `pagemill up`, a stopped and two killed ranks, and a start during an election, which the
    design did not see."""
    assert len(CELLS) == 86 + 24
    assert len({cell.name for cell in CELLS}) == len(CELLS)


def test_a_cell_runs_or_says_why_not() -> None:
    for cell in CELLS:
        assert (cell.run is None) == bool(cell.why_not), cell.name
        assert cell.on in DEPLOYMENTS, cell.name
        assert cell.run is None or cell.how, cell.name
