"""What a person can type in the chat instead of a message: one handler a command."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from runner.errors import ConfigError, InvalidRequest
from runner.serving.protocol import Snapshot
from runner.terminal.conversation import Conversation
from runner.terminal.render import slots_table

SHAPE: Final = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)


class Session(Protocol):
    """What a command may see and change."""

    conversation: Conversation
    is_over: bool

    @property
    def snapshot(self) -> Snapshot | None:
        """The engine as of its last step."""

    def say(self, text: str) -> None:
        """Show lines to the person."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command: how it is typed, what it does, and its handler. The handler raises RunnerError for what the person can mend."""

    usage: str
    help: str
    run: Callable[[Session, str], None]


def is_command(text: str) -> bool:
    """Whether a message is meant for the chat itself: a slash and a word of small letters (a path has more slashes)."""
    return SHAPE.fullmatch(text) is not None


def run_command(session: Session, text: str) -> None:
    """Do what `/name argument` says. Raises InvalidRequest for a name that does not exist."""
    match = SHAPE.fullmatch(text)
    assert match is not None, "is_command comes first"
    name, argument = match.group(1), (match.group(2) or "").strip()
    if name not in COMMANDS:
        raise InvalidRequest(f"There is no command /{name}; /help shows those there are")
    COMMANDS[name].run(session, argument)


def show_help(session: Session, _: str) -> None:
    """`/help`."""
    width = max(len(command.usage) for command in COMMANDS.values())
    lines = [f"{command.usage:<{width}}  {command.help}" for command in COMMANDS.values()]
    session.say("\n".join([*lines, "", *KEYS_HELP]))


def clear(session: Session, _: str) -> None:
    """`/clear`."""
    session.conversation.clear()
    session.say("The conversation starts anew.")


def undo(session: Session, _: str) -> None:
    """`/undo`."""
    turn = session.conversation.undo()
    session.say("There is nothing to take back." if turn is None else f"Taken back: {_first_line(turn.question)}")


def system(session: Session, argument: str) -> None:
    """`/system`: shows it; `/system text` sets it; `/system -` removes it."""
    if argument:
        session.conversation.system = "" if argument == "-" else argument
    session.say(f"System prompt: {session.conversation.system or '(none)'}")


def save(session: Session, argument: str) -> None:
    """`/save [file]`: Markdown, or the messages as JSON where the name ends with .json."""
    path = Path(argument).expanduser() if argument else _free_path()
    content = _as_json(session.conversation) if path.suffix == ".json" else _as_markdown(session.conversation)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(content)
    except FileExistsError as error:
        raise ConfigError(f"{path} exists already; give another name") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    session.say(f"Saved to {path}")


def slots(session: Session, _: str) -> None:
    """`/slots`."""
    session.say(slots_table(session.snapshot))


def leave(session: Session, _: str) -> None:
    """`/exit`."""
    session.is_over = True


COMMANDS: Final = {
    "help": Command("/help", "show this", show_help),
    "clear": Command("/clear", "forget the conversation; the system prompt stays", clear),
    "undo": Command("/undo", "take the last question and its answer back", undo),
    "system": Command("/system [text]", "show the system prompt, or set it; - removes it", system),
    "save": Command("/save [file]", "save the conversation as Markdown, or as JSON where the name ends with .json", save),
    "slots": Command("/slots", "show what each slot holds", slots),
    "exit": Command("/exit", "leave", leave),
}

KEYS_HELP: Final = (
    'Enter sends. Alt-Enter starts a new line, and so does Enter after """ until the next """. A paste is one message.',
    "Ctrl-C stops an answer; at the prompt it clears the line, and a second one leaves. Ctrl-D leaves.",
)


def _first_line(text: str) -> str:
    first, more, _ = text.partition("\n")
    return f"{first} …" if more else first


def _free_path() -> Path:
    return next(path for n in range(1, 10_000) if not (path := Path(f"chat-{n}.md")).exists())


def _as_json(conversation: Conversation) -> str:
    return json.dumps({"messages": conversation.messages}, ensure_ascii=False, indent=2) + "\n"


def _as_markdown(conversation: Conversation) -> str:
    return "\n".join(f"## {message['role']}\n\n{message['content']}\n" for message in conversation.messages)
