"""Conversion between outputs of steps and records of a token log."""

from collections import defaultdict
from collections.abc import Sequence

from msgspec.structs import replace

from shared.protocol.records import AnyRecord, ChoiceDelta, TokenChunk
from workers.engine.core.sequence import LoggedChoice, RequestOutput

MAX_RECORD_VALUES = 1 << 15
"""Limit on token ids and log probabilities in one record, at about 20 bytes each. The outputs of
one step stay together even if they exceed it."""


def num_for_record(outputs: list[RequestOutput], multiple: int = 1) -> int:
    """Return the number of first outputs that go into one record.

    The number of tokens up to the end of a record is a multiple of `multiple`, except at the end of
    the request. Returns at least one output if there are any and `multiple` is 1.
    """
    num_values = num_whole = 0
    for num_outputs, output in enumerate(outputs, 1):
        num_values += _num_values(output)
        if num_whole and num_values > MAX_RECORD_VALUES:
            break
        if _ends_record(output, multiple):
            num_whole = num_outputs
    return num_whole


def _ends_record(output: RequestOutput, multiple: int) -> bool:
    if multiple == 1 or output.usage is not None or output.error is not None:
        return True
    return all((c.position + len(c.token_ids)) % multiple == 0 for c in output.choices)


def _num_values(output: RequestOutput) -> int:
    num_values, logprobs = 0, [*(output.prompt_logprobs or [])]
    for delta in output.choices:
        num_values += len(delta.token_ids)
        logprobs += delta.logprobs or []
    for token_logprobs in logprobs:
        num_values += 1 + len(token_logprobs.top_token_ids)
    return num_values


def merge_deltas(outputs: list[RequestOutput]) -> list[ChoiceDelta]:
    """Merge the consecutive deltas of each choice into one, and make their text if it has none.

    The outputs of a request must be merged once, in order.
    """
    by_choice: dict[int, list[ChoiceDelta]] = defaultdict(list)
    for output in outputs:
        for delta in output.choices:
            by_choice[delta.index].append(delta)
    texts = next((output.texts for output in outputs if output.texts), [])
    merged = [_merge(by_choice[index]) for index in sorted(by_choice)]
    if not texts:
        return merged
    return [
        replace(delta, text=texts[delta.index](delta.token_ids, delta.finish_reason))
        for delta in merged
    ]


def _merge(deltas: list[ChoiceDelta]) -> ChoiceDelta:
    if len(deltas) == 1:
        return deltas[0]
    return replace(
        deltas[-1],
        position=deltas[0].position,
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        text="".join([delta.text for delta in deltas]),
        logprobs=[logprobs for delta in deltas for logprobs in delta.logprobs or []] or None,
    )


def logged_choices(records: Sequence[AnyRecord], n: int) -> list[LoggedChoice]:
    """Return the tokens of each choice that are in a log; no choices for an empty log."""
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
