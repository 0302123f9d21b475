"""The step-time fit: known coefficients come back, its errors and limits are stated."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_core.errors import FormatError
from paceline_core.plan import StepShape
from paceline_core.step_time import FEATURES, StepModel, StepTimeFitter
from paceline_core.wire import StepModelDocument, from_json, to_json

TRUTH = StepModel(constant=4e-3, decode_tokens=2e-5, prefill_tokens=8e-5, context_tokens=3e-8, prefill_attention=2e-9)


def shapes(count: int, seed: int = 0) -> list[StepShape]:
    """Steps as an engine makes them: decode only, prefill only, mixed."""
    rng = random.Random(seed)
    made = []
    for index in range(count):
        shape = StepShape()
        if index % 3 != 1:
            for _ in range(rng.randint(1, 64)):
                shape = shape.with_decode(rng.randint(10, 2000), 1)
        if index % 3:
            shape = shape.with_prefill(rng.randint(0, 3000), rng.randint(1, 2048))
        made.append(shape)
    return made


def fitted(model: StepModel, noise: float = 0.0, count: int = 900) -> StepModel:
    rng = random.Random(1)
    fitter = StepTimeFitter()
    for shape in shapes(count):
        fitter.observe(shape, model.predict(shape) * (1 + rng.uniform(-noise, noise)))
    return fitter.model()


def test_known_coefficients_come_back():
    model = fitted(TRUTH)
    for name in ("constant", *FEATURES):
        assert getattr(model, name) == pytest.approx(getattr(TRUTH, name), rel=1e-3), name
    assert model.residual < 1e-6
    assert model.steps == 900


def test_noise_shows_in_the_residual_and_not_in_the_prediction():
    model = fitted(TRUTH, noise=0.2)
    assert 0.12 < model.residual < 0.25  # uniform ±20 %: the 90th percentile of the error is near 18 %
    for shape in shapes(50, seed=9):
        assert model.predict(shape) == pytest.approx(TRUTH.predict(shape), rel=0.05)


def test_no_coefficient_is_negative_even_where_the_data_ask_for_one():
    fitter = StepTimeFitter()
    for shape in shapes(300):
        fitter.observe(shape, max(1e-3, 0.05 - 2e-4 * shape.decode_tokens))
    model = fitter.model()
    assert model.decode_tokens == 0.0
    assert all(getattr(model, name) >= 0 for name in ("constant", *FEATURES))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 4000), st.floats(1e-4, 10)), min_size=1, max_size=30))
def test_any_steps_give_a_finite_model_no_worse_than_the_mean(steps):
    fitter = StepTimeFitter()
    sample = []
    for decode, prefill, seconds in steps:
        shape = StepShape(decode, prefill, decode * 100, prefill * prefill)
        fitter.observe(shape, seconds)
        if decode + prefill:
            sample.append((shape, seconds))
    if not sample:
        with pytest.raises(ValueError, match="no step"):
            fitter.model()
        return
    model = fitter.model()
    error = sum((model.predict(shape) / seconds - 1) ** 2 for shape, seconds in sample)
    # the best constant alone, in closed form, is one of the models that were possible
    constant = sum(1 / s for _, s in sample) / sum(1 / s**2 for _, s in sample)
    assert error <= sum((constant / s - 1) ** 2 for _, s in sample) * (1 + 1e-6) + 1e-9


def test_steps_all_alike_still_predict_themselves():
    fitter = StepTimeFitter()
    for _ in range(500):
        fitter.observe(StepShape(8, 0, 800, 0), 0.02)
    assert fitter.model().predict(StepShape(8, 0, 800, 0)) == pytest.approx(0.02)


def test_rare_regimes_stay_in_the_sample():
    fitter = StepTimeFitter()
    rare = StepShape().with_prefill(0, 4096)
    for _ in range(10):
        fitter.observe(rare, TRUTH.predict(rare))
    for shape in (StepShape(n % 16 + 1, 0, 100 * (n % 16 + 1), 0) for n in range(20_000)):
        fitter.observe(shape, TRUTH.predict(shape))
    model = fitter.model()
    assert model.predict(rare) == pytest.approx(TRUTH.predict(rare), rel=0.01)
    assert model.seen["prefill_tokens"] == (0, 4096)


def test_the_sample_follows_a_machine_that_changes():
    fitter = StepTimeFitter()
    shape = StepShape(4, 0, 400, 0)
    for seconds in [0.01] * 1000 + [0.02] * 1000:
        fitter.observe(shape, seconds)
    assert fitter.model().predict(shape) == pytest.approx(0.02, rel=0.01)


def test_the_same_steps_give_the_same_model():
    assert fitted(TRUTH, noise=0.1) == fitted(TRUTH, noise=0.1)


def test_beyond_twice_what_was_seen_is_outside():
    model = fitted(TRUTH)
    low, high = model.seen["decode_tokens"]
    assert (low, high) == (0, 64)
    assert model.outside(StepShape(decode_tokens=128)) == ()
    assert model.outside(StepShape(decode_tokens=129)) == ("decode_tokens",)
    assert model.outside(StepShape(129, 5000)) == ("decode_tokens", "prefill_tokens")
    assert TRUTH.outside(StepShape(10**9)) == (), "a model that was written is trusted"


def test_steps_of_nothing_say_nothing():
    fitter = StepTimeFitter()
    fitter.observe(StepShape(), 1.0)
    fitter.observe(StepShape(1, 0, 1, 0), 0.0)
    assert fitter.steps == 0
    with pytest.raises(ValueError, match="no step"):
        fitter.model()


def test_the_model_travels_as_a_document():
    model = fitted(TRUTH, noise=0.05)
    document = from_json(StepModelDocument, to_json(model.to_document()))
    assert StepModel.from_document(document) == model


@pytest.mark.parametrize(
    ("change", "says"),
    [({"constant": -1.0}, "constant"), ({"decodeTokens": float("nan")}, "decode_tokens"), ({"seen": {"x": [0, 1]}}, "seen")],
)
def test_a_bad_document_is_refused(change, says):
    data = {**to_json(TRUTH.to_document()), **change}
    with pytest.raises(FormatError, match=says):
        StepModel.from_document(from_json(StepModelDocument, data))
