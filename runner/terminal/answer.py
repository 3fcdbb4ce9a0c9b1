"""One answer as it comes from the engine: the sink of a request whose reader is a person or a pipe."""

import asyncio
from collections.abc import Callable
from enum import StrEnum

import msgspec

from runner.config import SamplingDefaults
from runner.engine.sampling import SamplingParams
from runner.errors import ContextLengthExceeded, RequestCancelled, RunnerError
from runner.serving.protocol import Finished


class Ending(StrEnum):
    """How an answer ended. STOPPED: by its reader, so the engine's own end of it is not waited for."""

    STOP = "stop"
    LENGTH = "length"
    STOPPED = "stopped"


class Answer:
    """Collects one answer's text and passes each piece on. `write` must neither block nor raise."""

    def __init__(self, write: Callable[[str], None], *, max_prompt: int | None = None) -> None:
        """A prompt of more than `max_prompt` tokens fails as if the slot were that small."""
        self.text = ""
        self.finished: Finished | None = None
        self._write = write
        self._max_prompt = max_prompt
        self._ending: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()

    async def wait(self) -> Ending:
        """Wait for the end. Raises the RunnerError that ended it."""
        return await self._ending

    @property
    def is_over(self) -> bool:
        """Whether what the engine still sends is dropped."""
        return self._ending.done()

    def stop(self) -> None:
        """End it here, with the text so far."""
        if not self.is_over:
            self._ending.set_result(Ending.STOPPED)

    def on_accepted(self, n_prompt: int, n_dropped: int = 0) -> None:
        """Sink: the prompt fits its slot."""
        if self._max_prompt is not None and n_prompt > self._max_prompt:
            self.on_failed(
                ContextLengthExceeded(f"The prompt has {n_prompt:,} tokens; more than {self._max_prompt:,} leave no room to answer")
            )

    def on_placed(self) -> None:
        """Sink: it is computed."""

    def on_text(self, text: str, n_tokens: int) -> None:
        """Sink: text became complete."""
        if text and not self.is_over:
            self.text += text
            self._write(text)

    def on_finished(self, finished: Finished) -> None:
        """Sink: the end."""
        if finished.reason == "cancelled":
            self.on_failed(RequestCancelled("The answer was cancelled"))
        elif not self.is_over:
            self.finished = finished
            self._ending.set_result(Ending(finished.reason))

    def on_failed(self, error: RunnerError) -> None:
        """Sink: the end by a refusal or a fault."""
        if not self.is_over:
            self._ending.set_exception(error)

    def restart(self) -> bool:
        """Sink: the engine has ended. What was written cannot be taken back."""
        return not self.text and not self.is_over


def sampling_params(defaults: SamplingDefaults) -> SamplingParams:
    """What the model's manifest and the options say of sampling, as a request's parameters."""
    return SamplingParams(**msgspec.structs.asdict(defaults))
