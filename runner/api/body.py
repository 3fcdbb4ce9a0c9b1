"""Reading a request body within its limits; the HTTP library keeps no copy of it."""

import asyncio

from aiohttp import web

from runner.errors import BodyTooLarge, InvalidRequest

BODY_TIMEOUT_S: float = 60.0


async def read_body(request: web.Request, max_bytes: int) -> bytearray:
    """Read the whole body, chunked ones too. Raises BodyTooLarge, and InvalidRequest where it does not arrive."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for data in request.content.iter_any():
                body += data
                if len(body) > max_bytes:
                    raise BodyTooLarge(f"The request body has more than {max_bytes} bytes, which is the limit")
    except TimeoutError:
        raise InvalidRequest(f"The request body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    except web.RequestPayloadError:  # its text has several lines, and repeats what came
        raise InvalidRequest("The request body cannot be read: it is not framed or encoded as its headers say") from None
    return body
