"""One handler a command."""

import json
from pathlib import Path

import pytest

from runner.errors import ConfigError, InvalidRequest
from runner.serving.protocol import Counters, SlotState, Snapshot
from runner.terminal.commands import COMMANDS, is_command, run_command
from runner.terminal.conversation import Conversation, Turn


class FakeSession:
    """What a command sees of a chat."""

    def __init__(self) -> None:
        self.conversation = Conversation(system="Be brief.", turns=[Turn("Hi", "Hello!")])
        self.is_over = False
        self.snapshot: Snapshot | None = None
        self.said: list[str] = []

    def say(self, text: str) -> None:
        """Remember it."""
        self.said.append(text)


@pytest.fixture
def session() -> FakeSession:
    return FakeSession()


@pytest.mark.parametrize("text", ["/help", "/system Be kind.", "/save  a.md", "/nosuch"])
def test_slash_and_small_letters_are_a_command(text: str) -> None:
    assert is_command(text)


@pytest.mark.parametrize("text", ["/etc/passwd is a file", "/", "// comment", "/Help", "help", " /help", "/1"])
def test_anything_else_is_a_message(text: str) -> None:
    assert not is_command(text)


def test_help_names_every_command(session: FakeSession) -> None:
    run_command(session, "/help")
    shown = (
        "/help           show this\n"
        "/clear          forget the conversation; the system prompt stays\n"
        "/undo           take the last question and its answer back\n"
        "/system [text]  show the system prompt, or set it; - removes it\n"
        "/save [file]    save the conversation as Markdown, or as JSON where the name ends with .json\n"
        "/slots          show what each slot holds\n"
        "/exit           leave\n"
        "\n"
        'Enter sends. Alt-Enter starts a new line, and so does Enter after """ until the next """. A paste is one message.\n'
        "Ctrl-C stops an answer; at the prompt it clears the line, and a second one leaves. Ctrl-D leaves."
    )
    assert session.said == [shown]
    assert all(command.usage.split()[0] == f"/{name}" for name, command in COMMANDS.items())


def test_unknown_command_is_told_and_changes_nothing(session: FakeSession) -> None:
    with pytest.raises(InvalidRequest, match=r"^There is no command /nosuch; /help shows those there are$"):
        run_command(session, "/nosuch")
    assert session.conversation.turns == [Turn("Hi", "Hello!")]


def test_clear_keeps_the_system_prompt(session: FakeSession) -> None:
    run_command(session, "/clear")
    assert session.conversation.messages == [{"role": "system", "content": "Be brief."}]


def test_undo_says_what_it_took_back(session: FakeSession) -> None:
    session.conversation.turns.append(Turn("two\nlines", "ok"))
    run_command(session, "/undo")
    run_command(session, "/undo")
    run_command(session, "/undo")
    assert session.said == ["Taken back: two …", "Taken back: Hi", "There is nothing to take back."]


def test_system_is_shown_set_and_removed(session: FakeSession) -> None:
    for text in ("/system", "/system Be\nkind.", "/system -"):
        run_command(session, text)
    assert session.said == ["System prompt: Be brief.", "System prompt: Be\nkind.", "System prompt: (none)"]
    assert session.conversation.system == ""


def test_save_writes_markdown(session: FakeSession, tmp_path: Path) -> None:
    run_command(session, f"/save {tmp_path / 'a chat.md'}")
    saved = (tmp_path / "a chat.md").read_text(encoding="utf-8")
    assert saved == "## system\n\nBe brief.\n\n## user\n\nHi\n\n## assistant\n\nHello!\n"


def test_save_writes_json_where_the_name_says_so(session: FakeSession, tmp_path: Path) -> None:
    run_command(session, f"/save {tmp_path / 'chat.json'}")
    assert json.loads((tmp_path / "chat.json").read_text(encoding="utf-8")) == {"messages": session.conversation.messages}


def test_save_without_a_name_takes_a_free_one(session: FakeSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_command(session, "/save")
    run_command(session, "/save")
    assert session.said == ["Saved to chat-1.md", "Saved to chat-2.md"]


def test_save_overwrites_nothing(session: FakeSession, tmp_path: Path) -> None:
    path = tmp_path / "mine.md"
    path.write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"mine\.md exists already; give another name$"):
        run_command(session, f"/save {path}")
    assert path.read_text(encoding="utf-8") == "mine"


def test_save_that_cannot_be_written_is_one_sentence(session: FakeSession, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"chat\.md cannot be written: No such file or directory$"):
        run_command(session, f"/save {tmp_path / 'nowhere' / 'chat.md'}")


def test_slots_shows_what_each_slot_holds(session: FakeSession) -> None:
    run_command(session, "/slots")
    session.snapshot = Snapshot(
        [SlotState(0, "decode", "terminal:1", 1234, 30, 0, 4), SlotState(1, "idle", "", 0, 0, 0, 0)], 2, Counters(), 0.0
    )
    run_command(session, "/slots")
    assert session.said == [
        "Nothing has been computed yet.",
        "slot  state     tokens  request\n   0  decode     1,234  terminal:1\n   1  idle           0  -\nwaiting: 2",
    ]


def test_exit_leaves(session: FakeSession) -> None:
    run_command(session, "/exit")
    assert session.is_over
