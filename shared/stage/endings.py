"""The end of a request whose stage has failed: with the error, or with its text alone."""

from shared.bus.bus import Bus
from shared.errors import PagemillError
from shared.protocol.pipeline import TEXT
from shared.protocol.records import StageSpan
from shared.stage.job import Job
from shared.state.text_alone import cut_outputs
from shared.state.token_log import end_request


async def end_with_error(
    bus: Bus, job: Job, output: str, error: PagemillError, path: list[StageSpan]
) -> bool:
    """End the request of a job, or at least this output of it where the text may go on.

    Return whether the request has ended. If not, the stage of its text ends it.
    """
    if job.request_id is None:
        return True
    goes_on = job.header is not None and job.header.on_late == "text" and output != TEXT
    if goes_on:
        return await cut_outputs(bus, job.request_id, job.delivery.attempt, error, path)
    await end_request(bus, job.request_id, job.delivery.attempt, error, path, job.tenant)
    return True
