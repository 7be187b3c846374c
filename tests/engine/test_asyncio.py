"""The asyncio face of the engine."""

import asyncio

import pytest
import torch
from engine_rig import LONG, PREFIX_IDS, TOKENIZER, alone, prompt, shared_model

from hf_granikv import AsymmetricPagedCache
from hf_granikv.engine.engine import Engine

TEXTS = ["Why?", "Who?", "When is high water?"]


@pytest.fixture
def ask():
    cache = AsymmetricPagedCache(shared_model().config)
    prefix = cache.prefill(shared_model(), torch.tensor([PREFIX_IDS]))
    with Engine(shared_model(), cache, TOKENIZER) as engine:
        yield lambda text, **options: engine.submit(
            prompt(text), prefix=prefix, **{**LONG, **options}
        )


def test_turns_are_awaited_together(ask):
    async def main():
        return await asyncio.gather(*(ask(text) for text in TEXTS))

    replies = asyncio.run(main())
    assert [reply.token_ids for reply in replies] == [alone(text, **LONG) for text in TEXTS]


def test_pieces_come_while_other_tasks_run(ask):
    ticks = []

    async def tick():
        while True:
            ticks.append(1)
            await asyncio.sleep(0)

    async def pieces(text):
        return [piece async for piece in ask(text, max_new_tokens=40)]

    async def main():
        ticking = asyncio.create_task(tick())
        found = await asyncio.gather(*map(pieces, TEXTS))
        ticking.cancel()
        return found

    for text, found in zip(TEXTS, asyncio.run(main()), strict=True):
        ids = alone(text, max_new_tokens=40, eos_token_id=None)
        assert "".join(found) == TOKENIZER.decode(ids, skip_special_tokens=True)
        assert len(found) > 5
    assert len(ticks) > 20


def test_a_turn_can_be_read_by_several_tasks_and_afterwards(ask):
    async def text_of(turn):
        return "".join([piece async for piece in turn])

    async def main():
        turn = ask("Why?")
        reply, first, second = await asyncio.gather(turn, text_of(turn), text_of(turn))
        return reply.text, first, second, await text_of(turn), (await turn).text, "".join(turn)

    assert len(set(asyncio.run(main()))) == 1


@pytest.mark.parametrize("face", ["await", "pieces"])
def test_a_cancelled_task_cancels_its_turn(ask, face):
    async def read(turn):
        if face == "await":
            await turn
        async for _ in turn:
            pass

    async def main():
        turn, other = ask("Why?", max_new_tokens=2000), ask("Who?")
        task = asyncio.create_task(read(turn))
        # a task that has not begun is cancelled without its turn ever knowing
        await asyncio.sleep(0)
        while not turn.token_ids:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return turn, await other

    turn, other = asyncio.run(main())
    assert turn.result(60).finish_reason == "cancelled"
    assert other.token_ids == alone("Who?", **LONG)


def test_errors_come_out_of_the_await(ask):
    def broken(reply):
        raise OSError("the disk is full")

    async def main():
        turn = ask("Why?", on_end=broken)
        with pytest.raises(OSError, match="disk"):
            await turn
        with pytest.raises(OSError, match="disk"):
            async for _ in turn:
                pass

    asyncio.run(main())


def test_a_loop_that_ended_does_not_disturb_the_engine(ask):
    async def main():
        turn = ask("Why?", max_new_tokens=100)
        async for _ in turn:
            return turn

    turn = asyncio.run(main())
    assert turn.result(60).token_ids[:12] == alone("Why?", **LONG)
