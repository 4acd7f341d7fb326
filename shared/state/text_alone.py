"""End of a request with its text alone, for `on_late: text`."""

from shared.bus.bus import Bus
from shared.errors import PagemillError
from shared.protocol.pipeline import TEXT
from shared.protocol.records import OutputEnd, OutputSummary, StageSpan, error_info
from shared.state import output_ends
from shared.state.token_log import close_log, end_request, finish_request


async def cut_outputs(
    bus: Bus, request_id: str, attempt: int, error: PagemillError, path: list[StageSpan]
) -> bool:
    """End a request with its text alone: cut its other outputs, for the reason `error`.

    Return whether the request has ended. If the text has not ended, the stage that writes it ends
    the request later.
    """
    summary, ends = OutputSummary(path=path, error=error_info(error)), None
    for output in await output_ends.expected(bus, request_id):
        if output == TEXT:
            continue
        end = await close_log(
            bus, request_id, output, lambda index: OutputEnd(index, attempt, summary, cut=True)
        )
        if end.cut and end.summary.error is None:
            # An earlier worker has cut the output to end the request with an error, and has died.
            await end_request(bus, request_id, attempt, error, path)
            return True
        ends = await output_ends.add(bus, request_id, output, end.summary)
    if ends is None or not output_ends.is_complete(ends):
        return False
    await finish_request(bus, request_id, attempt, ends.ended)
    return True
