"""Several turns in one stream."""

import asyncio

import pytest
from engine_rig import LONG, TOKENIZER, WAIT_S, alone, ask

from hf_granikv.engine.streams import Merged, MergedAsync

TEXTS = ["Why?", "Who?", "When is high water?"]


def joined(pairs):
    texts = {}
    for turn, piece in pairs:
        texts[turn.name] = texts.get(turn.name, "") + piece
    return texts


def wanted():
    return {text: TOKENIZER.decode(alone(text, **LONG), True) for text in TEXTS}


def test_pieces_of_all_turns_come_as_they_are_there(engine):
    turns = [ask(engine, text) for text in TEXTS]
    pairs = list(Merged(turns))
    assert joined(pairs) == wanted()
    # nobody is kept for the end
    assert {turn for turn, _ in pairs[: len(pairs) // 2]} == set(turns)


def test_pieces_come_to_an_event_loop_as_well(engine):
    async def main():
        turns = [ask(engine, text) for text in TEXTS]
        return [pair async for pair in MergedAsync(turns)]

    assert joined(asyncio.run(main())) == wanted()


@pytest.mark.parametrize("is_async", [False, True])
def test_an_error_comes_after_what_others_say(engine, is_async):
    def broken(reply):
        raise OSError("the disk is full")

    pairs = []

    async def main(turns):
        async for pair in MergedAsync(turns):
            pairs.append(pair)

    turns = [ask(engine, TEXTS[0], on_end=broken), *(ask(engine, text) for text in TEXTS[1:])]
    with pytest.raises(OSError, match="disk"):
        asyncio.run(main(turns)) if is_async else pairs.extend(Merged(turns))
    if is_async:
        assert joined(pairs) == wanted()
    assert [turn.result(WAIT_S).finish_reason for turn in turns[1:]] == ["length"] * 2


@pytest.mark.parametrize("is_async", [False, True])
def test_who_stops_listening_cancels_the_rest(engine, is_async):
    turns = [ask(engine, text, max_new_tokens=2000) for text in TEXTS]

    async def main():
        stream = MergedAsync(turns)
        async for _ in stream:
            break
        await stream.aclose()

    if is_async:
        asyncio.run(main())
    else:
        stream = Merged(turns)
        next(stream)
        stream.close()
    assert [turn.result(WAIT_S).finish_reason for turn in turns] == ["cancelled"] * 3


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_heard", [0, 1])
def test_who_drops_a_stream_cancels_at_once(engine, is_async, num_heard):
    """As the streams of a runner are: generators around one, which may never have been started."""
    turns = [ask(engine, text, max_new_tokens=2000) for text in TEXTS]

    async def main():
        stream = (pair async for pair in MergedAsync(turns))
        for _ in range(num_heard):
            await anext(stream)
        await stream.aclose()
        assert all(turn.is_cancelling for turn in turns)

    if is_async:
        asyncio.run(main())
    else:
        stream = (pair for pair in Merged(turns))
        for _ in range(num_heard):
            next(stream)
        stream.close()
        assert all(turn.is_cancelling for turn in turns)
    assert [turn.result(WAIT_S).finish_reason for turn in turns] == ["cancelled"] * 3
