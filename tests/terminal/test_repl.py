"""The chat against a scripted engine: what is shown, what is remembered, what is asked of the engine."""

import asyncio
import io
from dataclasses import dataclass

import pytest

from runner.config import AnswerOptions
from runner.errors import EngineStopped
from runner.terminal.conversation import Turn
from runner.terminal.render import Screen, Surface
from runner.terminal.repl import Chat
from tests.fakes import model_info
from tests.terminal.scripted import ScriptedEngine, ScriptedPerson


@dataclass
class Stage:
    """A chat, the engine behind it, and what came out."""

    engine: ScriptedEngine
    chat: Chat
    out: io.StringIO
    err: io.StringIO


def stage(*messages: str, n_ctx_slot: int = 512, is_terminal: bool = False, has_colour: bool = False, system: str = "") -> Stage:
    engine = ScriptedEngine(model_info(n_ctx_slot=n_ctx_slot))
    out, err = io.StringIO(), io.StringIO()
    screen = Screen(Surface(is_terminal, has_colour), out, err)
    chat = Chat(engine, engine.model, screen, ScriptedPerson(messages), AnswerOptions(system=system))
    return Stage(engine, chat, out, err)


async def until_text(shown: io.StringIO, text: str) -> None:
    while text not in shown.getvalue():  # noqa: ASYNC110 - a StringIO has no event
        await asyncio.sleep(0.001)


async def test_output_of_a_pipe_holds_answers_and_nothing_else() -> None:
    s = stage("Hi", "/slots", "Bye")
    s.engine.enqueue("Hel", "lo!")
    s.engine.enqueue("Good", "bye.\n")
    await s.chat.run()
    assert s.out.getvalue() == "Hello!\nGoodbye.\n"
    assert s.err.getvalue() == "Nothing has been computed yet.\n"


async def test_terminal_shows_the_speed_after_an_answer() -> None:
    s = stage("Hi", is_terminal=True, has_colour=True)
    s.engine.enqueue("a", "b", "c")
    await s.chat.run()
    assert s.out.getvalue() == "abc\n\x1b[2m3 tokens, 2.0 tokens/s, first after 0.50 s\x1b[0m\n"
    assert s.err.getvalue() == ""


async def test_terminal_without_colour_gets_no_control_sequence_even_from_the_model() -> None:
    s = stage("Hi", is_terminal=True)
    s.engine.enqueue("\x1b]0;title\x07red\x9b31m", "\ttab\r\n")
    await s.chat.run()
    assert s.out.getvalue() == "]0;titlered31m\ttab\n2 tokens, 1.0 tokens/s, first after 0.50 s\n"


async def test_each_turn_is_sent_with_all_before_it() -> None:
    s = stage("one", "two", system="Be brief.")
    s.engine.enqueue("1")
    s.engine.enqueue("2")
    await s.chat.run()
    assert s.engine.conversations == [
        [("system", "Be brief."), ("user", "one")],
        [("system", "Be brief."), ("user", "one"), ("assistant", "1"), ("user", "two")],
    ]


async def test_ctrl_c_keeps_the_partial_answer_and_the_session() -> None:
    s = stage(is_terminal=True)
    s.engine.enqueue("1, 2,", is_endless=True)
    reply = asyncio.ensure_future(s.chat.take("Count"))
    await until_text(s.out, "1, 2,")
    assert s.chat.interrupt()
    await reply
    await s.chat.take("Go on")
    assert s.out.getvalue() == "1, 2,\n(stopped)\nok\n1 token, first after 0.50 s\n"
    assert s.engine.cancelled[0] == s.engine.submitted[0].request_id
    assert s.engine.conversations[1] == [("user", "Count"), ("assistant", "1, 2,"), ("user", "Go on")]


async def test_ctrl_c_before_the_first_token_takes_the_question_back() -> None:
    s = stage(is_terminal=True)
    s.engine.enqueue(is_endless=True)
    reply = asyncio.ensure_future(s.chat.take("Hello?"))
    await asyncio.sleep(0.01)
    assert s.chat.interrupt()
    await reply
    await s.chat.take("Again")
    assert s.engine.conversations[1] == [("user", "Again")]


