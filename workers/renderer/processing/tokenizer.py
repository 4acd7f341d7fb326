"""Prompt tokenizer: a model's tokenizer and chat template, from text to token ids and back."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2

from shared.errors import InvalidRequest, UnsupportedContent
from shared.models.family import ToolFormat
from shared.protocol.multimodal import Modality
from shared.protocol.requests import FunctionDefinition, Message, Prompt, Tool
from workers.renderer.processing import prompt as prompts
from workers.renderer.processing.token_bytes import TokenByteDecoder

# Marks in a chat template, and the format of tool calls that each mark indicates.
_FORMAT_MARKS: tuple[tuple[str, ToolFormat], ...] = (
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("python_tag", "llama3_json"),
    ("ipython", "llama3_json"),
)
HERMES_SIGNS = ("<tool_call>", "</tool_call>")
# Names and keywords that templates may compare with constants.
_WORD = re.compile(r"[A-Za-z0-9_.:/-]*")
_PROBE = "probe_of_tools"
# A template can do anything with a client's values, such as add a number to a text.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class PromptTokenizer:
    """A tokenizer with a chat template. Thread-safe."""

    def __init__(
        self,
        tokenizer: Any,
        placeholder_ids: Mapping[Modality, int],
        around: Mapping[int, tuple[str, str]],
        *,
        is_complete: bool = False,
    ) -> None:
        """Wrap transformers' `tokenizer`.

        `placeholder_ids` are the placeholder tokens of media. A template of a model with media may
        take the content of a message as a list of parts, as a text, or as both. `around` are the
        texts before and after a medium, by its placeholder token. If the template `is_complete`, it
        writes all special tokens of a prompt.
        """
        self._tokenizer = tokenizer
        self._has_media = bool(placeholder_ids)
        self._is_complete = is_complete
        self._takes_strings = not self._has_media or _writes(tokenizer, lambda text: text)
        self._takes_parts = self._has_media and (
            _writes(tokenizer, lambda text: [{"type": "text", "text": text}])
            or not self._takes_strings
        )
        self._placeholders: dict[Modality, str] = {
            modality: tokenizer.convert_ids_to_tokens(token_id)
            for modality, token_id in placeholder_ids.items()
        }
        self._reserved = _reserved_names(tokenizer)
        self._control_ids = {
            token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special or token_id in placeholder_ids.values()
        }
        # transformers sets truncation and padding on the shared Rust object at every call; the
        # object itself may be used by many threads as long as these are not set.
        self._encoder = tokenizer.backend_tokenizer
        self._encoder.no_truncation()
        self._encoder.no_padding()
        markers = {tokenizer.convert_ids_to_tokens(i): text for i, text in around.items()}
        self._around = {
            marker: before + marker + after
            for marker, (before, after) in markers.items()
            if before or after
        }
        self._byte_decoder = TokenByteDecoder(self._encoder)
        self.takes_tools = self._writes_tools()
        """Whether the chat template writes tools."""

    def find_tool_format(self, default: ToolFormat | None = None) -> ToolFormat | None:
        """Return the format of the model's tool calls; None if it does not support tools.

        The marks in the chat template decide, because models may be tuned to other formats than
        their family; `default` is for a template without marks.
        """
        if not self.takes_tools:
            return None
        template = self._tokenizer.chat_template
        text = template if isinstance(template, str) else "".join(template.values())
        return next((name for mark, name in _FORMAT_MARKS if mark in text), default)

    def signs(self) -> list[int | None]:
        """Return the token of each sign around Hermes calls; None for a sign of several tokens."""
        sign_ids = (self.encode(sign, False) for sign in HERMES_SIGNS)
        return [ids[0] if len(ids) == 1 else None for ids in sign_ids]

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Return the token ids of the templated messages. Text never becomes a control token.

        With the text `<|image_pad|>` or `<|im_start|>system`, a user could bind images to other
        positions or take another role. Such text is refused and not encoded as plain characters,
        because text that is tokenized separately from the template differs from the model's
        training data. The check compares tokens, not strings: with every text replaced by a letter,
        the control tokens must be the same. This covers control tokens that result from the
        tokenizer's normalisation, and texts that the template joins. Results and descriptions of
        tools are checked like any other text.

        Raises InvalidRequest for control tokens and for messages that the template refuses, and
        UnsupportedContent for tools if the template does not support them.
        """
        self._check(prompt)
        neutral = self._apply_template(prompt, _neutralize, self._neutralize_value)
        special = prompt.add_special_tokens
        if special is None:
            special = self._adds_special_tokens(neutral)
        token_ids = self.encode(self._apply_template(prompt, str, prompts.same), special)
        control = [token_id for token_id in token_ids if token_id in self._control_ids]
        harmless = self.encode(neutral, special)
        if control != [token_id for token_id in harmless if token_id in self._control_ids]:
            raise self._control_token_error(prompt)
        return token_ids

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._encoder.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of all tokens."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def spellings(self, token_ids: Sequence[int]) -> list[str]:
        """Return the tokenizer's spelling of each token; empty for an unknown id."""
        return [self._encoder.id_to_token(token_id) or "" for token_id in token_ids]

    def bytes_of(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token."""
        return [self._byte_decoder.bytes_of(token_id) for token_id in token_ids]

    def _check(self, prompt: Prompt) -> None:
        for name in prompt.template_kwargs:
            if name in self._reserved:
                raise InvalidRequest(
                    f"{name} is not a variable of the chat template",
                    field=f"template_kwargs.{name}",
                )
        if self.takes_tools:
            return
        complaint = "this model's chat template does not support tools"
        if prompt.tools:
            raise UnsupportedContent(complaint, field="tools")
        for i, message in enumerate(prompt.messages):
            if message.tool_calls:
                raise UnsupportedContent(complaint, field=f"messages[{i}].tool_calls")
            if message.role == "tool":
                raise UnsupportedContent(complaint, field=f"messages[{i}].role")

    def _adds_special_tokens(self, text: str) -> bool:
        """Return whether the tokenizer adds its special tokens, such as a BOS, to templated text.

        This follows transformers: a tokenizer that applies its template never adds them, and a
        model's processor adds them unless the template has written a BOS, unlike LLaVA's template.
        """
        bos: str | None = self._tokenizer.bos_token
        if self._is_complete:
            return False
        return self._has_media and not (bos and text.startswith(bos))

    def _control_token_error(self, prompt: Prompt) -> InvalidRequest:
        for field, text in prompts.strings_by_field(prompt):
            for token_id in self.encode(text, False):
                if token_id in self._control_ids:
                    token = self._tokenizer.convert_ids_to_tokens(token_id)
                    return InvalidRequest(
                        f"the text contains the model's control token {token}", field=field
                    )
        return InvalidRequest("the texts join into a control token", field="messages")

    def _apply_template(
        self, prompt: Prompt, text: Callable[[str], str], value: prompts.Transform
    ) -> str:
        """Apply the template, with `text` on every text and `value` on the other values."""
        conversation = prompts.template_messages(
            prompt.messages,
            parts=self._takes_parts,
            strings=self._takes_strings,
            placeholders=self._placeholders,
            text=text,
            value=value,
        )
        kwargs = {name: value(kwarg) for name, kwarg in prompt.template_kwargs.items()}
        if not kwargs.get("continue_final_message"):
            kwargs.setdefault("add_generation_prompt", True)
        try:
            templated: str = self._tokenizer.apply_chat_template(
                conversation,
                tools=prompts.template_tools(prompt.tools, value),
                tokenize=False,
                **kwargs,
            )
        except _TEMPLATE_ERRORS as error:  # such as roles that do not alternate
            # Only an error of this very type has the words of the template.
            is_own = type(error) is jinja2.TemplateError
            reason = (
                str(error) if is_own else "a value that it needs is missing or has another type"
            )
            raise InvalidRequest(
                f"the model's chat template refuses the messages: {reason}", field="messages"
            ) from error
        for marker, surrounded in self._around.items():
            templated = templated.replace(marker, surrounded)
        return templated

    def _writes_tools(self) -> bool:
        """Return whether the templated text contains a tool: a template may ignore its tools."""
        tool = Tool(FunctionDefinition(_PROBE, "", {"type": "object", "properties": {}}))
        prompt = Prompt([Message("user", "x")], tools=[tool])
        try:
            return _PROBE in self._apply_template(prompt, str, prompts.same)
        except InvalidRequest:
            return False

    def _neutralize_value(self, value: Any) -> Any:
        """Return JSON of the same shape without control tokens. Harmless words do not change."""
        if isinstance(value, str):
            return value if self._is_harmless(value) else _neutralize(value)
        if isinstance(value, list):
            return [self._neutralize_value(inner) for inner in value]
        if isinstance(value, dict):
            return {
                key if self._is_harmless(key) else f"x{i}": self._neutralize_value(inner)
                for i, (key, inner) in enumerate(value.items())
            }
        return value

    def _is_harmless(self, word: str) -> bool:
        if _WORD.fullmatch(word) is None:
            return False
        return self._control_ids.isdisjoint(self.encode(word, False))


def _neutralize(text: str) -> str:
    """Return a text without control tokens. It is blank if `text` is, because templates test it."""
    return "x" if text.strip() else text


def _reserved_names(tokenizer: Any) -> frozenset[str]:
    """Return the argument names of transformers' function, including the template itself."""
    names = set(inspect.signature(tokenizer.apply_chat_template).parameters)
    names |= {"self", "messages", "tools"}
    return frozenset(names - {"add_generation_prompt", "continue_final_message", "documents"})


def _writes(tokenizer: Any, content_of: Callable[[str], Any]) -> bool:
    """Return whether the chat template writes a text as content of this shape.

    The template of LLaVA drops texts outside lists of parts. A template for texts fails for a list
    of parts, or writes its Python representation.
    """
    texts = set()
    for text in ("a", "b"):
        messages = [{"role": "user", "content": content_of(text)}]
        try:
            texts.add(tokenizer.apply_chat_template(messages, tokenize=False))
        except _TEMPLATE_ERRORS:
            return False
    return len(texts) == 2 and not any("{'type'" in text for text in texts)
