"""The chapter's worked table: the trace of a real run equals the printed one, figure by figure."""

from dataclasses import replace

import numpy as np
import pytest

from tinyllm.demo import worked_table
from tinyllm.demo.report import _holds
from tinyllm.demo.worked_table import Move, chunk_of, table

# step, what ranks 0 to 2 send, what they hold afterwards: (chunk, value)
CHAPTER = [
    ("RS 0", [(2, 3), (0, 10), (1, 200)], [(1, 202), (2, 33), (0, 110)]),
    ("RS 1", [(1, 202), (2, 33), (0, 110)], [(0, 111), (1, 222), (2, 333)]),
    ("AG 0", [(0, 111), (1, 222), (2, 333)], [(2, 333), (0, 111), (1, 222)]),
    ("AG 1", [(2, 333), (0, 111), (1, 222)], [(1, 222), (2, 333), (0, 111)]),
]
OWN = {"RS 0": [2, 30, 100], "RS 1": [1, 20, 300]}


@pytest.fixture(scope="module")
def measured():
    return worked_table.measure()


def test_the_trace_is_the_chapters_table(measured):
    rows = [
        (
            row.step,
            [(move.sent_chunk, *move.sent) for move in row.moves],
            [(move.held_chunk, *move.held) for move in row.moves],
        )
        for row in measured.rows
    ]
    assert rows == CHAPTER


def test_a_rank_adds_its_own_part_in_rs_only(measured):
    for row in measured.rows:
        own = [move.own for move in row.moves]
        assert own == [[x] for x in OWN[row.step]] if row.step in OWN else own == [None] * 3


def test_the_outcome(measured):
    assert measured.results == [[111, 222, 333]] * 3
    assert measured.bytes_sent == [32] * 3
    assert measured.bytes_expected == 32
    assert len(measured.checks) == 3
    assert all(check.holds for check in measured.checks)


def test_cells_show_both_parts_of_a_sum(measured):
    assert _holds(measured.rows[0], 0) == "c1: 2+200=202"
    assert _holds(measured.rows[1], 2) == "c2: 300+33=333"
    assert _holds(measured.rows[2], 1) == "gets c0=111"


def test_a_chunk_is_known_by_its_address():
    whole = np.zeros(7)  # chunks of 3, 2 and 2 entries
    assert [chunk_of(whole[a:b], 3) for a, b in ((0, 3), (3, 5), (5, 7))] == [0, 1, 2]
    with pytest.raises(ValueError, match="2 is not in list"):
        chunk_of(whole[2:4], 3)  # begins where no chunk does


# -- every check can fail --------------------------------------------------------------------------

INPUTS = [[1.0], [2.0]]
LOGS = [[Move(0, [1.0], 0, [1.0], [3.0])], [Move(0, [2.0], 0, [2.0], [3.0])]]


def holds(results=([3.0], [3.0]), bytes_sent=(8, 8), logs=LOGS):
    made = table(INPUTS, list(results), list(bytes_sent), logs)
    return [check.holds for check in made.checks]


def test_the_checks_notice_what_is_wrong():
    wrong_sum = [[replace(LOGS[0][0], held=[4.0])], LOGS[1]]
    wrong_chunk = [[replace(LOGS[0][0], sent_chunk=1)], LOGS[1]]
    assert holds() == [True, True, True]
    assert holds(results=([3.0], [4.0])) == [False, True, True]
    assert holds(logs=wrong_sum) == [True, False, True]
    assert holds(logs=wrong_chunk) == [True, False, True]
    assert holds(bytes_sent=(8, 16)) == [True, True, False]
