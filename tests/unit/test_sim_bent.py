"""A knee in context and tiles are found in measured steps, and steps that were never seen are told right by them."""

import random
from dataclasses import replace

import pytest

from paceline_core.plan import StepShape
from paceline_core.step_time import StepModel, StepTimeFitter
from paceline_core.uneven import UnevenDevice
from paceline_sim.bent import BentModel, bend
from paceline_sim.calibrated import calibrate

BASE = StepModel(0.012, 2.5e-4, 6e-5, 5.6e-7, 6.8e-10)
LINEAR = UnevenDevice(BASE, 1, 1, 1e12, 1.0)
# steps that queues under few slots, or under far too many, never bring: sequences with short contexts, with small chunks
NEVER_SEEN = (StepShape(24, 0, 6000, 0), StepShape(24, 128, 6000, 256_000), StepShape(16, 256, 4000, 400_000))


def knee(at, factor=8.0):
    return UnevenDevice(BASE, 4, 64, at, factor)


def steps_of(device, *, seed=0, count=600, noise=0.03, stalls=0.0, batches=(1, 2, 4, 8, 64)):
    """Steps of few sequences, and of many with long contexts; some take ten times as long, as when a core was away."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        decodes = rng.choice(batches)
        context = decodes * rng.randrange(100, 900)
        prefill = rng.choice((0, 0, 0, 60, 200, 600, 2000, 8000))
        shape = StepShape(decodes, prefill, context, prefill * rng.randrange(100, 3000))
        stall = 10.0 if rng.random() < stalls else 1.0
        found.append((shape, stall * device.predict(shape) * rng.uniform(1 - noise, 1 + noise)))
    return found


def published(steps):
    fitter = StepTimeFitter()
    for shape, seconds in steps:
        fitter.observe(shape, seconds)
    return fitter.model()


def worst(model, device, shapes=NEVER_SEEN):
    return max(abs(model.predict(shape) / device.predict(shape) - 1.0) for shape in shapes)


@pytest.mark.parametrize("at", [4000.0, 8000.0, 16_000.0])
@pytest.mark.parametrize("stalls", [0.0, 0.02])
def test_steps_before_a_knee_are_told_right_though_none_was_seen(at, stalls):
    device = knee(at)
    steps = steps_of(device, stalls=stalls)
    straight = published(steps)
    bent = bend(straight, steps)
    assert isinstance(bent, BentModel) and bent.knee == pytest.approx(at, rel=0.25)
    before = [shape for shape in NEVER_SEEN if shape.context_tokens <= at]
    assert worst(bent, device, before) < 0.08 and worst(bent, device, before) < worst(straight, device, before) / 2
    assert worst(bent, device, [StepShape(64, 0, 40_000, 0)]) < 0.10


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("seed", range(5))
def test_a_device_without_a_knee_keeps_its_model(seed, noise):
    steps = steps_of(LINEAR, seed=seed, noise=noise)
    model = published(steps)
    assert bend(model, steps) is model


@pytest.mark.parametrize("tiles", [(8, 64), (16, 128), (4, 32), (1, 256)])
@pytest.mark.parametrize("at", [1e12, 8000.0])
def test_tiles_are_found_in_steps_of_all_sizes(tiles, at):
    """A decode costs as much as on a device whose batches are worth turning a knob for: a tenth of a step and more."""
    base = replace(BASE, decode_tokens=1e-3, prefill_tokens=1.2e-4)
    device = UnevenDevice(base, *tiles, at, 8.0)
    steps = steps_of(device, batches=range(1, 27), noise=0.01)
    bent = bend(published(steps), steps)
    assert isinstance(bent, BentModel) and (bent.batch_tile, bent.prefill_tile) == tiles
    assert worst(bent, device, [StepShape(n, chunk, 6000, 0) for n in (24, 25, 33) for chunk in (0, 90, 130)]) < 0.05


def test_steps_of_one_sequence_tell_nothing_of_batches():
    steps = steps_of(UnevenDevice(BASE, 16, 64, 1e12, 1.0), batches=(1,))
    assert getattr(bend(published(steps), steps), "batch_tile", 1) == 1


def test_few_steps_and_steps_without_context_bend_nothing():
    model = published(steps := steps_of(knee(8000.0)))
    assert bend(model, steps[:60]) is model and bend(model, []) is model
    assert bend(model, [(StepShape(0, 100, 0, 1000), 0.02)] * 100) is model


def test_what_the_model_has_seen_and_said_of_itself_stays():
    model = published(steps := steps_of(knee(8000.0)))
    bent = bend(model, steps)
    assert (bent.seen, bent.steps, bent.residual) == (model.seen, model.steps, model.residual)
    assert bent.outside(StepShape(decode_tokens=1000)) == ("decode_tokens",)


def test_more_work_never_takes_less_time_and_decodes_are_told_alike():
    bent = bend(published(steps := steps_of(knee(8000.0))), steps)
    bent = replace(bent, batch_tile=16, prefill_tile=64)
    for shapes in ([StepShape(n, n, 500 * n, n) for n in range(200)], [StepShape(0, n, 0, 0) for n in range(200)]):
        assert (more := [bent.predict(shape) for shape in shapes]) == sorted(more)
    times = [bent.predict(StepShape(8, 0, context, 0)) for context in range(0, 60_000, 500)]
    assert times == sorted(times)
    assert [bent.predict_decode(8, context) for context in range(0, 60_000, 500)] == times


def test_a_model_that_is_twice_the_truth_is_put_right_by_the_steps_themselves():
    device = knee(8000.0)
    steps = steps_of(device)
    honest = published(steps)
    doubled = StepModel(*(2 * getattr(honest, name) for name in ("constant", "decode_tokens", "prefill_tokens")))
    assert worst(calibrate(doubled, steps), device) < 0.15
