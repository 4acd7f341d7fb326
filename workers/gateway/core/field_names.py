"""Translation of bus field names into the client's, for error messages. Pure."""

import contextlib
import re
from collections.abc import Iterator, Mapping

import msgspec
from msgspec import Struct

from shared.errors import PagemillError
from shared.protocol.records import ErrorInfo
from workers.gateway.http import errors

_SAMPLING = "sampling_params"
_TEMPLATE = "template_kwargs"


class ClientFields(Struct, frozen=True):
    """Names that clients of one endpoint have for fields of a request on the bus."""

    names: Mapping[str, str] = {}
    """Client's name by bus field. Any other field has the same name for the client."""
    has_sampling_params: bool = False
    """Whether the client's body has an object `sampling_params` too, instead of separate fields."""

    def renamed(self, names: Mapping[str, str]) -> "ClientFields":
        """Return a copy to which `names` are added. They take precedence."""
        return msgspec.structs.replace(self, names={**self.names, **names}) if names else self

    def name_of(self, bus_field: str) -> str:
        """Return the client's name for the longest prefix of the path that has one.

        The rest of the path is dropped, because the client does not know the structure inside.
        """
        path = re.split(r"(?=[.\[])", bus_field)
        for end in range(len(path), 0, -1):
            if (name := self.names.get("".join(path[:end]))) is not None:
                return name
        return bus_field

    def translate(self, error: ErrorInfo) -> ErrorInfo:
        """Return the error with the client's field, also at the start of its message."""
        bus_field = error.field or ""
        field = self.name_of(bus_field)
        if not self.has_sampling_params:
            field = "" if field == _SAMPLING else field.removeprefix(f"{_SAMPLING}.")
            if field.partition(".")[0] == _TEMPLATE:
                field = f"chat_{field}"
        message = error.message
        if bus_field and message.startswith(f"{bus_field}:"):
            message = f"{field}{message[len(bus_field) :]}".removeprefix(":").lstrip()
        return msgspec.structs.replace(error, field=field or None, message=message)

    @contextlib.contextmanager
    def translated(self, *, checks: bool = False) -> Iterator[None]:
        """Raise reported errors as RequestFailed, with the client's field.

        With `checks`, errors of this process are translated too, because the code inside checks the
        fields of a message for the bus.
        """
        try:
            yield
        except PagemillError as error:
            if not (checks or error.reported):
                raise
            raise errors.RequestFailed(self.translate(errors.info_of(error)), "") from error
