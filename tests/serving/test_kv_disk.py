"""Conversations that outlive the process: written behind the loop's back, found by whoever comes back, computed where files are wrong."""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from runner.engine.kv import Load
from runner.engine.sequence import Sequence
from runner.serving.load import load_engine
from runner.serving.protocol import Cancel, Flush
from tests.conftest import engine_config
from tests.serving.test_memory_real import Rig, prompt, quick_idle

__all__ = ["quick_idle"]
MEMORIES = ("window_path", "recurrent_path", "hybrid_path")


class DiskRig(Rig):
    """An engine with a directory; `leave` ends it as a shutdown does."""

    def __init__(self, path: Path, directory: Path, *, n_slots: int = 2, host_mib: int = 64, kv_dir_mib: int = 64) -> None:
        config = msgspec.structs.replace(
            engine_config(path, n_slots=n_slots, n_ctx_slot=512, n_batch=64),
            n_threads=1,
            kv_host_mib=host_mib,
            kv_dir=str(directory),
            kv_dir_mib=kv_dir_mib,
        )
        self.engine = load_engine(config, clock=time.monotonic, progress=lambda fraction: None)
        self.engine.scheduler.costs.learn_move = lambda n_bytes, seconds: None  # type: ignore[method-assign]
        self.engine.scheduler.memory.placer.least_saved_s = 0.0
        self.loop = self.engine.make_loop(self.hear)
        self.history: list[int] = []
        self._n = 0

    def chat(self, tokens: list[int], **options: object) -> Sequence:
        """One turn, to its end."""
        sequence = self.ask(tokens, 4)
        for name, value in options.items():
            setattr(sequence, name, value)
        self.history = [*tokens, *self.answer(sequence)]
        return sequence

    def leave(self) -> None:
        """Write what is worth it."""
        self.loop.inbox.put(Flush())
        self.loop.run()
        self.engine.backend.close()


@pytest.fixture(params=MEMORIES)
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "kv"


def test_after_a_restart_a_conversation_goes_on_without_its_prefill(path: Path, directory: Path) -> None:
    first = DiskRig(path, directory)
    first.chat(prompt(200, 1))
    first.leave()
    second = DiskRig(path, directory)
    again = second.chat([*first.history, *prompt(20, 2)])
    assert again.n_cached == len(first.history) - 1  # the last token of an answer has no cell
    assert again.pending == first_answer(path, again)
    second.leave()


def first_answer(path: Path, sequence: Sequence) -> int | None:
    """The last token that an engine without a past gives."""
    fresh = Rig(path, n_slots=1)
    alone = fresh.ask(sequence.prompt, sequence.max_tokens, reuse=False)
    fresh.run(alone)
    fresh.engine.backend.close()
    return alone.pending


def test_checkpoints_come_back_from_disk_too(path: Path, directory: Path) -> None:
    first = DiskRig(path, directory)
    ask = first.ask(prompt(200, 1), 60)
    first.run(ask)
    first.leave()
    second = DiskRig(path, directory)
    again = second.chat(prompt(200, 1))
    assert again.n_cached == 199
    assert again.pending == first_answer(path, again)
    second.leave()


def test_a_conversation_that_goes_on_has_one_file(window_path: Path, directory: Path) -> None:
    rig = DiskRig(window_path, directory, n_slots=1)
    history = prompt(100, 1)
    for turn in range(4):
        rig.chat(history)
        history = [*rig.history, *prompt(20, 10 + turn)]
        rig.chat(prompt(100, 50 + turn))
    rig.leave()
    DiskRig(window_path, directory, n_slots=1).leave()
    assert len(list(directory.glob("*.kv"))) == 5


def test_idle_cells_are_written_without_a_shutdown(window_path: Path, directory: Path) -> None:
    """A process that is killed loses what is younger than a second or two."""
    rig = DiskRig(window_path, directory)
    rig.chat(prompt(200, 1))
    until = time.monotonic() + 20
    while not any(file.suffix == ".kv" for file in directory.iterdir()) and time.monotonic() < until:
        rig.loop.step()
    rig.engine.backend.close()
    second = DiskRig(window_path, directory)
    assert second.chat([*rig.history, 9, 9]).n_cached == 203
    second.leave()


def test_another_domain_finds_nothing(window_path: Path, directory: Path) -> None:
    first = DiskRig(window_path, directory)
    first.chat(prompt(200, 1), domain="aa")
    first.leave()
    second = DiskRig(window_path, directory)
    assert second.chat([*prompt(200, 1), 9, 9], domain="bb").n_cached == 0
    assert second.chat([*prompt(200, 1), 9, 9], domain="").n_cached == 0
    assert second.chat([*first.history, 9, 9], domain="aa").n_cached == 203
    second.leave()


def test_a_stateless_request_is_not_written(window_path: Path, directory: Path) -> None:
    rig = DiskRig(window_path, directory)
    rig.chat(prompt(200, 1), domain="aa", is_stateless=True)
    rig.leave()
    assert list(directory.glob("*.kv")) == []


@pytest.mark.parametrize("damage", ["flipped", "short", "gone", "other settings"])
def test_what_is_damaged_or_foreign_is_computed_again(window_path: Path, directory: Path, damage: str) -> None:
    first = DiskRig(window_path, directory)
    first.chat(prompt(200, 1))
    first.leave()
    (file,) = directory.glob("*.kv")
    n_slots = 3 if damage == "other settings" else 2
    second = DiskRig(window_path, directory, n_slots=n_slots)
    data = bytearray(file.read_bytes())
    match damage:
        case "flipped":
            data[random.Random(1).randrange(len(data) // 2, len(data))] ^= 1
            file.write_bytes(data)
        case "short":
            file.write_bytes(data[: len(data) // 2])
        case "gone":
            file.unlink()
    again = second.chat([*prompt(200, 1), 9, 9])
    assert again.n_cached == 0
    assert again.pending == first_answer(window_path, again)
    assert not any(isinstance(op, Load) for op in second.engine.scheduler.memory.orders)
    second.leave()


def test_one_that_leaves_while_its_file_is_read_is_ended(window_path: Path, directory: Path) -> None:
    first = DiskRig(window_path, directory)
    first.chat(prompt(200, 1))
    first.leave()
    second = DiskRig(window_path, directory)
    asked = second.ask([*prompt(200, 1), 9, 9], 4)
    second.loop.inbox.put(Cancel(asked.request_id))
    second.run(asked)
    assert asked.n_generated == 0
    after = second.chat([*first.history, 9, 9])
    assert after.n_cached == 203
    second.leave()


def test_without_room_in_host_memory_a_file_is_of_no_use(window_path: Path, directory: Path) -> None:
    first = DiskRig(window_path, directory)
    first.chat(prompt(200, 1))
    first.leave()
    second = DiskRig(window_path, directory, host_mib=0)
    assert second.chat([*prompt(200, 1), 9, 9]).n_cached == 0
    second.leave()
