"""Answer to a request that was published over NATS: the records of its token log. Pure."""

from typing import Any

from msgspec import Raw, Struct

from shared.protocol.encoding import to_json
from shared.protocol.records import AnyRecord, TokenChunk
from workers.gateway.core.assembler import Answering, AnswerOptions, Assembler, Options
from workers.gateway.core.kinds import AnswerKind, Budget, Refusal

# The record and the JSON of the answer.
COPIES = 2


class LogOptions(AnswerOptions, frozen=True, kw_only=True):
    """Options of such an answer, which has none."""


class RecordList(Struct, frozen=True):
    """All records of a token log, as clients of NATS read them."""

    data: list[Raw]
    object: str = "list"


class LogAssembler(Assembler[Options]):
    """Assembler of the records of all logs. The event of each record is the record itself."""

    def __init__(self, request: Answering[Options]) -> None:
        super().__init__(request)
        self._records: list[Raw] = []

    def add(self, part: int, record: AnyRecord, file: str = "") -> list[Any]:
        encoded = Raw(to_json(record))
        if self.collects_answer:
            self._records.append(encoded)
        return [encoded]

    def token_ids_of(self, record: TokenChunk) -> set[int]:
        return set()

    def num_bytes_of(self, record: AnyRecord, file: str) -> int:
        return COPIES * len(to_json(record))

    def answer(self) -> RecordList:
        return RecordList(self._records)


LOG = AnswerKind(
    name="log",
    id_prefix="log",
    options=LogOptions,
    assembler=LogAssembler,
    budget=Budget(output=Refusal("records", "id", "a stream has no limit")),
)
