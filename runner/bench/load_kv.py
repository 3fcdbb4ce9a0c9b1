"""Load that tells what becomes of cells that were computed once: shared prompts, chats that go on, clients that come back."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from runner.bench.load import WORDS, Load, Message, Stream, words


@dataclass(slots=True)
class Conversation:
    """A chat as its client keeps it: all messages, and the stream of each turn."""

    messages: list[Message]
    turns: list[Stream] = field(default_factory=list)

    @classmethod
    def over(cls, n_words: int, seed: int) -> "Conversation":
        """One that begins with a context of `n_words`."""
        return cls([{"role": "system", "content": f"Context: {words(n_words, seed)}"}])

    @property
    def n_cells(self) -> int:
        """Cells of it that are there after the last turn: all tokens but the last, which no step has read."""
        return self.turns[-1].n_prompt + self.turns[-1].n_tokens - 1


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """Of a later turn's prompt: tokens that were computed, and those that are in neither prompt nor answer of the turn before."""

    n_computed: int
    n_new: int


def later_turns(conversation: Conversation) -> list[TurnTokens]:
    """Of all turns but the first."""
    pairs = zip(conversation.turns, conversation.turns[1:], strict=False)
    return [TurnTokens(turn.n_prompt - turn.n_cached, turn.n_prompt - before.n_prompt - before.n_tokens) for before, turn in pairs]


class KvLoad(Load):
    """The same client, for prompts that repeat what came before."""

    async def shared_prefix(self, n_clients: int, n_words: int, n_tokens: int, seed: int) -> list[float]:
        """Questions of `n_clients` at once under one system prompt of `n_words`, new with each seed: the TTFT of each."""
        system = f"You know this list: {words(n_words, seed)}"
        questions = [f"Question {i}: tell me about {_word(i)}." for i in range(n_clients)]
        async with self._session() as session:
            asked = (self.stream(session, _under(system, question), n_tokens) for question in questions)
            streams = await asyncio.gather(*asked)
        return [stream.ttft_s for stream in streams]

    async def talk(self, conversation: Conversation, n_turns: int, n_tokens: int, *, replies: str | None = None) -> list[Stream]:
        """So many turns more: their streams.

        The client keeps what was answered. With `replies` it keeps that and the turn's number instead, as where it edits the answers.
        """
        async with self._session() as session:
            for number in range(len(conversation.turns), len(conversation.turns) + n_turns):
                conversation.messages.append({"role": "user", "content": f"Turn {number}: say something about {_word(number)}."})
                turn = await self.stream(session, conversation.messages, n_tokens)
                conversation.turns.append(turn)
                answer = turn.text if replies is None else f"{replies} {number}."
                conversation.messages.append({"role": "assistant", "content": answer})
        return conversation.turns[-n_turns:]

    async def displace(self, n_slots: int, n_words: int, seed: int) -> None:
        """Texts without a chat template, one a slot, so that no slot begins as a chat does."""
        async with self._session() as session:
            prompts = (f"{seed} {i} {words(n_words, seed * 1000 + 500 + i)}" for i in range(n_slots))
            await asyncio.gather(*(self._complete(session, prompt) for prompt in prompts))

    async def _complete(self, session: aiohttp.ClientSession, prompt: str) -> None:
        async with session.post(f"{self._url}/v1/completions", json={"model": "default", "prompt": prompt, "max_tokens": 4}) as answer:
            answer.raise_for_status()
            await answer.read()

    async def others(self, n_others: int, n_words: int, n_tokens: int, seed: int, *, at_once: int = 1) -> list[Conversation]:
        """Clients with one turn each over contexts of their own, `at_once` of them at a time."""
        conversations = [Conversation.over(n_words, seed * 1000 + i) for i in range(n_others)]
        for first in range(0, n_others, at_once):
            await asyncio.gather(*(self.talk(one, 1, n_tokens) for one in conversations[first : first + at_once]))
        return conversations

    async def share_kept(self, conversations: Sequence[Conversation]) -> float:
        """Every conversation goes on for a turn: of how many the cells were still there (0 to 1)."""
        before = [one.n_cells for one in conversations]
        turns = [(await self.talk(one, 1, 1))[0] for one in conversations]
        return sum(turn.n_cached >= 0.9 * n_cells for turn, n_cells in zip(turns, before, strict=True)) / len(turns)

    async def fork(self, n_words: int, n_tokens: int, seed: int) -> tuple[float, float]:
        """Two questions under one system prompt of `n_words`, the second while the first is answered: the TTFT of the second and the first.

        Raises RuntimeError where the first answer, of `n_tokens`, was over before the second one.
        """
        system, begun = f"You know this list: {words(n_words, seed)}", asyncio.Event()
        async with self._session() as session:
            task = asyncio.create_task(self.stream(session, _under(system, f"Tell me about {_word(seed)}."), n_tokens, begun=begun))
            # Where it fails, awaiting it says why.
            task.add_done_callback(lambda _: begun.set())
            await begun.wait()
            second = await self.stream(session, _under(system, f"Say something about {_word(seed + 1)}."), 4)
            is_over, first = task.done(), await task
        if is_over:
            raise RuntimeError(f"The first answer, of {n_tokens} tokens, was over before the second one")
        return second.ttft_s, first.ttft_s


def _under(system: str, question: str) -> list[Message]:
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def _word(number: int) -> str:
    return WORDS[number % len(WORDS)]
