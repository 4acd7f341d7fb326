"""Memory budget for answers that are not streamed: log probabilities, embeddings, speech, images.

A stream drops log probabilities as soon as they are sent. A whole answer has all of them at its
end, and there may be gigabytes, so their memory is reserved before the request is published.
Embeddings are never streamed. The length of a speech and the size of an image file are not known
before, so their memory is reserved as they arrive. Pure.
"""

from collections.abc import Mapping, MutableMapping
from typing import Any

import msgspec
from msgspec import Struct

from shared.config.schema import GatewayConfig
from shared.errors import Overloaded
from shared.protocol.messages import RequestRecord
from workers.gateway.core.assembler import AnswerOptions, Options
from workers.gateway.core.kinds import Budget, Refusal
from workers.gateway.core.plan import SubmitPlan
from workers.gateway.http.errors import AnswerTooLarge

# Peak memory of one entry: its Python objects and its JSON. A token has one entry for itself, one
# for its own log probability, and one for each alternative. Measured with tracemalloc, for
# conversations and for `output_mode: text`: at most 450 bytes an entry without alternatives, 360
# with twenty.
ENTRY_BYTES = 480
# Peak memory of one value of an embedding. Measured with tracemalloc: 61 bytes, 13 in base64.
VALUE_BYTES = 64
# Number of answers of the largest size that fit into the budget at one time.
MAX_LARGEST = 4

_OPTION = "kept"


class AnswerSize(Struct, frozen=True, omit_defaults=True):
    """Number of log probability entries and of embedding values in an answer.

    The text and the tokens of an answer are small in comparison.
    """

    per_token: int = 0
    """Entries of each token of the answer."""
    of_prompt: int = 0
    """Entries of the prompts."""
    choices: int = 1
    """Choices of all prompts together."""
    max_tokens: int | None = None
    """Limit on the tokens of each choice. None: the model's limit."""
    of_embeddings: int = 0
    """Values of the embeddings of all prompts."""

    @property
    def needs_max_model_len(self) -> bool:
        return self.per_token > 0 and self.max_tokens is None

    def max_bytes(self, max_model_len: int = 0) -> int:
        """Return the largest size that the answer may have."""
        tokens = max_model_len if self.max_tokens is None else self.max_tokens
        return self.num_bytes(self.choices * tokens)

    def num_bytes(self, num_tokens: int) -> int:
        """Return the size of an answer with `num_tokens` in all its choices together."""
        num_entries = self.of_prompt + self.per_token * num_tokens
        return ENTRY_BYTES * num_entries + VALUE_BYTES * self.of_embeddings

    def refusal(self, num_bytes: int, budget: Budget) -> Refusal:
        """Return the refusal for an answer of `num_bytes`.

        It blames the tokens of the answer if these take at least half of the memory, and else the
        prompts.
        """
        return budget.tokens if 2 * self.num_bytes(0) <= num_bytes else budget.prompts


def answer_size_of(
    plan: SubmitPlan[Options], defaults: Mapping[str, Any], hidden_size: int = 0
) -> AnswerSize:
    """Return the size of a plan's answer.

    `defaults` are the model's sampling parameters, `hidden_size` is the length of its embeddings.
    """
    sampling = {**defaults, **plan.sampling}
    num_choices = sampling.get("n", 1)
    logprobs = plan.options.logprobs
    is_shown = logprobs is not None and logprobs is not False
    prompt_logprobs = plan.sampling.get("prompt_logprobs")
    num_prompt = 0
    if prompt_logprobs is not None:
        # With an echo, each choice has its own copy of the prompt's log probabilities.
        copies = num_choices if plan.options.echo else 1
        num_prompt = copies * sum(len(r.prompt_token_ids or ()) for r in plan.requests)
    return AnswerSize(
        per_token=_num_entries(sampling.get("logprobs")) if is_shown else 0,
        of_prompt=num_prompt * _num_entries(prompt_logprobs),
        choices=num_choices * len(plan.requests),
        max_tokens=sampling.get("max_tokens"),
        of_embeddings=sum(
            min(request.embedding.dimensions or hidden_size, hidden_size)
            for request in plan.requests
            if request.embedding is not None
        ),
    )


def _num_entries(num_alternatives: int | None) -> int:
    return 2 + (num_alternatives or 0)


def stored_options(options: AnswerOptions, size: AnswerSize) -> dict[str, Any]:
    """Return the options to store in a RequestRecord, with the size for `read_answer_size`."""
    fields: dict[str, Any] = msgspec.to_builtins(options)
    is_large = size.per_token or size.of_prompt or size.of_embeddings
    return fields | {_OPTION: msgspec.to_builtins(size)} if is_large else fields


def read_answer_size(record: RequestRecord) -> AnswerSize:
    return msgspec.convert(record.options.get(_OPTION, {}), AnswerSize)


class AnswerBudget:
    """Memory budget for all answers that are being assembled."""

    def __init__(self, limits: GatewayConfig) -> None:
        self._max_mib = limits.max_answer_mib
        self._free_bytes = MAX_LARGEST * limits.max_answer_mib * 2**20

    def reserve(self, scope: MutableMapping[str, Any], num_bytes: int, refusal: Refusal) -> None:
        """Reserve memory for the HTTP request of `scope` until `release`.

        An earlier reservation of the same request is replaced. Raises AnswerTooLarge or Overloaded.
        """
        self.release(scope)
        if num_bytes > self._max_mib * 2**20:
            raise AnswerTooLarge(
                f"the {refusal.content} of this answer may take {num_bytes // 2**20} MiB, and the"
                f" limit without a stream is {self._max_mib} MiB: {refusal.advice}",
                field=refusal.field,
            )
        self._take(scope, num_bytes)

    def extend(self, scope: MutableMapping[str, Any], more_bytes: int, refusal: Refusal) -> None:
        """Reserve memory for more of a speech or images, in addition to what the request has.

        Raises AnswerTooLarge or Overloaded.
        """
        if scope.get("answer_bytes", 0) + more_bytes > self._max_mib * 2**20:
            raise AnswerTooLarge(
                f"the {refusal.content} of this answer would take more than the limit of"
                f" {self._max_mib} MiB without a stream: {refusal.advice}",
                field=refusal.field,
            )
        self._take(scope, more_bytes)

    def _take(self, scope: MutableMapping[str, Any], num_bytes: int) -> None:
        if num_bytes > self._free_bytes:
            raise Overloaded("too many large answers are being assembled")
        self._free_bytes -= num_bytes
        scope["answer_bytes"] = scope.get("answer_bytes", 0) + num_bytes

    def release(self, scope: MutableMapping[str, Any]) -> None:
        """Free what this request has reserved. A second call has no effect."""
        self._free_bytes += scope.pop("answer_bytes", 0)
