"""The answer to one request, as far as it has been read from the request's log. Pure."""

from dataclasses import dataclass

from shared.protocol.records import Failure, Finish, LogRecord, TokenChunk


@dataclass
class Answer:
    text: str = ""
    next_index: int = 0
    """Index of the record from which reading goes on."""
    finish_reason: str = ""
    final: Finish | Failure | None = None

    def add(self, record: LogRecord) -> str:
        """Add a record, and return its text. One that was read before is ignored."""
        if record.index < self.next_index:
            return ""
        self.next_index = record.index + 1
        if not isinstance(record, TokenChunk):
            self.final = record
            return ""
        new = "".join(choice.text for choice in record.choices)
        for choice in record.choices:
            self.finish_reason = choice.finish_reason or self.finish_reason
        self.text += new
        return new

    def summary(self, request_id: str, seconds: float) -> str:
        """Return the line that is printed below the answer."""
        said = [request_id]
        if isinstance(self.final, Finish):
            usage = self.final.usage
            said.append(f"{usage.prompt_tokens} + {usage.completion_tokens} tokens")
            said += [f"{seconds:.1f} s", self.finish_reason or "finished"]
        else:
            said += [f"{seconds:.1f} s", "failed" if self.final else "interrupted"]
        return " · ".join(said)
