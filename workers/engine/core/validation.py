"""Validation of requests before they are scheduled. Pure; each check raises a RequestError."""

from collections.abc import Callable

from shared.errors import ContextTooLong, InvalidRequest, WorkerFailure
from workers.engine.core.sequence import EngineRequest

MAX_PROMPT_LOGPROBS = 1 << 15
"""Limit for all tokens of a prompt: one log record has to hold them, at about 20 bytes each."""


def check_prompt(request: EngineRequest, vocab_size: int) -> None:
    token_ids = request.prompt_token_ids
    if not token_ids:
        raise InvalidRequest("the prompt has no tokens", field="messages")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise InvalidRequest(
            f"the prompt's token ids must be from 0 to {vocab_size - 1}", field="messages"
        )


def check_logged(request: EngineRequest, vocab_size: int) -> None:
    """Raise WorkerFailure for logged tokens that another model must have written."""
    if any(not 0 <= t < vocab_size for choice in request.logged for t in choice.token_ids):
        raise WorkerFailure(
            "the token log was written by another model: it has token ids outside of this model's"
            f" vocabulary, 0 to {vocab_size - 1}"
        )


def check_placeholders(request: EngineRequest) -> None:
    num_prompt_tokens = len(request.prompt_token_ids)
    previous_stop = 0
    for placeholder in sorted((i.placeholder for i in request.items), key=lambda p: p.offset):
        stop = placeholder.offset + placeholder.length
        if placeholder.offset < 0 or placeholder.length < 1 or stop > num_prompt_tokens:
            raise InvalidRequest(
                f"placeholder [{placeholder.offset}, {stop}) is outside the prompt's"
                f" {num_prompt_tokens} tokens",
                field="messages",
            )
        if placeholder.offset < previous_stop:
            raise InvalidRequest(
                f"placeholder [{placeholder.offset}, {stop}) overlaps another", field="messages"
            )
        if placeholder.is_embed is not None:
            _check_embed_mask(placeholder.is_embed, placeholder.length)
        previous_stop = stop


def _check_embed_mask(is_embed: bytes, length: int) -> None:
    bits = int.from_bytes(is_embed, "little")
    if len(is_embed) != -(-length // 8) or bits >> length or not bits:
        raise InvalidRequest(
            f"a placeholder of {length} tokens needs {length} bits in is_embed, and at least one of"
            " them must be 1",
            field="messages",
        )


def check_sampling(request: EngineRequest, vocab_size: int, max_tokens: int) -> None:
    """Check the parameters that depend on the model or on each other."""
    params = request.sampling
    for name, token_ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or []),
        ("logit_bias", params.logit_bias),
    ):
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"{name}: token id {token_id} is not from 0 to {vocab_size - 1}",
                    field=f"sampling_params.{name}",
                )
    if params.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens {params.min_tokens} is more than max_tokens {max_tokens}",
            field="sampling_params.min_tokens",
        )
    if params.stop and not params.detokenize:
        raise InvalidRequest(
            "stop strings require text, which detokenize: false disables",
            field="sampling_params.stop",
        )
    num_values = len(request.prompt_token_ids) * (1 + (params.prompt_logprobs or 0))
    if params.prompt_logprobs is not None and num_values > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs {params.prompt_logprobs} of {len(request.prompt_token_ids)} tokens"
            f" are {num_values} values, over the limit of {MAX_PROMPT_LOGPROBS}",
            field="sampling_params.prompt_logprobs",
        )


def tokenize_bad_words(
    words: list[str], encode: Callable[[str], list[int]], vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word, at the start of a text and after a space.

    `encode` adds no special tokens.
    """
    tokenized: dict[tuple[int, ...], None] = {}
    for word in words:
        stripped = word.lstrip()
        for text in (stripped, " " + stripped):
            token_ids = tuple(encode(text))
            if not token_ids or max(token_ids) >= vocab_size:
                raise InvalidRequest(
                    f"the model has no tokens for the bad word {word!r}",
                    field="sampling_params.bad_words",
                )
            tokenized[token_ids] = None
    return tuple(tokenized)


def resolve_max_tokens(request: EngineRequest, max_model_len: int, num_free_positions: int) -> int:
    """Return the limit on new tokens: 0 for an embedding, the requested limit, or all that fit.

    Each token uses one token of the context and one of the model's free positions.
    """
    num_prompt_tokens, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
    num_free = max_model_len - num_prompt_tokens
    if request.embedding is not None:
        if num_free < 0:
            raise ContextTooLong(
                f"the prompt has {num_prompt_tokens} tokens, more than the model's context of"
                f" {max_model_len}",
                field="messages",
            )
        return 0
    if num_free < 1:
        raise ContextTooLong(
            f"the prompt has {num_prompt_tokens} tokens and leaves no room for an answer in the"
            f" model's context of {max_model_len}",
            field="messages",
        )
    if max_tokens is not None and max_tokens > num_free:
        raise ContextTooLong(
            f"{num_prompt_tokens} prompt tokens and max_tokens {max_tokens} exceed the model's"
            f" context of {max_model_len}; at most {num_free} tokens can follow this prompt",
            field="sampling_params.max_tokens",
        )
    if (max_tokens or 1) > num_free_positions:
        raise ContextTooLong(
            f"max_tokens {max_tokens or 1} is more than the {num_free_positions} positions that the"
            " model has after this prompt: a video with many seconds between its frames takes more"
            " positions than tokens",
            field="sampling_params.max_tokens",
        )
    return min(num_free, num_free_positions) if max_tokens is None else max_tokens
