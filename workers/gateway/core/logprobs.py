"""Log probabilities as generate tells them: by token ids, or by what each token spells. Pure."""

from collections.abc import Sequence

from shared.protocol.messages import TokenLogprobs
from workers.gateway.core.assembler import TokenBytes
from workers.gateway.schemas.generate import IdLogprob, IdLogprobs, TextLogprob, TextLogprobs

# A character has at most 4 bytes, so with the 3 tokens before it every token has whole ones.
MAX_CONTEXT_TOKENS = 4


def token_text(token: bytes, before: Sequence[bytes]) -> str:
    """The text of `token`, which follows the tokens `before`.

    A token in the middle of a character has none; the one that completes it has the character.
    """
    context = before[-MAX_CONTEXT_TOKENS:]
    for num_context in range(len(context) + 1):
        prefix = b"".join(context[len(context) - num_context :])
        text = (prefix + token).decode(errors="replace")
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            continue
        return text[len(_whole(prefix)) :]
    return ""


def _whole(prefix: bytes) -> str:
    """Without the character at the end that lacks bytes."""
    return prefix.decode(errors="replace").rstrip("\N{REPLACEMENT CHARACTER}")


def id_logprobs(token_id: int, told: TokenLogprobs, num_top: int) -> IdLogprobs:
    """The chosen token first, then the most probable others, `num_top` in all."""
    chosen = IdLogprob(token_id=token_id, logprob=told.logprob, rank=told.rank)
    others = [
        IdLogprob(token_id=top_id, logprob=logprob, rank=rank)
        for rank, (top_id, logprob) in enumerate(
            zip(told.top_token_ids, told.top_logprobs, strict=True), 1
        )
        if top_id != token_id
    ]
    return IdLogprobs(
        token_id=token_id,
        logprob=told.logprob,
        rank=told.rank,
        top_logprobs=[chosen, *others][:num_top],
    )


def text_logprobs(found: IdLogprobs, context: list[bytes], spelling: TokenBytes) -> TextLogprobs:
    """`context` are the bytes of the tokens before, to which this one's are added."""

    def text_of(token_id: int) -> str:
        return token_text(spelling[token_id], context)

    token = text_of(found.token_id)
    told = TextLogprobs(
        token=token,
        logprob=found.logprob,
        bytes=list(token.encode()),
        top_logprobs=[
            TextLogprob(token=text, logprob=top.logprob, bytes=list(text.encode()))
            for top in found.top_logprobs
            for text in [text_of(top.token_id)]
        ],
    )
    context.append(spelling[found.token_id])
    return told
