"""Ranks train as one process does, and their replicas stay equal bit for bit."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tinyllm.demo import corpus, training
from tinyllm.demo.report import _verdict
from tinyllm.demo.training import BATCH, Plan, split, windows
from tinyllm.dist import spawn

PLAN = Plan(steps=12, batch=50)  # three ranks take 17, 17 and 16 places


@pytest.fixture(scope="module")
def text():
    return corpus.language_reference()[:20_000]


@pytest.fixture(scope="module")
def measured(text):
    return training.measure(text, "some text", 3, PLAN)


def test_uneven_slices_give_the_losses_of_one_process(measured):
    assert len(measured.one.bits) == len(measured.many.bits) == 12
    np.testing.assert_allclose(measured.many.bits, measured.one.bits, rtol=1e-12)
    assert measured.difference <= 1e-12
    assert measured.many.held_out_bits == pytest.approx(measured.one.held_out_bits, rel=1e-12)


def test_replicas_are_equal_and_all_checks_hold(measured):
    assert len(measured.many.digests) == 3
    assert len(set(measured.many.digests)) == 1
    assert [check.holds for check in measured.checks] == [True, True]


def test_it_learns(measured):
    assert measured.many.bits[0] > 8
    assert measured.many.bits[-1] < measured.many.bits[0] - 2
    assert measured.many.held_out_bits < 7


def test_figures_fit_together(measured):
    for run in (measured.one, measured.many):
        assert run.bytes_per_second * run.step_seconds == pytest.approx(50)
        assert run.cpu_seconds_per_step > 0
        assert 0 < run.all_reduce_share < 1


def test_the_report_says_who_is_faster(measured):
    def verdict(speed):
        many = replace(measured.many, bytes_per_second=speed * measured.one.bytes_per_second)
        return _verdict(replace(measured, many=many))

    assert "one process is 2.00 times as fast as 3 ranks" in verdict(0.5)
    assert "3 ranks are 2.00 times as fast as one process" in verdict(2)


def forgetful(comm, text, plan):
    """Training as if broadcast had been forgotten."""
    comm.broadcast = lambda x, src, out: x
    return training.train(comm, text, plan)


def test_a_forgotten_broadcast_shows(text):
    logs = spawn(forgetful, 2, text, Plan(steps=1, batch=8))
    assert logs[0].digest != logs[1].digest


def test_checks_notice_what_is_wrong(text, monkeypatch):
    def fake_run(text, world, plan):
        digests = ["a"] * (world - 1) + ["b"]
        return training.Run(world, 1, [5.0, 4.0 + 1e-6 * world], 4.0, 1.0, 1.0, 1.0, 0.1, digests)

    monkeypatch.setattr(training, "_run", fake_run)
    measured = training.measure(text, "some text", 2, Plan(steps=2))
    assert measured.difference == pytest.approx(1e-6 / 4, rel=1e-3)
    assert [check.holds for check in measured.checks] == [False, False]


# -- data ------------------------------------------------------------------------------------------


def test_windows_are_the_bytes_before():
    text = np.frombuffer(b"abcdefgh", np.uint8)
    before, here = windows(text, np.array([3, 7]), context=3)
    assert [bytes(window) for window in before] == [b"abc", b"efg"]
    assert bytes(here) == b"dh"


def test_the_held_out_text_is_not_learned():
    learn, judge = split(bytes(range(100)))
    assert bytes(learn) + bytes(judge) == bytes(range(100))
    assert len(judge) == 10


def test_unigram_baseline():
    learn = np.frombuffer(b"ab" * 50_000, np.uint8)
    assert training._unigram_bits(learn, learn) == pytest.approx(1, abs=0.01)
    unseen = np.array([7], np.uint8)
    assert training._unigram_bits(learn, unseen) == pytest.approx(math.log2(100_256))


def test_the_default_batch_is_divisible_by_the_default_ranks():
    assert BATCH % 4 == 0


def test_the_default_text_is_long_enough():
    assert len(corpus.language_reference()) > 100_000
