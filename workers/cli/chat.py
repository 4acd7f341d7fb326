"""A conversation at the terminal: sends each message as a request, and prints its answer."""

import asyncio
import io
import os
import re
import sys
import time
from dataclasses import dataclass
from glob import escape, glob
from typing import Any

import msgspec

from shared import client
from shared.bus.bus import Bus
from shared.bus.login import Login
from shared.config.schema import Config
from shared.errors import InvalidRequest, NotFound, PagemillError
from shared.helpers.validation import invalid_request
from shared.protocol.records import Failure, Finish, LogRecord, TokenChunk
from shared.protocol.requests import GenerateRequest, Message, TextPart
from shared.protocol.sampling import SamplingParams
from workers.cli.ask import media_parts, name_place, naming_request
from workers.cli.broker import check_model, connected, known_models
from workers.cli.inputs import Medium, read_input
from workers.cli.terminal import (
    EXIT_INTERRUPTED,
    errors,
    note_unmarked,
    print_line,
    print_note,
    print_wrapped,
    write_text,
)
from workers.cli.token_rate import TokenRate

HELP = {
    "help": "show the commands",
    "system": "[TEXT]: set the system message; without a text, remove it",
    "model": "[NAME]: set the model; without a name, show it and all others",
    "clear": "begin a new conversation",
    "params": "[NAME=VALUE ...]: show or set sampling parameters; NAME= removes one",
    "retry": "ask the last message again",
    "undo": "remove the last message and its answer",
    "quit": "leave the chat; /bye and Ctrl-D do the same",
}


@dataclass
class Turn:
    """A message of the user, and the answer to it."""

    text: str
    media: list[Medium]
    answer: str | None = None
    """Received text; None before the first text, and after a failure without any text."""


