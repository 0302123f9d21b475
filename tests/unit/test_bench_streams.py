"""bench.api_stream and bench.step_share: which step a character is of, and how late it came; whose time is whose."""

from __future__ import annotations

import asyncio
import json

import pytest
from bench.api_stream import STEADY_STEP, Result, added, reached
from bench.api_stream_client import Shown, Stream, request_of
from bench.step_share import Stopwatch


def event(text: str, *, chat: bool = False) -> bytes:
    choice = {"delta": {"content": text}} if chat else {"text": text}
    body = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(body), body)


async def stream_of(*reads: bytes) -> Stream:
    """A stream that got each of `reads` a second after the one before, the first at 100."""
    stream = Stream(b"")
    for number, data in enumerate(reads):
        stream.data_received(data)
        stream._times[-1] = 100.0 + number
    return stream


class TestShown:
    @pytest.mark.parametrize("chat", [False, True])
    async def test_a_character_of_several_bytes_is_its_last_tokens(self, chat: bool) -> None:
        stream = await stream_of(event("a", chat=chat), event("é速", chat=chat))
        assert list(stream.shown()) == [Shown(100.0, 0), Shown(101.0, 2), Shown(101.0, 5)]

    async def test_an_event_is_there_with_its_last_byte(self) -> None:
        whole = event("ab")
        stream = await stream_of(whole[:20], whole[20:])
        assert [shown.at for shown in stream.shown()] == [101.0, 101.0]

    async def test_what_was_cut_off_at_the_end_is_no_token(self) -> None:
        stream = await stream_of(event("a"), event("\N{REPLACEMENT CHARACTER}"))
        assert [shown.token for shown in stream.shown()] == [0]

    async def test_the_end_ends_it_and_a_broken_connection_is_an_error(self) -> None:
        stream = await stream_of(event("a"), b"e\r\ndata: [DONE]\n\n\r\n")
        stream.connection_lost(None)
        await asyncio.wait_for(stream.ended, 1)
        broken = await stream_of(event("a"))
        broken.connection_lost(None)
        with pytest.raises(ConnectionError):
            await broken.ended
        assert stream.chunks == 1


class TestAdded:
    async def test_each_character_is_compared_with_its_own_step(self) -> None:
        stream = await stream_of(event("ab"), event("c"))
        ends = [90.0, 98.0, 99.5, 100.75]  # the first step was another's
        assert added(stream, 97.9, ends, 0.0) == [2.0, 0.5, 0.25]

    async def test_the_nearest_step_is_the_first_on_either_side(self) -> None:
        stream = await stream_of(event("a"))
        assert added(stream, 98.1, [90.0, 98.0, 99.5], 0.0) == [2.0]

    async def test_what_came_while_streams_began_is_left_out(self) -> None:
        stream = await stream_of(event("ab"), event("c"))
        assert added(stream, 97.9, [90.0, 98.0, 99.5, 100.75], 99.0) == [0.5, 0.25]


@pytest.mark.parametrize(("rate", "late", "good"), [(2000, 0.005, True), (1999, 0.001, False), (9000, 0.0051, False)])
def test_goals(rate: float, late: float, good: bool) -> None:
    result = Result("chat", 64, STEADY_STEP, 9, 9.0, rate, 9, 0.1, 1e-5, (0.0, late, 1.0))
    assert reached(result) is good


def test_a_request_says_its_length() -> None:
    head, _, body = request_of("/v1/completions", {"prompt": "é"}, "r1").partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert b"X-Request-Id: r1" in head
    assert json.loads(body) == {"prompt": "é"}


def test_a_stopwatch_counts_calls_that_fail_too() -> None:
    class Part:
        def works(self, value: int) -> int:
            return value + 1

        def fails(self) -> None:
            raise KeyError

    part = Part()
    watch = Stopwatch(part, "works", "fails")
    assert part.works(1) == 2
    assert watch.take() > 0
    with pytest.raises(KeyError):
        part.fails()
    assert watch.take() > 0
    assert watch.take() == 0
