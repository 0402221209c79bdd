"""The gradient, against finite differences; its slices, against the whole; Adam, by hand."""

import numpy as np
import pytest

from tinyllm.demo.adam import Adam
from tinyllm.demo.model import ByteModel
from tinyllm.dist import chunk_bounds


@pytest.fixture
def model():
    return ByteModel(np.random.default_rng(1), context=3, width=2, hidden=5)


@pytest.fixture
def batch():
    rng = np.random.default_rng(2)
    windows = rng.integers(0, 4, (10, 3)).astype(np.uint8)  # few bytes, so that they repeat
    return windows, rng.integers(0, 256, 10).astype(np.uint8)


def test_gradient_is_that_of_the_loss(model, batch):
    model.backward(*batch, count=10)
    used = np.flatnonzero(model.grad)
    some = np.concatenate([used[:: len(used) // 200], np.flatnonzero(model.grad == 0)[:20]])
    for index in some:
        before = model.params[index]
        losses = []
        for nudge in (1e-5, -1e-5):
            model.params[index] = before + nudge
            losses.append(model.loss(*batch))
        model.params[index] = before
        slope = (losses[0] - losses[1]) / 2e-5
        assert model.grad[index] == pytest.approx(slope, rel=1e-5, abs=1e-9)


def test_every_kind_of_parameter_has_a_gradient(model, batch):
    model.backward(*batch, count=10)
    assert all(np.any(part) for part in model._views(model.grad))


def test_backward_returns_the_loss(model, batch):
    assert model.backward(*batch, count=10) == pytest.approx(model.loss(*batch), rel=1e-14)


def test_parameters_are_views_of_one_vector(model):
    model.params[:] = np.arange(model.params.size)
    assert model.embed[0, 0] == 0
    assert model.b2[-1] == model.params.size - 1
    sizes = [part.size for part in (model.embed, model.w1, model.b1, model.w2, model.b2)]
    assert sum(sizes) == model.params.size == model.grad.size


@pytest.mark.parametrize("world", [2, 3, 4, 12])  # 10 places: even, uneven, and ranks without any
def test_mean_over_ranks_is_the_mean_over_the_batch(model, batch, world):
    windows, targets = batch
    loss = model.backward(windows, targets, count=10)
    whole = model.grad.copy()
    losses, grads = [], []
    for start, stop in chunk_bounds(10, world):
        losses.append(model.backward(windows[start:stop], targets[start:stop], count=10 / world))
        grads.append(model.grad.copy())
    assert np.mean(losses) == pytest.approx(loss, rel=1e-13)
    np.testing.assert_allclose(np.mean(grads, axis=0), whole, rtol=1e-11, atol=1e-16)


def test_adam_moves_by_its_rate_at_first_and_by_hand_afterwards():
    params = np.array([1.0, 1.0, 1.0])
    adam = Adam(params, rate=0.1)
    adam.step(np.array([4.0, -0.5, 0.0]))
    np.testing.assert_allclose(params, [0.9, 1.1, 1.0], rtol=1e-7)
    adam.step(np.array([0.0, -0.5, 0.0]))
    mean = 0.9 * 0.1 * 4 / (1 - 0.9**2)  # both memories by hand, for the first parameter
    square = 0.99 * 0.01 * 16 / (1 - 0.99**2)
    np.testing.assert_allclose(params, [0.9 - 0.1 * mean / square**0.5, 1.2, 1.0], rtol=1e-7)
