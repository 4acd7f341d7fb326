"""Times of the kernels, as shares of the bandwidth of a copy, and of torch's operations."""

from functools import partial

from ops.gpu.kernel_times import Figure, Heads, Span, measure_attention, measure_elementwise
from ops.gpu.session import Session
from ops.gpu.timing import copy_rate

MODELS = (Heads("7B", 28, 4, 128), Heads("1.5B", 12, 2, 128), Heads("8B", 32, 8, 128))
GOAL_SPAN = Span(64, 4095, 1)
SPANS = (
    GOAL_SPAN,
    Span(1, 32767, 1),
    Span(8, 8191, 1),
    Span(256, 1023, 1),
    Span(32, 600, 1),
    Span(1, 0, 4096),
    Span(1, 4096, 2048),
    Span(1, 30000, 2048),
    Span(16, 0, 512),
)


def run(session: Session) -> None:
    rate = copy_rate(session.device)
    for heads in (Heads("tiny", 4, 2, 64),) if session.dry else MODELS:
        for span in (Span(2, 20, 1), Span(1, 20, 8)) if session.dry else SPANS:
            session.attempt(f"{heads.name} {span}", partial(_attend, session, heads, span, rate))
    for num_tokens in (2,) if session.dry else (256, 8192):
        what = f"elementwise, {num_tokens} tokens"
        session.attempt(what, partial(_run_elementwise, session, num_tokens, rate))


def _attend(session: Session, heads: Heads, span: Span, rate: float) -> None:
    figure = measure_attention(heads, span, session.dtype, session.device)
    _add(session, figure, rate, "of_copy >= 0.8" if span == GOAL_SPAN else "")


def _run_elementwise(session: Session, num_tokens: int, rate: float) -> None:
    size = 64 if session.dry else 3584
    for figure in measure_elementwise(num_tokens, size, session.dtype, session.device):
        _add(session, figure, rate)


def _add(session: Session, figure: Figure, rate: float, goal: str = "") -> None:
    values: dict[str, object] = {
        "us": figure.ours_s * 1e6,
        "of_copy": figure.num_bytes / figure.ours_s / rate,
    }
    if figure.num_flops:
        values["tflop_s"] = figure.num_flops / figure.ours_s / 1e12
    values["others_us"] = {
        name: seconds if isinstance(seconds, str) else round(seconds * 1e6, 1)
        for name, seconds in figure.others_s.items()
    }
    if goal:
        values["goal"] = goal
    session.add(figure.name, **values)
