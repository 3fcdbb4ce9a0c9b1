"""A chat on the terminal it is started in, with an engine that says how long a message was. Run by `test_pty.py`."""

import asyncio
import hashlib
import signal
import sys
from pathlib import Path

from runner.config import AnswerOptions
from runner.serving.client import Sink
from runner.serving.protocol import ChatPrompt, Submit
from runner.terminal.keyboard import quiet_keyboard
from runner.terminal.reading import PromptReader
from runner.terminal.render import Screen, Surface
from runner.terminal.repl import Chat
from tests.fakes import model_info
from tests.terminal.scripted import ScriptedEngine


def told(message: str) -> str:
    """What the engine answers: lines, characters, and a hash of the message."""
    return f"[{len(message.splitlines())} lines, {len(message)} characters, {hashlib.sha256(message.encode()).hexdigest()[:8]}]"


class TellingEngine(ScriptedEngine):
    """Answers `count` without end, and anything else with its measure."""

    def submit(self, submit: Submit, sink: Sink) -> None:
        """Answer the last message."""
        assert isinstance(submit.prompt, ChatPrompt)
        message = submit.prompt.messages[-1]["content"]
        if message == "count":
            self.enqueue("1, 2, 3,", is_endless=True)
        else:
            self.enqueue(told(message))
        super().submit(submit, sink)


async def main(history: Path | None) -> None:
    """Chat until the person leaves."""
    engine = TellingEngine(model_info(n_ctx_slot=100_000))
    screen = Screen(Surface(is_terminal=True, has_colour=False), sys.stdout, sys.stderr)
    reader = PromptReader(history)
    chat = Chat(engine, engine.model, screen, reader, AnswerOptions())
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, chat.interrupt)
    with quiet_keyboard(0, is_prompting=lambda: reader.is_reading):
        await chat.run()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
    print("left")
