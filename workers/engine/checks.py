"""What can be refused of a request before it enters a batch. Pure; each raises a RequestError."""

from shared.errors import ContextTooLong, InvalidRequest
from workers.engine.sequence import EngineRequest


def check_prompt(request: EngineRequest, vocab_size: int) -> None:
    token_ids = request.prompt_token_ids
    if not token_ids:
        raise InvalidRequest("the prompt has no tokens", field="messages")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise InvalidRequest(
            f"the prompt's token ids must be from 0 to {vocab_size - 1}", field="messages"
        )


def check_placeholders(request: EngineRequest) -> None:
    num_prompt_tokens = len(request.prompt_token_ids)
    free_from = 0
    for placeholder in sorted((i.placeholder for i in request.items), key=lambda p: p.offset):
        stop = placeholder.offset + placeholder.length
        if placeholder.offset < 0 or placeholder.length < 1 or stop > num_prompt_tokens:
            raise InvalidRequest(
                f"placeholder [{placeholder.offset}, {stop}) is outside the prompt's"
                f" {num_prompt_tokens} tokens",
                field="messages",
            )
        if placeholder.offset < free_from:
            raise InvalidRequest(
                f"placeholder [{placeholder.offset}, {stop}) overlaps another", field="messages"
            )
        if placeholder.is_embed is not None:
            _check_mask(placeholder.is_embed, placeholder.length)
        free_from = stop


def _check_mask(is_embed: bytes, length: int) -> None:
    bits = int.from_bytes(is_embed, "little")
    if len(is_embed) != -(-length // 8) or bits >> length or not bits:
        raise InvalidRequest(
            f"a placeholder of {length} tokens needs as many bits in is_embed, not all of them 0",
            field="messages",
        )


def check_stop_token_ids(request: EngineRequest, vocab_size: int) -> None:
    for token_id in request.sampling.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"stop token id {token_id} is not from 0 to {vocab_size - 1}",
                field="sampling_params.stop_token_ids",
            )


def resolve_max_tokens(request: EngineRequest, max_model_len: int) -> int:
    """What is asked for, or all that fits behind the prompt."""
    num_prompt_tokens, asked = len(request.prompt_token_ids), request.sampling.max_tokens
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise ContextTooLong(
            f"the prompt has {num_prompt_tokens} tokens and leaves no room for an answer in the"
            f" model's context of {max_model_len}",
            field="messages",
        )
    if asked is not None and asked > room:
        raise ContextTooLong(
            f"{num_prompt_tokens} prompt tokens and max_tokens {asked} exceed the model's context"
            f" of {max_model_len}; at most {room} tokens can follow this prompt",
            field="sampling_params.max_tokens",
        )
    return room if asked is None else asked
