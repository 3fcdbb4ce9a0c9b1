"""How the chat looks: answers, remarks and complaints, on a terminal or into a pipe.

On a terminal everything goes to standard output, in order. Elsewhere standard output carries answers and nothing else, without
colour or control sequences; the rest goes to standard error.
"""

import re
import sys
from dataclasses import dataclass
from typing import Final, TextIO

import click

from runner.config import EngineConfig
from runner.errors import RunnerError
from runner.serving.protocol import Finished, ModelInfo, SlotState, Snapshot
from runner.terminal.pump import OutputPump

CONTROL_CHARACTERS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Surface:
    """What the streams can show. `is_terminal`: both ends of the conversation are a terminal with a cursor."""

    is_terminal: bool
    has_colour: bool


class Screen:
    """Where the chat writes. Nothing here blocks; `flush` waits."""

    def __init__(self, surface: Surface, out: TextIO | None, err: TextIO | None) -> None:
        self.surface = surface
        self.answers = OutputPump(out)
        self._remarks = self.answers if surface.is_terminal else OutputPump(err)

    def write(self, piece: str) -> None:
        """A piece of an answer. A model cannot move the cursor or set the title: control characters stay away from a terminal."""
        self.answers.write(printable(piece) if self.surface.is_terminal else piece)

    def end_answer(self, text: str) -> None:
        """Close an answer of which `text` was shown: the next thing starts on a line of its own."""
        if text and not text.endswith("\n"):
            self.answers.write("\n")

    def say(self, text: str) -> None:
        """Lines that a person asked for."""
        self._remarks.write(printable(text) + "\n")

    def note(self, text: str) -> None:
        """A remark beside the conversation."""
        self._remarks.write(self._styled(text, dim=True) + "\n")

    def complain(self, error: RunnerError) -> None:
        """One answer failed; the session goes on."""
        self._remarks.write(self._styled(f"Error: {error.message}", dim=False) + "\n")

    def speed(self, finished: Finished) -> None:
        """Tokens and tokens/s of an answer, on a terminal only."""
        if self.surface.is_terminal:
            self.note(speed_line(finished))

    async def flush(self) -> None:
        """Wait until everything is on its stream. Raises BrokenPipeError or ConfigError where the reader of the answers has gone."""
        if self._remarks is not self.answers and self._remarks.error is None:
            await self._remarks.flush()
        await self.answers.flush()

    async def close(self) -> None:
        """Let the writing threads end."""
        await self.answers.close()
        if self._remarks is not self.answers:
            await self._remarks.close()

    def _styled(self, text: str, *, dim: bool) -> str:
        text = printable(text)
        if not self.surface.has_colour:
            return text
        return click.style(text, dim=True) if dim else click.style(text, fg="red")


def printable(text: str) -> str:
    """Text without control characters; line ends and tabs stay."""
    return CONTROL_CHARACTERS.sub("", text)


def speed_line(finished: Finished) -> str:
    """`42 tokens, 51.2 tokens/s, first after 0.12 s` from a request's stamps."""
    stamps, n = finished.stamps, finished.n_completion
    decode_s = stamps.finished_at - stamps.first_token_at
    parts = [counted(n, "token")]
    if n > 1 and decode_s > 0:
        parts.append(f"{(n - 1) / decode_s:.1f} tokens/s")
    if stamps.first_token_at > 0:
        parts.append(f"first after {stamps.first_token_at - stamps.arrived_at:.2f} s")
    return ", ".join(parts)


def counted(n: int, noun: str) -> str:
    """`1 token`, `1,234 tokens`."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def slots_table(snapshot: Snapshot | None) -> str:
    """What each slot holds, a line each."""
    if snapshot is None:
        return "Nothing has been computed yet."
    head = "slot  state     tokens  request"
    return "\n".join([head, *map(_slot_line, snapshot.slots), f"waiting: {snapshot.n_waiting}"])


def _slot_line(slot: SlotState) -> str:
    return f"{slot.slot_id:>4}  {slot.state:<8}  {slot.n_cells:>6,}  {slot.request_id or '-'}"


def chosen_lines(info: ModelInfo) -> list[str]:
    """What was loaded and what was chosen for this machine, for the start of a session or a log."""
    threads = counted(info.n_threads, "thread")
    if info.n_threads_batch != info.n_threads:
        threads += f" ({info.n_threads_batch} for prompts)"
    lines = [
        f"{info.name}: {info.description}, loaded in {info.load_s:.2f} s",
        f"{counted(info.n_slots, 'slot')} x {info.n_ctx_slot:,} tokens, {kv_text(info.kv_bytes, info, info.kv_pool)}, {threads}",
        f"{_device(info)}, CPU library {info.cpu_library}",
    ]
    return lines + info.notes


def kv_text(n_bytes: int, types: ModelInfo | EngineConfig, n_pool: int = 0) -> str:
    """What the cells take, of which types they are, and how many tokens the pool holds that all slots share (0: there is none)."""
    windows = ", windows kept in full" if types.swa_full else ""
    pool = f", one pool of {n_pool:,} tokens" if n_pool else ""
    return f"KV cache {n_bytes / MIB:,.0f} MiB (K {types.cache_type_k}, V {types.cache_type_v}{windows}{pool})"


def _device(info: ModelInfo) -> str:
    devices = [device for device in info.devices if device.kind != "cpu"]
    if info.n_gpu_layers == 0 or not devices:
        return "CPU only"
    return f"{info.n_gpu_layers} layers on {', '.join(device.name for device in devices)}"


def enable_ansi() -> None:
    """Let an old Windows console understand colours; elsewhere there is nothing to do."""
    if sys.platform == "win32":
        import colorama  # exists on Windows only, as click's dependency

        colorama.just_fix_windows_console()
