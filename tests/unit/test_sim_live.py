"""A pod in virtual time is the replay's own scheduler: stopped and observed at any moment, it serves to the same instant."""

from dataclasses import replace

import pytest

from paceline_core.errors import FormatError
from paceline_core.knobs import Knobs
from paceline_core.plan import StepShape
from paceline_core.step_time import StepModel
from paceline_core.uneven import UnevenDevice
from paceline_core.wire import ObserveDocument, StepModelDocument, from_json, to_json
from paceline_sim import simulate
from paceline_sim.generate import Lengths, poisson
from paceline_sim.live import VirtualPod

BASE = StepModel(0.012, 2e-4, 6e-5, 2.5e-7, 1e-9)
DEVICE = UnevenDevice(BASE, batch_tile=8, prefill_tile=64, context_knee=20_000, context_factor=3.0)
SIZES = {"num_blocks": 4000, "max_model_len": 1 << 20}


def traffic(rate=4.0, seconds=120, seed=1):
    return poisson(rate, seconds, Lengths({50: 400, 95: 1500, 100: 4000}), Lengths({50: 120, 95: 400, 100: 800}), seed=seed)


def test_pod_that_is_stopped_often_equals_the_replay():
    trace, pod = traffic(), VirtualPod(Knobs(), DEVICE, **SIZES)
    for request in trace.requests:
        pod.send(request)
    for stop in range(1, 400):
        pod.run(stop * 0.73)
        pod.observe()
    assert not pod.unfinished()
    found = {record.request_id: record for record in pod.take_records()}
    for outcome in simulate(trace, Knobs(), DEVICE, **SIZES).outcomes:
        record = found[f"pod-{outcome.index + 1}"]
        assert record.first_token == pytest.approx(outcome.first_token, abs=1e-9)
        assert record.end == pytest.approx(outcome.last_token, abs=1e-9)
        assert record.output_tokens == outcome.output_len


def test_knobs_change_in_the_middle_and_records_say_under_which_epoch():
    pod = VirtualPod(Knobs(max_num_seqs=1), DEVICE, **SIZES)
    for request in traffic().requests:
        pod.send(request)
    pod.run(30.0)
    waiting = pod.observe().gauges.waiting
    pod.set_knobs(Knobs(max_num_seqs=64))
    pod.run(90.0)
    seen = pod.observe()
    assert waiting > 20 and seen.gauges.waiting == 0
    assert {record.epoch for record in seen.requests} == {0, 1}
    assert from_json(ObserveDocument, to_json(seen)) == seen


def test_uneven_device_rounds_up_to_tiles_and_slows_beyond_the_knee():
    assert DEVICE.predict(StepShape(9, 0, 0, 0)) == DEVICE.predict(StepShape(16, 0, 0, 0))
    assert DEVICE.predict_decode(9, 30_000) == DEVICE.predict(StepShape(9, 0, 30_000, 0))
    flat = DEVICE.predict_decode(8, 20_000) - DEVICE.predict_decode(8, 10_000)
    assert DEVICE.predict_decode(8, 30_000) - DEVICE.predict_decode(8, 20_000) == pytest.approx(3 * flat)


def test_of_computing_and_reading_the_shorter_is_hidden_as_far_as_they_overlap():
    apart, half, roofline = (replace(DEVICE, overlap=share) for share in (0.0, 0.5, 1.0))
    for shape in (StepShape(8, 0, 10_000, 0), StepShape(64, 500, 1000, 10**6), StepShape(1, 0, 60_000, 0)):
        computing = apart.predict(replace(shape, context_tokens=0)) - apart.constant
        reading = apart.predict(StepShape(context_tokens=shape.context_tokens)) - apart.constant
        assert roofline.predict(shape) == pytest.approx(apart.constant + max(computing, reading))
        assert half.predict(shape) == pytest.approx((apart.predict(shape) + roofline.predict(shape)) / 2)
    assert half.predict_decode(9, 30_000) == half.predict(StepShape(9, 0, 30_000, 0))
    times = [roofline.predict_decode(n, 700 * n) for n in range(100)]
    assert times == sorted(times)


def test_uneven_device_of_a_file_names_what_it_cannot_use():
    document = StepModelDocument(0.01, 1e-4, 1e-4, 0.0, 0.0, uneven={"batchTile": 8})
    assert UnevenDevice.from_document(document).batch_tile == 8
    with pytest.raises(FormatError, match="tile, expected"):
        UnevenDevice.from_document(StepModelDocument(0.01, 1e-4, 1e-4, 0.0, 0.0, uneven={"tile": 8}))
    with pytest.raises(FormatError, match=r"contextKnee is 0\.5"):
        UnevenDevice.from_document(StepModelDocument(0.01, 1e-4, 1e-4, 0.0, 0.0, uneven={"contextKnee": 0.5}))
    with pytest.raises(FormatError, match=r"overlap is 1\.5, expected 0 to 1"):
        UnevenDevice.from_document(StepModelDocument(0.01, 1e-4, 1e-4, 0.0, 0.0, uneven={"overlap": 1.5}))
    document = StepModelDocument(0.01, 1e-4, 1e-4, 0.0, 0.0, uneven={"overlap": 0.4})
    assert UnevenDevice.from_document(document).overlap == 0.4
