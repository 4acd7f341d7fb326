"""Errors that are reported for requests, in place of errors of the engine's parts. Pure."""

from shared.errors import OutOfMemory, PagemillError, WorkerFailure
from shared.helpers.device_errors import is_device_lost


def out_of_memory(error: Exception) -> OutOfMemory:
    """Return the error to report for a request that needs more memory than the device has."""
    failure = OutOfMemory("the device of the engine has too little memory for this request alone")
    failure.__cause__ = error
    return failure


def error_of_request(error: Exception) -> PagemillError:
    """Return the error to report for a request: a WorkerFailure in place of unknown errors.

    Raises the error of a device that is lost.
    """
    if is_device_lost(error):
        raise error
    if isinstance(error, PagemillError):
        return error
    # The cause goes to the log and the dead letter only: it may name paths and addresses.
    failure = WorkerFailure("the engine failed on this request")
    failure.__cause__ = error
    return failure
