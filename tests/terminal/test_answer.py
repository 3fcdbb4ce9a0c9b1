"""One answer at the terminal: what it does at an engine's end."""

from runner.serving.protocol import Finished
from runner.terminal.answer import Answer, Ending
from tests.terminal.scripted import STAMPS


async def test_an_answer_of_which_nothing_was_written_is_made_anew() -> None:
    written: list[str] = []
    answer = Answer(written.append)
    answer.on_accepted(7)
    answer.on_text("", 1)
    assert answer.restart()
    answer.on_accepted(7)
    answer.on_text("Hello", 1)
    answer.on_finished(Finished("a", "stop", 7, 0, 1, STAMPS))
    assert await answer.wait() is Ending.STOP
    assert written == ["Hello"]


async def test_an_answer_that_was_begun_cannot_be_taken_back() -> None:
    answer = Answer(lambda _: None)
    answer.on_text("Hel", 1)
    assert not answer.restart()


async def test_an_answer_that_its_reader_stopped_is_not_made_anew() -> None:
    answer = Answer(lambda _: None)
    answer.stop()
    assert not answer.restart()
