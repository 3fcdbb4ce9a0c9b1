"""An engine process that a test plays: it notes what it is sent, and says and ends as the test tells it."""

from runner.config import EngineConfig
from runner.serving.child import Child, Owner
from runner.serving.protocol import (
    Accepted,
    Cancel,
    Delta,
    Failed,
    Finished,
    FromEngine,
    Ready,
    Snapshot,
    Stamps,
    StepEvents,
    Submit,
    ToEngine,
)
from tests.fakes import model_info

STAMPS = Stamps(1.0, 1.0, 1.0, 1.0, 1.0)


class FakeChild(Child):
    """One engine."""

    def __init__(self, owner: Owner, pid: int) -> None:
        self._owner = owner
        self._pid = pid
        self._has_ended = False
        self.sent: list[ToEngine] = []
        self.ended_within_s: float | None = None

    @property
    def pid(self) -> int | None:
        """Its number in the row."""
        return self._pid

    @property
    def has_ended(self) -> bool:
        """Whether it died."""
        return self._has_ended

    @property
    def submitted(self) -> list[str]:
        """The ids that it was given, in their order."""
        return [message.request_id for message in self.sent if isinstance(message, Submit)]

    @property
    def cancelled(self) -> list[str]:
        """The ids that it was told to end."""
        return [message.request_id for message in self.sent if isinstance(message, Cancel)]

    def send(self, message: ToEngine) -> None:
        """Note it."""
        self.sent.append(message)

    def kill(self) -> None:
        """Die of SIGKILL."""
        self.die(-9)

    async def flush(self, within_s: float) -> None:
        """It has nothing to write."""

    async def end(self, within_s: float) -> None:
        """Go when asked."""
        self.ended_within_s = within_s
        if not self._has_ended:
            self.die(0)

    def say(self, *messages: FromEngine) -> None:
        """Send to the front."""
        for message in messages:
            self._owner.on_message(message)

    def words(self, line: str) -> None:
        """Write to standard error."""
        self._owner.on_line(line)

    def die(self, returncode: int | None = -6) -> None:
        """End."""
        self._has_ended = True
        self._owner.on_exit(returncode)

    def ready(self, n_slots: int = 2) -> None:
        """The model is loaded."""
        self.say(Ready(model_info(n_slots=n_slots)))

    def accept(self, *request_ids: str) -> None:
        """Prepared."""
        self.say(*(Accepted(request_id, 7) for request_id in request_ids))

    def place(self, *request_ids: str) -> None:
        """In slots."""
        self.say(StepEvents(placed=list(request_ids)))

    def text(self, request_id: str, text: str = "x") -> None:
        """One token."""
        self.say(StepEvents(deltas=[Delta(request_id, text, 1)]))

    def finish(self, request_id: str, reason: str = "stop") -> None:
        """The end."""
        self.say(StepEvents(finished=[Finished(request_id, reason, 7, 0, 1, STAMPS)]))

    def fail(self, request_id: str) -> None:
        """A fault."""
        self.say(StepEvents(failed=[Failed(request_id, "internal_error", "llama_decode returned -1")]))

    def show(self, snapshot: Snapshot) -> None:
        """A heartbeat."""
        self.say(StepEvents(snapshot=snapshot))


class Children:
    """All engines of one client. `faults` are what the next starts raise instead."""

    def __init__(self) -> None:
        self.all: list[FakeChild] = []
        self.faults: list[Exception] = []
        self.n_starts = 0

    @property
    def last(self) -> FakeChild:
        """The present engine."""
        return self.all[-1]

    async def start(self, config: EngineConfig, owner: Owner) -> Child:
        """See `EngineChild.start`."""
        self.n_starts += 1
        if self.faults:
            raise self.faults.pop(0)
        self.all.append(FakeChild(owner, pid=len(self.all) + 1))
        return self.last
