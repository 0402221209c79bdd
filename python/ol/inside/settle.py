"""Loaded last into a worker and its fork server: what is there now, all of their forks share.

The garbage collector would write to every object and make each fork copy its memory.
"""

import gc

gc.collect()
gc.freeze()
