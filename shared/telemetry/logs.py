"""Structured logs: JSON lines, or colours on a terminal."""

import contextlib
import logging
import os
from typing import Any, Literal

import structlog
from structlog.processors import NAME_TO_LEVEL

# A value chosen by a client (an id, a subject) must not fill the log.
MAX_FIELD_LEN = 256
MAX_TRACEBACK_LEN = 16_384
STDERR = 2

Level = Literal["debug", "info", "warning", "error"]
Logger = structlog.typing.FilteringBoundLogger


def configure_logging(level: Level, fd: int = STDERR, **context: str) -> Logger:
    """Configure structlog for this process, which writes to the file descriptor `fd`.

    `context` (role, worker) is added to every event of this task and of tasks that it starts.
    """
    human = os.isatty(fd)
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if human else structlog.processors.JSONRenderer()
    )
    set_level(level)
    structlog.configure(
        processors=[
            _threshold,
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if human else [structlog.processors.format_exc_info]),
            _cap_fields,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
        logger_factory=structlog.WriteLoggerFactory(file=_Output(fd)),  # type: ignore[arg-type]
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(**context)
    logger: Logger = structlog.get_logger()
    return logger


def bind_trace(trace_id: str | None) -> None:
    """Add `trace_id` to every further event of this task and of tasks that it starts."""
    if trace_id is not None:
        structlog.contextvars.bind_contextvars(trace_id=trace_id)


def set_level(level: Level) -> None:
    """Set the least severe level of events that this process writes."""
    _threshold.level = getattr(logging, level.upper())


class _Threshold:
    """Drops events below a level. The level is here because loggers are cached."""

    level = logging.INFO

    def __call__(
        self, logger: Any, method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        if NAME_TO_LEVEL[method] < self.level:
            raise structlog.DropEvent
        return event


_threshold = _Threshold()


class _Output:
    """Unbuffered file. A failed write, for example to a full disk, must not stop the process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._fd, text.encode(errors="replace"))

    def flush(self) -> None:
        pass


def _cap_fields(
    logger: Any, method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    for key, value in event.items():
        limit = MAX_TRACEBACK_LEN if key == "exception" else MAX_FIELD_LEN
        if isinstance(value, str) and len(value) > limit:
            event[key] = value[:limit] + "…"
    return event
