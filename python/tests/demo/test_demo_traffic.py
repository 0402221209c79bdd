"""Bytes are counted, so they are compared with ``==``."""

import numpy as np
import pytest

from tinyllm.demo import traffic
from tinyllm.demo.traffic import Sample, _bytes_check, _result_checks


@pytest.mark.parametrize(
    ("world", "size", "ring"),
    [
        (1, 5, [0]),
        (2, 7, [56, 56]),  # chunks of 4 and 3 doubles
        (3, 10, [104, 112, 104]),  # chunks of 4, 3 and 3
        (4, 2, [16, 24, 32, 24]),  # chunks of 1, 1, 0 and 0
        (3, 0, [0, 0, 0]),
    ],
)
def test_bytes_of_each_way(world, size, ring):
    measured = traffic.measure(world, size)
    v = 8 * size
    assert measured.ring.sent == ring
    assert sum(ring) == 2 * (world - 1) * v == measured.bound * world
    assert measured.all_gather.sent == [(world - 1) * v] * world
    assert measured.gather.sent == [(world - 1) * v] + [v] * (world - 1)
    assert len(measured.checks) == 3
    assert all(check.holds for check in measured.checks)


def test_the_labs_figures():
    measured = traffic.measure(8, 80_000)
    assert measured.ring.sent == [1_120_000] * 8
    assert measured.bound == 1_120_000
    assert measured.all_gather.sent == [4_480_000] * 8
    assert measured.gather.sent == [4_480_000] + [640_000] * 7
    assert all(check.holds for check in measured.checks)
    assert all(w.seconds > 0 for w in (measured.ring, measured.all_gather, measured.gather))


def test_data_differ_per_rank_and_per_index():
    vectors = [traffic.vector(rank, 4) for rank in range(3)]
    assert np.array_equal(vectors, [[1, 2, 3, 4], [2, 4, 6, 8], [3, 6, 9, 12]])


def sample(correct=True, digest="a"):
    return Sample(sent=0, seconds=[0.0], correct=correct, digest=digest)


def test_the_checks_notice_what_is_wrong():
    def holds(other):
        return [check.holds for check in _result_checks(2, [[sample(), other]])]

    assert holds(sample()) == [True, True]
    assert holds(sample(correct=False)) == [False, True]
    assert holds(sample(digest="b")) == [True, False]
    assert _bytes_check(3, 10, [104, 112, 104]).holds
    assert not _bytes_check(3, 10, [104, 104, 112]).holds  # the right sum, at the wrong ranks