async def test_what_comes_after_the_stop_is_not_shown() -> None:
    s = stage(is_terminal=True)
    s.engine.enqueue("a", is_endless=True)
    reply = asyncio.ensure_future(s.chat.take("Hi"))
    await until_text(s.out, "a")
    s.chat.interrupt()
    s.engine.enqueue("late", is_endless=True)
    await reply
    assert "late" not in s.out.getvalue()


async def test_ctrl_c_in_a_pipe_means_the_program() -> None:
    s = stage()
    assert not s.chat.interrupt()


async def test_failed_answer_is_one_line_and_the_session_goes_on() -> None:
    s = stage("one", "two")
    s.engine.enqueue("par", error=EngineStopped("The engine ended while it answered"))
    s.engine.enqueue("fine")
    await s.chat.run()
    assert s.out.getvalue() == "par\nfine\n"
    assert s.err.getvalue() == "Error: The engine ended while it answered\n"
    assert s.engine.conversations[1] == [("user", "two")]


async def test_long_chat_forgets_its_oldest_turns_tells_so_once_and_keeps_the_system_prompt() -> None:
    s = stage(*[f"question {n} with five words" for n in range(60)], n_ctx_slot=64, system="You are a careful assistant.")
    for n in range(200):
        s.engine.enqueue(f"answer number {n}")
    await s.chat.run()
    said = [line for line in s.err.getvalue().splitlines() if line]
    assert said == ["The conversation has outgrown a slot of 64 tokens: the oldest turns are forgotten from now on."]
    assert len(s.out.getvalue().splitlines()) == 60
    for conversation in s.engine.conversations:
        assert conversation[0] == ("system", "You are a careful assistant.")
        assert [role for role, _ in conversation[1:]] == ["user", "assistant"] * (len(conversation) // 2 - 1) + ["user"]


async def test_old_turns_go_before_the_answer_has_no_room() -> None:
    s = stage("w " * 20, "w " * 20, "w " * 20, n_ctx_slot=64)
    await s.chat.run()
    assert [sum(len(text.split()) for _, text in sent) for sent in s.engine.conversations] == [20, 41, 62, 41]
    assert s.engine.cancelled[2] == s.engine.submitted[2].request_id


async def test_single_message_that_is_too_long_is_one_sentence() -> None:
    s = stage("one", "w " * 600, "two")
    await s.chat.run()
    assert s.out.getvalue() == "ok\nok\n"
    assert s.err.getvalue().splitlines()[-1] == "Error: The prompt has 600 tokens; a slot holds 512"


async def test_answer_that_is_cut_short_says_so() -> None:
    s = stage("Hi")
    s.engine.enqueue("a", reason="length")
    await s.chat.run()
    assert (s.out.getvalue(), s.err.getvalue()) == ("a\n", "(cut short: the slot is full)\n")
    assert s.chat.conversation.turns == [Turn("Hi", "a")]


async def test_empty_answer_is_told_and_not_remembered() -> None:
    s = stage("Hi")
    s.engine.enqueue()
    await s.chat.run()
    assert (s.out.getvalue(), s.err.getvalue()) == ("", "(no answer)\n")
    assert s.chat.conversation.turns == []


async def test_exit_ends_the_chat_before_the_input_does() -> None:
    s = stage("/exit", "never")
    await s.chat.run()
    assert s.engine.submitted == []


async def test_unknown_command_is_one_line() -> None:
    s = stage("/nosuch")
    await s.chat.run()
    assert s.err.getvalue() == "Error: There is no command /nosuch; /help shows those there are\n"


class BrokenPipe(io.StringIO):
    """A pipe whose reader has gone."""

    def write(self, text: str) -> int:
        """Always fails."""
        raise BrokenPipeError(32, "Broken pipe")


async def test_reader_that_has_gone_stops_the_answer_and_the_chat() -> None:
    engine = ScriptedEngine()
    screen = Screen(Surface(is_terminal=False, has_colour=False), BrokenPipe(), io.StringIO())
    chat = Chat(engine, engine.model, screen, ScriptedPerson(["Hi", "never"]), AnswerOptions())
    engine.enqueue("x", is_endless=True)
    with pytest.raises(BrokenPipeError):
        await chat.run()
    assert len(engine.submitted) == 1
