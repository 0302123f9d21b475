"""The forecast of a newcomer's wait against what the twin, which simulates every step, says of the same load."""

from __future__ import annotations

import pytest

from paceline_core.forecast import Traffic, predict_wait
from paceline_core.knobs import Knobs, Strategy
from paceline_core.step_time import StepModel
from paceline_sim import Trace, TraceRequest, simulate

MODEL = StepModel(0.01, decode_tokens=0.0005, prefill_tokens=0.0001, context_tokens=1e-6)


def wait(running: int, ahead: int, *, blocks: int = 10_000, output: float = 100.0, **knobs: object) -> float:
    settings = Knobs(**{"max_num_seqs": 8, **knobs})  # type: ignore[arg-type]
    return predict_wait(MODEL, settings, Traffic(200, output, output), num_blocks=blocks, running=running, ahead=ahead)


def test_a_free_slot_means_no_wait() -> None:
    assert wait(7, 0) == 0
    assert wait(0, 7) == 0
    assert wait(8, 0) > 0


# from some cycles on: requests that all came at once also end at once, so a short queue moves by whole batches
@pytest.mark.parametrize("queue", [24, 60, 120])
@pytest.mark.parametrize("blocks", [10_000, 80])  # enough for all slots, and for four
def test_it_agrees_with_the_twin(queue: int, blocks: int) -> None:
    requests = tuple(TraceRequest(0.0, 200, 100) for _ in range(8 + queue + 1))
    result = simulate(Trace(requests), Knobs(max_num_seqs=8), MODEL, num_blocks=blocks, max_model_len=1000)
    last = result.outcomes[-1]
    assert last.started is not None
    slots = 8 if blocks > 200 else blocks // 19
    assert wait(slots, 8 + queue - slots, blocks=blocks) == pytest.approx(last.started, rel=0.3)


def test_a_longer_queue_waits_longer_under_every_strategy() -> None:
    for strategy in Strategy:
        waits = [wait(8, ahead, strategy=strategy) for ahead in (8, 16, 32)]
        assert 0 < waits[0] < waits[1] < waits[2]


def test_longer_answers_mean_longer_waits() -> None:
    assert wait(8, 8, output=400) > 3 * wait(8, 8, output=100)
