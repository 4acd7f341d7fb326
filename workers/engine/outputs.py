"""Between the steps and the log: outputs as records, and records as what a resume begins with."""

from shared.messages import ChoiceDelta, LogRecord, TokenChunk
from workers.engine.sequence import LoggedChoice, RequestOutput


def merge_deltas(outputs: list[RequestOutput]) -> list[ChoiceDelta]:
    """Consecutive deltas of each choice as one."""
    merged: dict[int, ChoiceDelta] = {}
    for delta in (choice for output in outputs for choice in output.choices):
        first = merged.get(delta.index)
        if first is None:
            merged[delta.index] = delta
            continue
        merged[delta.index] = ChoiceDelta(
            index=delta.index,
            position=first.position,
            token_ids=first.token_ids + delta.token_ids,
            text=first.text + delta.text,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
    return [merged[index] for index in sorted(merged)]


def logged_choices(records: list[LogRecord], n: int) -> list[LoggedChoice]:
    """What a log holds of each choice; nothing for an empty log."""
    if not records:
        return []
    token_ids: list[list[int]] = [[] for _ in range(n)]
    finished = [False] * n
    for record in records:
        if isinstance(record, TokenChunk):
            for delta in record.choices:
                token_ids[delta.index] += delta.token_ids
                finished[delta.index] |= delta.finish_reason is not None
    return [LoggedChoice(ids, done) for ids, done in zip(token_ids, finished, strict=True)]