class Chat:
    def __init__(self, login: Login, config: Config, model: str, system: str | None = None) -> None:
        self._login = login
        self._config = config
        self._model = model
        self._system = system
        self._params: dict[str, Any] = {}
        """Sampling parameters; the model's configured defaults apply to all others."""
        self._turns: list[Turn] = []
        self._is_terminal = sys.stdin.isatty()
        self._has_failed = False
        if isinstance(sys.stdin, io.TextIOWrapper):
            # A request cannot contain bytes that are not text.
            sys.stdin.reconfigure(errors="replace")

    def run(self) -> int:
        """Run until the end of the input, and return the exit code.

        From a pipe, the exit code is 1 if anything failed.
        """
        if self._is_terminal:
            import readline  # It also adds a history and editing keys to `input`.

            readline.set_completer(complete)
            readline.set_completer_delims(" \t\n")
            readline.parse_and_bind("tab: complete")
            print_note(f"{self._model}: /help shows the commands, Ctrl-D leaves")
        while True:
            try:
                line = input("> ") if self._is_terminal else input()
            except KeyboardInterrupt:
                if not self._is_terminal:
                    return EXIT_INTERRUPTED
                print_note("\nCtrl-D or /quit leaves")
                continue
            except EOFError:
                if self._is_terminal:
                    print_line("")
                break
            if not self._run_line(line.strip()):
                break
        return int(self._has_failed and not self._is_terminal)

    def _run_line(self, line: str) -> bool:
        """Run a line, print its error, and return whether the conversation continues."""
        try:
            command = parse_command(line)
            if command is not None:
                return self._run_command(*command)
            if line:
                turn = Turn(*read_input(line.removeprefix("/"), takes_stdin=False))
                note_unmarked(line)
                if self._turns and self._turns[-1].answer is None:
                    # Most chat templates refuse two messages of a user in a row.
                    self._turns.pop()
                self._turns.append(turn)
                self._ask()
        except KeyboardInterrupt:
            print_note("\ninterrupted")
        except PagemillError as error:
            self._print_error(error.code, error.message)
        except BrokenPipeError:
            raise  # The reader of stdout has closed it.
        except (OSError, RuntimeError, ValueError) as error:
            self._print_error(type(error).__name__, str(error))
        return True

    def _run_command(self, name: str, argument: str) -> bool:
        """Run a command, and return whether the conversation continues."""
        match name:
            case "help":
                for command, text in HELP.items():
                    print_line(f"/{command:<7} {text}")
                print_line(
                    '@FILE or @"FILE" in a message adds an image, sound, video, PDF file or text'
                )
            case "system":
                self._system = argument or None
            case "model":
                self._model, names = asyncio.run(self._choose(argument or self._model))
                print_note(self._model if argument else names)
            case "clear":
                self._turns.clear()
            case "params":
                self._params = merge_params(self._params, argument)
                pairs = " ".join(f"{name}={value}" for name, value in self._params.items())
                print_note(pairs or "no parameters are set: the model's configured defaults apply")
            case "retry" | "undo" if not self._turns:
                raise NotFound(f"there is no message to {name}", field="command")
            case "retry":
                self._ask()
            case "undo":
                self._turns.pop()
        return name != "quit"

    def _files(self) -> list[list[str]]:
        """Return the names of the media in each message of the last request."""
        files: list[list[str]] = [] if self._system is None else [[]]
        for turn in self._turns:
            files += [[medium.name for medium in turn.media], []][: 1 + (turn.answer is not None)]
        return files

    async def _choose(self, model: str) -> tuple[str, str]:
        """Return a model, and a line with it and all others. Raises UnknownModel."""
        async with connected(self._login, "chat") as bus:
            others = sorted(await known_models(bus, self._config) - {model})
            await check_model(bus, self._config, model)
        return model, ", others: ".join(filter(None, (model, ", ".join(others))))

    def _ask(self) -> None:
        """Send the last message, print the answer, and then a line with its request id."""
        turn, request_id, began_s = self._turns[-1], client.new_request_id(), time.monotonic()
        turn.answer, rate = None, TokenRate()
        try:
            final, reason = asyncio.run(self._read_answer(turn, request_id, rate))
        finally:
            if turn.answer is not None:
                write_text("\n")
        seconds = f"{time.monotonic() - began_s:.1f} s"
        match final:
            case Finish(usage=usage):
                tokens = f"{usage.prompt_tokens} + {usage.completion_tokens} tokens"
                speed = [] if str(rate) == "-" else [f"{rate} tokens/s"]
                summary = [request_id, tokens, seconds, *speed, reason or "finished"]
            case Failure(error=error):
                place = name_place(error.field or "", self._files())
                where = "" if place == (error.field or "") else f"{place}: "
                self._print_error(error.code, f"{where}{error.message}")
                summary = [request_id, seconds, "failed"]
            case _:
                summary = [request_id, seconds, "interrupted"]
        print_note(" · ".join(summary))

    async def _read_answer(
        self, turn: Turn, request_id: str, rate: TokenRate
    ) -> tuple[LogRecord | None, str]:
        """Print the answer while it comes; return its final record and its finish reason.

        Ctrl-C cancels the request: then there is no final record. Raises what `client.ask` raises.
        """
        reason = ""
        async with connected(self._login, "chat") as bus:
            request = await self._build_request(bus)
            sampling = self._params or None
            try:
                with naming_request(request_id):
                    async for record in client.ask(bus, request, request_id, sampling=sampling):
                        if not isinstance(record, TokenChunk):
                            if isinstance(record, Finish):
                                turn.answer = turn.answer or ""
                            return record, reason
                        rate.add(sum(len(c.token_ids) for c in record.choices), time.monotonic())
                        for choice in record.choices:
                            reason = choice.finish_reason or reason
                            if choice.text:
                                turn.answer = (turn.answer or "") + choice.text
                                write_text(choice.text)
            except asyncio.CancelledError:
                if turn.answer is None:
                    write_text("\n")  # The terminal shows `^C` in this line.
                await client.cancel(bus, request_id)
        return None, reason

    async def _build_request(self, bus: Bus) -> GenerateRequest:
        """Store the media, and return the request with all messages of the conversation.

        The media of a whole conversation would not fit into one message of the broker.
        """
        messages = [] if self._system is None else [Message("system", self._system)]
        for turn in self._turns:
            parts = await media_parts(bus, turn.media, max_inline=0)
            messages.append(Message("user", [*parts, TextPart(turn.text)] if parts else turn.text))
            if turn.answer is not None:
                messages.append(Message("assistant", turn.answer))
        return GenerateRequest(self._model, messages)

    def _print_error(self, code: str, message: str) -> None:
        self._has_failed = True
        print_wrapped(errors, f"{code}: {' '.join(message.split())}", mark="error")


def parse_command(line: str) -> tuple[str, str] | None:
    """Return name and argument of a command; None for a message. Raises InvalidRequest.

    A message that begins with a slash is typed with two slashes.
    """
    if not line.startswith("/") or line.startswith("//"):
        return None
    name, *rest = re.split(r"\s+", line[1:], maxsplit=1)
    name = "quit" if name == "bye" else name
    if name not in HELP:
        raise InvalidRequest(f"there is no command /{name}; /help shows them", field="command")
    return name, "".join(rest)


def complete(word: str, number: int) -> str | None:
    """Return a completion of a word that begins with `@`: the path of a file or a folder."""
    if not word.startswith("@"):
        return None
    paths = sorted(glob(f"{escape(os.path.expanduser(word[1:]))}*"))[number : number + 1]
    return "".join(f"@{path}/" if os.path.isdir(path) else f"@{path}" for path in paths) or None


def merge_params(params: dict[str, Any], text: str) -> dict[str, Any]:
    """Return sampling parameters changed by `name=value name=value`. Raises InvalidRequest.

    A value is JSON, or else a string. An empty value removes the parameter.
    """
    values = dict(params)
    for pair in text.split():
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InvalidRequest(f"{pair}: parameters are written NAME=VALUE", field="params")
        try:
            values[name] = msgspec.json.decode(value) if value else None
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            values[name] = value
    values = {name: value for name, value in values.items() if value is not None}
    try:
        sampling = msgspec.convert(values, SamplingParams)
    except msgspec.ValidationError as error:
        raise invalid_request(error, SamplingParams) from error
    if sampling.n != 1:
        raise InvalidRequest("n: a conversation has one answer to each message", field="n")
    return values
