"""The pieces of several calls as one stream, for doors whose requests may have several prompts."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from protocol.errors import RequestError
from router.call import Piece

Pieces = AsyncGenerator[Piece, None]


async def merged(calls: Sequence[Pieces]) -> AsyncGenerator[tuple[int, Piece], None]:
    """Yields each piece with the index of its call, as they come. The first error of any call ends all of them. Close
    the generator: that closes the calls.
    """
    if len(calls) == 1:
        async with aclosing(calls[0]) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    waiting: asyncio.Queue[tuple[int, Piece | RequestError | None]] = asyncio.Queue(maxsize=1)
    readers = [asyncio.create_task(_read(index, call, waiting)) for index, call in enumerate(calls)]
    num_open = len(calls)
    try:
        while num_open:
            index, news = await waiting.get()
            if news is None:
                num_open -= 1
            elif isinstance(news, RequestError):
                raise news
            else:
                yield index, news
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _read(index: int, call: Pieces, waiting: asyncio.Queue[tuple[int, Piece | RequestError | None]]) -> None:
    try:
        async with aclosing(call) as pieces:
            async for piece in pieces:
                await waiting.put((index, piece))
        await waiting.put((index, None))
    except RequestError as error:
        await waiting.put((index, error))
