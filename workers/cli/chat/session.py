"""A conversation at the terminal: reads lines, runs commands, prints answers as they come."""

import io
import mimetypes
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import get_args

from rich.markup import escape

from shared import client
from shared.errors import InvalidMedia, InvalidRequest, NotFound, PagemillError, Unavailable
from shared.protocol import multimodal
from shared.protocol.records import Failure
from workers.cli.ask import EXIT_INTERRUPTED, data_url
from workers.cli.chat import state_file
from workers.cli.chat.answer import Answer
from workers.cli.chat.connection import Connection
from workers.cli.chat.conversation import Conversation, describe
from workers.cli.chat.lines import (
    HELP,
    LONG_MESSAGES,
    Command,
    extend,
    is_open,
    parse,
    parse_params,
)
from workers.cli.terminal import errors, harmless, print_line, print_note, write_text

PROMPT = "> "
NEXT_LINE = "... "


class Session:
    def __init__(self, conversation: Conversation, connection: Connection, state: Path) -> None:
        self.conversation = conversation
        self._connection = connection
        self._state = state
        self._state_fails = False
        self._answer = Answer()
        self._is_terminal = sys.stdin.isatty()
        self._has_failed = False
        if isinstance(sys.stdin, io.TextIOWrapper):
            # Bytes that are no text would not fit into a request.
            sys.stdin.reconfigure(errors="replace")

    def run(self, *, resume: bool) -> int:
        """Run until the end of the input, and return the exit code.

        From a pipe, the exit code is 1 if something has failed.
        """
        if self._is_terminal:
            _enable_line_editing()
            print_note(f"{self.conversation.model}: /help shows the commands, Ctrl-D leaves")
        going_on = True
        if resume:
            going_on = self._guarded(self._resume)
        while going_on:
            try:
                text = self._read_message()
            except KeyboardInterrupt:
                if not self._is_terminal:
                    return EXIT_INTERRUPTED
                print_note("\nCtrl-D or /quit leaves")
                continue
            if text is None:
                break
            going_on = self._guarded(partial(self._handle, text))
        return int(self._has_failed and not self._is_terminal)

    def _read_message(self) -> str | None:
        """Return the next message or command; None at the end of the input."""
        text = self._read_line(PROMPT)
        while text is not None and is_open(text):
            line = self._read_line(NEXT_LINE)
            if line is None:
                break
            text = extend(text, line)
        return text

    def _read_line(self, prompt: str) -> str | None:
        """Return the next line; None at the end of the input."""
        if not self._is_terminal:
            line = sys.stdin.readline()
            return line.removesuffix("\n") if line else None
        try:
            return input(prompt)
        except EOFError:
            print_line("")
            return None

    def _guarded(self, action: Callable[[], bool]) -> bool:
        """Run an action, print its error, and return whether the conversation goes on."""
        try:
            return action()
        except KeyboardInterrupt:
            print_note("\ninterrupted")
        except PagemillError as error:
            self._print_error(error.code, error.message)
        except BrokenPipeError:
            raise  # The reader of the answers is gone.
        except (OSError, RuntimeError, ValueError) as error:
            self._print_error(type(error).__name__, str(error))
        return True

    def _handle(self, text: str) -> bool:
        parsed = parse(text, _is_image_file)
        if isinstance(parsed, Command):
            return self._run_command(parsed)
        if parsed is not None:
            images = [_read_image(path) for path in parsed.images]
            self._leave_unfinished()
            self.conversation.say(parsed.text, images)
            self._ask()
        return True

    def _run_command(self, command: Command) -> bool:
        match command.name:
            case "quit":
                return False
            case "resume":
                return self._resume()
            case "retry":
                self._retry()
            case "save" | "load":
                self._use_file(command)
            case "system" | "model" | "params" | "undo":
                self._change(command)
            case multimodal.IMAGE:
                self._attach(command.argument)
            case _:
                self._show(command)
        return True

    def _show(self, command: Command) -> None:
        match command.name:
            case "help":
                lines = [*(f"/{name:<9} {text}" for name, text in HELP.items()), LONG_MESSAGES]
            case "history":
                lines = [describe(entry) for entry in self.conversation.entries]
            case _:
                lines = self.conversation.request_ids
        for line in lines:
            print_line(line)

    def _change(self, command: Command) -> None:
        conversation, argument = self.conversation, command.argument
        match command.name:
            case "system":
                conversation.system = argument or None
            case "model":
                conversation.model = argument or conversation.model
                print_note(conversation.model)
            case "params":
                conversation.set_params(parse_params(argument))
                said = [f"{name}={value}" for name, value in conversation.params.items()]
                print_note(
                    " ".join(said) or "no parameters are set: those configured for the model apply"
                )
            case "undo":
                self._leave_unfinished()
                if not conversation.undo():
                    raise NotFound("there is no message to remove", field="command")

    def _attach(self, path: str) -> None:
        images = self.conversation.images
        images.append(_read_image(path))
        print_note(f"images of the next message: {len(images)}")

    def _use_file(self, command: Command) -> None:
        path = Path(command.argument).expanduser()
        try:
            if command.name == "save":
                path.write_bytes(self.conversation.to_json())
            else:
                self.conversation.load_json(path.read_bytes())
        except OSError as error:
            raise InvalidRequest(f"{path}: {error.strerror}", field="command") from error
        print_note(f"{len(self.conversation.messages())} messages")

    # -- answers --------------------------------------------------------------------------------

    def _retry(self) -> None:
        self._leave_unfinished()
        if not self.conversation.rewind():
            raise NotFound("there is no message to ask again", field="command")
        self._ask()

    def _ask(self) -> None:
        self._answer = Answer()
        self.conversation.begin(client.new_request_id())
        self._read_answer(is_new=True)

    def _resume(self) -> bool:
        if self.conversation.unfinished is None:
            print_note("no answer is unfinished")
        else:
            self._read_answer(is_new=False)
        return True

    def _leave_unfinished(self) -> None:
        """End an unfinished answer, and keep the text that was read."""
        if self.conversation.unfinished is not None:
            self.conversation.end(self._answer.text, is_interrupted=True)

    def _read_answer(self, *, is_new: bool) -> None:
        request_id = self.conversation.unfinished
        assert request_id is not None
        # From now on another process can continue the answer.
        self._write_state()
        began_s = time.monotonic()
        try:
            self._connection.read_answer(self.conversation, self._answer, write_text, is_new=is_new)
        except KeyboardInterrupt:
            try:
                # Nothing more is printed after this, so that the history has all that was.
                self._connection.cancel(request_id)
            finally:
                self.conversation.end(self._answer.text, is_interrupted=True)
        except Unavailable:
            print_note(f"\nthe answer of {request_id} is unfinished: /resume continues it")
            raise
        except PagemillError:
            self.conversation.end(self._answer.text, is_interrupted=True)
            raise
        else:
            final = self._answer.final
            is_failed = isinstance(final, Failure)
            self.conversation.end(self._answer.text, is_interrupted=is_failed)
            if isinstance(final, Failure):
                write_text("\n" if self._answer.text else "")
                self._print_error(final.error.code, final.error.message)
        finally:
            self._write_state()
        if not isinstance(self._answer.final, Failure):
            write_text("\n")
        print_note(self._answer.summary(request_id, time.monotonic() - began_s))

    def _write_state(self) -> None:
        try:
            state_file.write(self._state, self.conversation)
        except OSError as error:
            if not self._state_fails:
                print_note(
                    f"{self._state}: {error.strerror}: --resume will not find this conversation"
                )
            self._state_fails = True

    def _print_error(self, code: str, message: str) -> None:
        self._has_failed = True
        said = escape(harmless(" ".join(message.split())))
        errors.print(f"[red]error[/] {code}: {said}", highlight=False, soft_wrap=True)


def _enable_line_editing() -> None:
    """Give `input` a history and editing keys, which it has as soon as the module is imported."""
    import readline  # noqa: F401


def _is_image_file(path: str) -> bool:
    """Return whether a message attaches this file, and note that it does not attach videos."""
    kind = (mimetypes.guess_type(path)[0] or "").partition("/")[0]
    if kind not in get_args(multimodal.Modality) or not Path(path).expanduser().is_file():
        return False
    if kind != multimodal.IMAGE:
        print_note(f"{path} is not attached: `pagemill ask --{kind}` asks about such a file")
    return kind == multimodal.IMAGE


def _read_image(argument: str) -> str:
    """Return the URL of an image. Raises InvalidMedia for a file that cannot be read."""
    if argument.startswith(("http://", "https://", "data:", "media:")):
        return argument
    path = Path(argument.strip("\"'")).expanduser()
    if not path.is_file():
        raise InvalidMedia(f"{path} is not a file", field=multimodal.IMAGE)
    return data_url(path)
