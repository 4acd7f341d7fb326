"""What the answers that are not streamed may keep in memory: their log probabilities. Pure.

A stream lets go of them as soon as they are shown. A whole answer has all of them at its end, and
there may be gigabytes, so room for them is made before the request is on its way.
"""

from collections.abc import Mapping, MutableMapping
from typing import Any

import msgspec
from msgspec import Struct

from shared.config import GatewayConfig
from shared.errors import Overloaded
from shared.protocol.messages import RequestRecord
from workers.gateway.core.plan import SubmitPlan
from workers.gateway.http.errors import AnswerTooLarge

# Of one entry, as Python's objects and the JSON that these become, at the peak. A token has one for
# itself, one for its own log probability, and one for that of each other. Seen with tracemalloc, at
# most: 450 bytes with no others and 360 with twenty, for conversations and `output_mode: text`.
ENTRY_BYTES = 480
# As many answers of the largest size may be made at one time, or more smaller ones.
MAX_LARGEST = 4

_OPTION = "kept"


class LogprobSize(Struct, frozen=True, omit_defaults=True):
    """How many entries of log probabilities an answer has; text and tokens by themselves are
    little."""

    per_token: int = 0
    """Of each token of the answer."""
    of_prompt: int = 0
    choices: int = 1
    """Of all prompts together."""
    max_tokens: int | None = None
    """Of each choice; None for as many as the model can take."""

    @property
    def needs_max_model_len(self) -> bool:
        return self.per_token > 0 and self.max_tokens is None

    def max_bytes(self, max_model_len: int = 0) -> int:
        """In bytes."""
        tokens = max_model_len if self.max_tokens is None else self.max_tokens
        return self.num_bytes(self.choices * tokens)

    def limiting_field(self, num_bytes: int, kind: str) -> str:
        """What makes it so much, by the name that requests of this kind have for it."""
        if 2 * self.num_bytes(0) <= num_bytes:
            return "max_tokens"
        return "prompt_logprobs" if kind == "generate" else "logprobs"

    def num_bytes(self, num_tokens: int) -> int:
        """In bytes, for an answer whose choices have `num_tokens` together."""
        return ENTRY_BYTES * (self.of_prompt + self.per_token * num_tokens)


def logprob_size_of(order: SubmitPlan, defaults: Mapping[str, Any]) -> LogprobSize:
    """`defaults` are the model's sampling parameters."""
    sampling = {**defaults, **order.sampling}
    num_choices = sampling.get("n", 1)
    shown = order.options.get("logprobs")
    is_shown = shown is not None and shown is not False
    of_prompt = order.sampling.get("prompt_logprobs")
    num_prompt = 0
    if of_prompt is not None:
        # Choices that begin with their prompt have what is known of it, each for itself.
        copies = num_choices if "echo" in order.options else 1
        num_prompt = copies * sum(len(r.prompt_token_ids or ()) for r in order.requests)
    return LogprobSize(
        per_token=_entries(sampling.get("logprobs")) if is_shown else 0,
        of_prompt=num_prompt * _entries(of_prompt),
        choices=num_choices * len(order.requests),
        max_tokens=sampling.get("max_tokens"),
    )


def _entries(num_others: int | None) -> int:
    return 2 + (num_others or 0)


def with_logprob_size(options: Mapping[str, Any], kept: LogprobSize) -> dict[str, Any]:
    """Options of a RequestRecord, from which `kept_in` has it again."""
    keeps_any = kept.per_token or kept.of_prompt
    return {**options, _OPTION: msgspec.to_builtins(kept)} if keeps_any else dict(options)


def read_logprob_size(record: RequestRecord) -> LogprobSize:
    return msgspec.convert(record.options.get(_OPTION, {}), LogprobSize)


class AnswerBudget:
    """Memory for whole answers in the making, those of everybody together."""

    def __init__(self, limits: GatewayConfig) -> None:
        self._max_mib = limits.max_answer_mib
        self._free = MAX_LARGEST * limits.max_answer_mib * 2**20

    def reserve(self, scope: MutableMapping[str, Any], num_bytes: int, field: str) -> None:
        """Until `release` with the same scope, of an HTTP request, in place of what it has.
        Raises AnswerTooLarge with `field`, or Overloaded."""
        self.release(scope)
        if num_bytes > self._max_mib * 2**20:
            # Those of a prompt are not streamed.
            streamed = "" if field == "prompt_logprobs" else "; a stream has no such limit"
            raise AnswerTooLarge(
                f"the log probabilities of this answer may take {num_bytes // 2**20} MiB, and those"
                f" of one that is not streamed {self._max_mib}: ask for fewer, or for fewer tokens"
                f"{streamed}",
                field=field,
            )
        if num_bytes > self._free:
            raise Overloaded("too many large answers are being made")
        self._free -= num_bytes
        scope["answer_bytes"] = num_bytes

    def release(self, scope: MutableMapping[str, Any]) -> None:
        """What this request has taken, if anything."""
        self._free += scope.pop("answer_bytes", 0)
