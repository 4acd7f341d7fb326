"""A model's tokenizer and chat template: what a client has written into token ids, and back."""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import jinja2

from shared.errors import InvalidRequest, UnsupportedContent
from shared.models.family import ModelFamily, ToolFormat
from shared.protocol.messages import FunctionDefinition, Message, Prompt, Tool
from workers.renderer.processing import prompt
from workers.renderer.processing.token_bytes import TokenByteDecoder

# What a template says of how calls are written, by who understands it.
_SIGNS: tuple[tuple[str, ToolFormat], ...] = (
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("python_tag", "llama3_json"),
    ("ipython", "llama3_json"),
)
HERMES_SIGNS = ("<tool_call>", "</tool_call>")
# Names and keywords, which templates compare with their own.
_WORD = re.compile(r"[A-Za-z0-9_.:/-]*")
_PROBE = "probe_of_tools"
# Whatever a template does with what a client has written, such as to add a number to a text.
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
    """Thread-safe."""

    def __init__(self, tokenizer: Any, image_token_id: int | None, takes_parts: bool) -> None:
        """`tokenizer` is transformers', with a chat template. `takes_parts`: its messages are lists
        of parts, as those of models that see."""
        self._tokenizer = tokenizer
        self._takes_parts = takes_parts
        self._takes_strings = not takes_parts or _writes_strings(tokenizer)
        self._reserved = _reserved_names(tokenizer)
        self._control_ids = {
            token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special or token_id == image_token_id
        }
        # transformers' call sets truncation and padding on the shared Rust object at every call;
        # the object itself may be used by many threads as long as nobody does.
        self._encoder = tokenizer.backend_tokenizer
        self._encoder.no_truncation()
        self._encoder.no_padding()
        self._spelling = TokenByteDecoder(self._encoder)
        self.takes_tools = self._writes_tools()
        """Whether the chat template tells the model of tools."""

    def tool_parser(self, family: ModelFamily | None = None) -> ToolFormat | None:
        """Return the format in which the model writes its calls.

        The marks in its chat template decide, because models are tuned to other formats than their
        family's.
        """
        if not self.takes_tools:
            return None
        template = self._tokenizer.chat_template
        text = template if isinstance(template, str) else "".join(template.values())
        default = None if family is None else family.tool_format
        return next((parser for sign, parser in _SIGNS if sign in text), default)

    def signs(self) -> list[int | None]:
        """Of hermes' calls, each by its token; None for one that is spelled in several."""
        spelt = (self.encode(sign, False) for sign in HERMES_SIGNS)
        return [ids[0] if len(ids) == 1 else None for ids in spelt]

    def tokenize(self, asked: Prompt) -> list[int]:
        """Token ids of the templated messages, in which nothing of a user made a control token.

        A user who types `<|image_pad|>` or `<|im_start|>system` would bind pictures to other
        places or speak in another role. Such text is refused rather than encoded as plain
        characters: that would need the text to be tokenized apart from the template's, and so
        differently from how the model saw it in training. The test is on tokens, not on strings,
        because only the tokenizer knows what its normaliser turns into a control token, and only
        the template what it joins: with every text replaced by a letter, the control tokens must
        be the same. What tools say, and what is said of them, is text like any other.

        Raises InvalidRequest for that and for messages that the template refuses, and
        UnsupportedContent for tools that it does not know.
        """
        self._check(asked)
        neutral = self._apply_template(asked, _neutral, self._neutral_value)
        special = asked.add_special_tokens
        if special is None:
            special = self._adds_special_tokens(neutral)
        token_ids = self.encode(self._apply_template(asked, str, _same), special)
        control = [token_id for token_id in token_ids if token_id in self._control_ids]
        harmless = self.encode(neutral, special)
        if control != [token_id for token_id in harmless if token_id in self._control_ids]:
            raise self._control_token_error(asked)
        return token_ids

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._encoder.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of all tokens."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def spellings(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the tokenizer itself spells it; empty for an id that it does not have."""
        return [self._encoder.id_to_token(token_id) or "" for token_id in token_ids]

    def bytes_of(self, token_ids: Sequence[int]) -> list[bytes]:
        """What each token stands for."""
        return [self._spelling.bytes_of(token_id) for token_id in token_ids]

    def _check(self, asked: Prompt) -> None:
        for name in asked.template_kwargs:
            if name in self._reserved:
                raise InvalidRequest(
                    f"{name} is no variable of the chat template", field=f"template_kwargs.{name}"
                )
        if self.takes_tools:
            return
        complaint = "this model's chat template knows no tools"
        if asked.tools:
            raise UnsupportedContent(complaint, field="tools")
        for i, message in enumerate(asked.messages):
            if message.tool_calls:
                raise UnsupportedContent(complaint, field=f"messages[{i}].tool_calls")
            if message.role == "tool":
                raise UnsupportedContent(complaint, field=f"messages[{i}].role")

    def _adds_special_tokens(self, text: str) -> bool:
        """Whether the tokenizer sets a BOS before what the template made, or whatever it adds.

        As transformers has it: never where a tokenizer applies its template, but where a model's
        processor does, unless the template has written one. LLaVA's does not.
        """
        bos: str | None = self._tokenizer.bos_token
        return self._takes_parts and not (bos and text.startswith(bos))

    def _control_token_error(self, asked: Prompt) -> InvalidRequest:
        for field, text in prompt.strings_by_field(asked):
            for token_id in self.encode(text, False):
                if token_id in self._control_ids:
                    token = self._tokenizer.convert_ids_to_tokens(token_id)
                    return InvalidRequest(
                        f"the text contains the model's control token {token}", field=field
                    )
        return InvalidRequest("the texts join into a control token", field="messages")

    def _apply_template(
        self, asked: Prompt, text: Callable[[str], str], value: prompt.Value
    ) -> str:
        """`text` is applied to every text, `value` to whatever else the client has chosen."""
        conversation = prompt.template_messages(
            asked.messages,
            parts=self._takes_parts,
            strings=self._takes_strings,
            text=text,
            value=value,
        )
        kwargs = {name: value(given) for name, given in asked.template_kwargs.items()}
        if not kwargs.get("continue_final_message"):
            kwargs.setdefault("add_generation_prompt", True)
        try:
            templated: str = self._tokenizer.apply_chat_template(
                conversation,
                tools=prompt.template_tools(asked.tools, value),
                tokenize=False,
                **kwargs,
            )
        except _TEMPLATE_ERRORS as error:  # such as roles that do not alternate
            raise InvalidRequest(
                f"the model's chat template refuses the messages: {error}", field="messages"
            ) from error
        return templated

    def _writes_tools(self) -> bool:
        """Tried, since a template may name tools and not write them."""
        tool = Tool(FunctionDefinition(_PROBE, "", {"type": "object", "properties": {}}))
        asked = Prompt([Message("user", "x")], tools=[tool])
        try:
            return _PROBE in self._apply_template(asked, str, _same)
        except InvalidRequest:
            return False

    def _neutral_value(self, value: Any) -> Any:
        """Like `_neutral` for JSON: of the same shape, and words that templates look for stay."""
        if isinstance(value, str):
            return value if self._is_harmless(value) else _neutral(value)
        if isinstance(value, list):
            return [self._neutral_value(inner) for inner in value]
        if isinstance(value, dict):
            return {
                key if self._is_harmless(key) else f"x{i}": self._neutral_value(inner)
                for i, (key, inner) in enumerate(value.items())
            }
        return value

    def _is_harmless(self, word: str) -> bool:
        if _WORD.fullmatch(word) is None:
            return False
        return self._control_ids.isdisjoint(self.encode(word, False))


def _same(value: Any) -> Any:
    return value


def _neutral(text: str) -> str:
    """A stand-in without control tokens, empty or blank where `text` is, for templates look."""
    return "x" if text.strip() else text


def _reserved_names(tokenizer: Any) -> frozenset[str]:
    """Arguments of transformers' own function, among them the template itself."""
    names = set(inspect.signature(tokenizer.apply_chat_template).parameters)
    names |= {"self", "messages", "tools"}
    return frozenset(names - {"add_generation_prompt", "continue_final_message", "documents"})


def _writes_strings(tokenizer: Any) -> bool:
    """Whether the chat template writes a text that is in no list of parts; LLaVA's drops it."""
    prompts = set()
    for text in ("a", "b"):
        try:
            prompts.add(
                tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
            )
        except _TEMPLATE_ERRORS:
            return False
    return len(prompts) == 2
