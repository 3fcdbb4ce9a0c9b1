"""The work of `run`: one request, its answer on standard output as it comes."""

import sys
from typing import Final

from runner.cli.service import check_chat_template
from runner.cli.signals import StopSignals
from runner.config import AnswerOptions
from runner.serving.client import EngineClient
from runner.serving.protocol import ChatPrompt, ModelInfo, Submit, TextPrompt
from runner.terminal.answer import Answer, sampling_params
from runner.terminal.pump import OutputPump

REQUEST_ID: Final = "terminal:1"


class OneAnswer:
    """Sends one prompt and writes the answer."""

    def __init__(self, prompt: str, options: AnswerOptions, *, is_raw: bool) -> None:
        self._prompt = prompt
        self._options = options
        self._is_raw = is_raw
        self._output: OutputPump | None = None

    async def run(self, engine: EngineClient, signals: StopSignals) -> int:
        """Raises RunnerError, and BrokenPipeError where nobody reads the answer."""
        info = await engine.wait_ready()
        if not self._is_raw:
            check_chat_template(info)
        self._output = output = OutputPump(sys.stdout)
        answer = Answer(output.write)
        output.on_broken = answer.stop
        engine.submit(self._request(info), answer)
        try:
            await answer.wait()
        finally:
            if answer.text and not answer.text.endswith("\n"):
                output.write("\n")
        await output.flush()
        return 0

    async def drain(self) -> None:
        """There is one request, and it ends with the program."""

    async def close(self) -> None:
        """Let the output's thread end."""
        if self._output is not None:
            await self._output.close()

    def _request(self, info: ModelInfo) -> Submit:
        return Submit(
            request_id=REQUEST_ID,
            prompt=TextPrompt(self._prompt) if self._is_raw else ChatPrompt(self._messages()),
            sampling=sampling_params(info.sampling),
            max_tokens=self._options.max_tokens,
        )

    def _messages(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self._options.system}] if self._options.system else []
        return [*system, {"role": "user", "content": self._prompt}]
