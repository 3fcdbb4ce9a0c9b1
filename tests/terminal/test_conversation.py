"""A conversation is whole turns: what the template sees never has two user messages in a row."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.terminal.conversation import Conversation, Turn


def roles(conversation: Conversation) -> list[str]:
    return [message["role"] for message in conversation.messages]


def test_messages_are_the_system_prompt_the_turns_and_the_open_question() -> None:
    conversation = Conversation(system="Be brief.", turns=[Turn("Hi", "Hello!")])
    conversation.ask("Who?")
    assert conversation.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Who?"},
    ]


def test_stopped_answer_is_kept_as_far_as_it_came() -> None:
    conversation = Conversation()
    conversation.ask("Count")
    assert conversation.close("1, 2, 3,")
    assert conversation.turns == [Turn("Count", "1, 2, 3,")]


@pytest.mark.parametrize("answer", ["", " \n"], ids=["nothing", "blanks"])
def test_question_without_an_answer_leaves_no_trace(answer: str) -> None:
    conversation = Conversation(system="Be brief.")
    conversation.ask("Hello?")
    assert not conversation.close(answer)
    assert roles(conversation) == ["system"]


def test_oldest_whole_turns_go_first_and_the_system_prompt_stays() -> None:
    conversation = Conversation(system="Be brief.", turns=[Turn(f"q{n}", f"a{n}") for n in range(5)])
    assert conversation.drop_oldest() == 2
    assert conversation.system == "Be brief."
    assert conversation.turns == [Turn("q2", "a2"), Turn("q3", "a3"), Turn("q4", "a4")]


def test_nothing_is_dropped_where_there_is_no_turn() -> None:
    assert Conversation(system="Be brief.").drop_oldest() == 0


def test_undo_takes_question_and_answer_back() -> None:
    conversation = Conversation(turns=[Turn("q1", "a1"), Turn("q2", "a2")])
    assert conversation.undo() == Turn("q2", "a2")
    assert conversation.turns == [Turn("q1", "a1")]
    assert Conversation().undo() is None


@given(st.lists(st.sampled_from(["answer", "nothing", "undo", "drop", "clear"]), max_size=30), st.sampled_from(["", "system"]))
def test_roles_alternate_whatever_happens(deeds: list[str], system: str) -> None:
    conversation = Conversation(system=system)
    for deed in deeds:
        match deed:
            case "undo":
                conversation.undo()
            case "drop":
                conversation.drop_oldest()
            case "clear":
                conversation.clear()
            case _:
                conversation.ask("question")
                assert roles(conversation)[-1] == "user"
                conversation.close("text" if deed == "answer" else "")
        said = roles(conversation)[1 if system else 0 :]
        assert said == ["user", "assistant"] * (len(said) // 2)
