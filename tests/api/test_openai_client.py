"""The official client reads every answer without complaint."""

from collections.abc import AsyncIterator

import openai
import pytest

from runner.api.server import Server
from runner.errors import ContextLengthExceeded, EngineStopped
from tests.fakes import FakeEngineClient, Reply


@pytest.fixture
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.urls[0]}/v1", api_key="none", max_retries=0, timeout=5) as client:
        yield client


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "Hi"}])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Hello, world", "stop")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.total_tokens, answer.usage.prompt_tokens_details.cached_tokens) == (10, 3)


async def test_chat_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="any", messages=[{"role": "user", "content": "Hi"}], stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello, world"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3


async def test_text_completion_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="any", prompt=["a", "b"])
    assert [choice.text for choice in answer.choices] == ["Hello, world"] * 2
    stream = await client.completions.create(model="any", prompt="a", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello, world"


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["fake-model"]
    assert (await client.models.retrieve("fake-model")).owned_by == "slotfile"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def test_wrong_parameter_is_a_bad_request_error(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "Hi"}], temperature=-1)
    assert caught.value.param == "temperature"


async def test_too_long_prompt_is_a_bad_request_error_even_of_a_stream(client: openai.AsyncOpenAI, engine: FakeEngineClient) -> None:
    engine.enqueue(Reply(refuse=ContextLengthExceeded("The prompt has 513 tokens; a slot holds 512", param="messages")))
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "Hi"}], stream=True)
    assert caught.value.code == "context_length_exceeded"


async def test_error_in_a_stream_is_raised_by_the_client(client: openai.AsyncOpenAI, engine: FakeEngineClient) -> None:
    engine.enqueue(Reply(texts=["a"], fail=EngineStopped("The engine ended")))
    stream = await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "Hi"}], stream=True)
    with pytest.raises(openai.APIError, match="The engine ended"):
        async for _ in stream:
            pass


async def test_client_that_closes_its_stream_cancels(client: openai.AsyncOpenAI, engine: FakeEngineClient) -> None:
    engine.enqueue(Reply(texts=["x"] * 100_000))
    stream = await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "Hi"}], stream=True)
    async for _ in stream:
        break
    await stream.close()
    for _ in range(200):
        if engine.cancelled:
            break
        await client.models.list()
    assert engine.cancelled
