"""Asks a real engine and collects what its sink hears."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Any

from runner.engine.sampling import SamplingParams
from runner.errors import RunnerError
from runner.serving.client import EngineClient
from runner.serving.protocol import ChatPrompt, Finished, Prompt, Submit, TextPrompt

_ids = itertools.count()

GREEDY = SamplingParams(temperature=0.0)


class Heard:
    """A sink that keeps everything; `await heard.end()` gives Finished or raises the error."""

    def __init__(self) -> None:
        self.n_prompt: int | None = None
        self.n_dropped = 0
        self.text = ""
        self.stamps: list[float] = []
        self.n_tokens = 0
        self._done: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()
        self.first = asyncio.Event()

    def on_accepted(self, n_prompt: int, n_dropped: int = 0) -> None:
        """Keep the length."""
        self.n_prompt, self.n_dropped = n_prompt, n_dropped

    def on_placed(self) -> None:
        """Nothing to keep."""

    def on_text(self, text: str, n_tokens: int) -> None:
        """Keep text and time."""
        self.text += text
        self.n_tokens += n_tokens
        self.stamps.append(time.monotonic())
        self.first.set()

    def on_finished(self, finished: Finished) -> None:
        """The end."""
        self._done.set_result(finished)

    def on_failed(self, error: RunnerError) -> None:
        """The end."""
        self._done.set_exception(error)
        self._done.exception()
        self.first.set()

    def restart(self) -> bool:
        """Text counts as sent."""
        if self.text:
            return False
        self.n_tokens = 0
        self.stamps.clear()
        return True

    async def end(self, timeout_s: float = 120.0) -> Finished:
        """Wait for the end."""
        return await asyncio.wait_for(asyncio.shield(self._done), timeout_s)

    @property
    def has_ended(self) -> bool:
        """Whether the end was heard."""
        return self._done.done()


def ask(
    client: EngineClient, prompt: str | Sequence[dict[str, Any]] | Prompt, max_tokens: int | None = 24, **options: Any
) -> tuple[str, Heard]:
    """Submit; returns the request id and the sink. A str is a plain prompt, a list of dicts a chat."""
    request_id = options.pop("request_id", f"t{next(_ids)}")
    sampling = options.pop("sampling", GREEDY)
    if isinstance(prompt, str):
        prompt = TextPrompt(prompt)
    elif isinstance(prompt, list):
        prompt = ChatPrompt(prompt)
    heard = Heard()
    client.submit(Submit(request_id=request_id, prompt=prompt, sampling=sampling, max_tokens=max_tokens, **options), heard)  # type: ignore[arg-type]
    return request_id, heard


async def answer(client: EngineClient, prompt: Any, max_tokens: int | None = 24, **options: Any) -> tuple[str, Finished]:
    """Text and end of one request."""
    _, heard = ask(client, prompt, max_tokens, **options)
    finished = await heard.end()
    return heard.text, finished


def user(text: str) -> list[dict[str, Any]]:
    """A chat of one message."""
    return [{"role": "user", "content": text}]
