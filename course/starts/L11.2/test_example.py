"""An example: one test of comm.py, to begin your own with. Change it, and add more beside it.

A worker is a function at the top level of a module: each rank imports it by name. It collects what
happened and returns it; the test then compares, here in one process. Let data differ per rank and
per entry: where all are equal, a wrong chunk or a wrong neighbour looks right.
"""

import numpy as np

from tinyllm.dist.comm import Comm, spawn


def add_up(comm: Comm):
    return comm.all_reduce(np.array([1.0, 2.0, 3.0]) * 10.0**comm.rank)


def test_all_ranks_get_the_sum():
    for total in spawn(add_up, 3):
        assert total.tolist() == [111.0, 222.0, 333.0]
