"""What has been said, in a form that every chat template takes: whole turns, and at most one question that waits for its answer.

    system    "You are helpful."
    turns     user "Hi"  assistant "Hello!"  |  user "What is KV?"  assistant "A cache …"
    question  user "And a slot?"             <- open until `close`

Two user turns never follow each other: a question without an answer leaves no trace.
"""

from dataclasses import dataclass, field
from typing import Final

Message = dict[str, str]

DROPPED_SHARE: Final = 4  # a quarter of the turns goes at once: each drop costs a prefill of everything behind it


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and its answer; a stopped answer is kept as far as it came."""

    question: str
    answer: str


@dataclass(slots=True)
class Conversation:
    """The turns of one chat. Only its own methods change it."""

    system: str = ""
    turns: list[Turn] = field(default_factory=list)
    question: str | None = None

    @property
    def messages(self) -> list[Message]:
        """All messages in the order that the template takes them, the open question last."""
        system = [_message("system", self.system)] if self.system else []
        said = [message for turn in self.turns for message in (_message("user", turn.question), _message("assistant", turn.answer))]
        asked = [] if self.question is None else [_message("user", self.question)]
        return system + said + asked

    def ask(self, question: str) -> None:
        """Open a turn."""
        assert self.question is None, "the last question was not closed"
        self.question = question

    def close(self, answer: str) -> bool:
        """End the open turn with its answer; one without any text takes the question with it. True where the turn was kept."""
        assert self.question is not None, "no question is open"
        question, self.question = self.question, None
        if not answer.strip():
            return False
        self.turns.append(Turn(question, answer))
        return True

    def drop_oldest(self) -> int:
        """Forget the oldest whole turns, at least one where there is one, to make room. Returns how many; the system prompt stays."""
        n_dropped = -(-len(self.turns) // DROPPED_SHARE)
        del self.turns[:n_dropped]
        return n_dropped

    def undo(self) -> Turn | None:
        """Take the last whole turn back."""
        return self.turns.pop() if self.turns else None

    def clear(self) -> None:
        """Forget all turns; the system prompt stays."""
        self.turns.clear()


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
