"""Log probabilities in the formats of the APIs: with token ids, or with texts of tokens. Pure."""

from collections.abc import Iterator, Sequence
from itertools import islice

from shared.protocol.records import TokenLogprobs
from workers.gateway.core.assembler import TokenBytes
from workers.gateway.schemas.generate import IdLogprob, IdLogprobs
from workers.gateway.schemas.openai_response import TokenLogprob, TopLogprob

# A character has at most 4 bytes. With the 3 tokens before a token, all its characters are whole.
MAX_CONTEXT_TOKENS = 4


def token_text(token: bytes, before: Sequence[bytes]) -> str:
    """Return the text of `token`, which follows the tokens `before`.

    A token in the middle of a character has no text; the token that completes the character has it.
    """
    context = before[-MAX_CONTEXT_TOKENS:]
    for num_context in range(len(context) + 1):
        prefix = b"".join(context[len(context) - num_context :])
        text = (prefix + token).decode(errors="replace")
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            continue
        # The prefix without an incomplete character at its end.
        before_token = prefix.decode(errors="replace").rstrip("\N{REPLACEMENT CHARACTER}")
        return text[len(before_token) :]
    return ""


def openai_logprobs(
    token_ids: list[int], logprobs: list[TokenLogprobs], token_bytes: TokenBytes
) -> Iterator[TokenLogprob]:
    """Yield the log probabilities of chat completions: the text and bytes of each token alone."""
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        pairs = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        tops = [TopLogprob(*_decoded(token_bytes[top], logprob)) for top, logprob in pairs]
        yield TokenLogprob(*_decoded(token_bytes[token_id], entry.logprob), tops)


def _decoded(token: bytes, logprob: float) -> tuple[str, float, list[int]]:
    return token.decode("utf-8", "replace"), logprob, list(token)


def ranked_tokens(token_id: int, logprobs: TokenLogprobs) -> Iterator[IdLogprob]:
    """Yield the chosen token first, then the most probable other tokens by rank."""
    yield IdLogprob(token_id=token_id, logprob=logprobs.logprob, rank=logprobs.rank)
    pairs = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
    for rank, (top_id, logprob) in enumerate(pairs, 1):
        if top_id != token_id:
            yield IdLogprob(token_id=top_id, logprob=logprob, rank=rank)


def id_logprobs(token_id: int, logprobs: TokenLogprobs, num_top: int) -> IdLogprobs:
    """Return the log probabilities of generate in the output mode `tokens`, `num_top` in all."""
    return IdLogprobs(
        token_id=token_id,
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top_logprobs=list(islice(ranked_tokens(token_id, logprobs), num_top)),
    )


def text_logprobs(entry: IdLogprobs, context: list[bytes], token_bytes: TokenBytes) -> TokenLogprob:
    """Return the same entry with texts instead of token ids.

    `context` has the bytes of the tokens before this one, which is appended to it.
    """

    def decoded(token: IdLogprob) -> tuple[str, float, list[int]]:
        text = token_text(token_bytes[token.token_id], context)
        return text, token.logprob, list(text.encode())

    tops = [TopLogprob(*decoded(top)) for top in entry.top_logprobs]
    converted = TokenLogprob(*decoded(entry), tops)
    context.append(token_bytes[entry.token_id])
    return converted
