# ruff: noqa: E501  (most of this file is prose)
"""Writes course/docs/errors.md: every error, as a real run prints it, and what to do.

python python/tests/docs/errors_page.py > course/docs/errors.md
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent, fill, indent
from typing import NamedTuple

ROOT = Path(__file__).parents[3]

INTRO = """\
# Errors: what they look like, and what to do

When something goes wrong in a rank, `spawn` ends the whole run and raises one error in the parent. It
names the rank whose fault it is, shows where that rank stood, and leaves nothing running. Each error
below was printed by the little program above it, which begins with `from tinyllm.dist.comm import
spawn` and has its last line under the `__main__` guard; the page is written by
`python python/tests/docs/errors_page.py`, and a test compares it with what the library says today.

    RuntimeError
      CommError             anything below; also a Comm that is used after it failed
        RankError           a rank raised
        RankDied            a rank's process ended without returning
        PeerLost            the other end of a link is gone, for a reason that lies elsewhere
        DesyncError         the ranks are not in the same call
        FrameError          bytes that are no message of this library
        CommTimeout         a run or an operation took too long; a TimeoutError too
    ValueError, TypeError   a wrong argument: names the rank and the value

All of them have `rank` (whose fault it is, None where nobody is alone with it), `op`, `seq`,
`exitcode` and `traceback_text`, as far as they apply.
"""


class Example(NamedTuple):
    """A section of the page: a program that fails, and what to do about it."""

    title: str
    program: str
    advice: str


EXAMPLES = [
    Example(
        "RankError: a rank raised",
        """
        def train(comm):
            if comm.rank == 1:
                {}["loss"]
            comm.barrier()

        spawn(train, 3)
        """,
        "Read the traceback: it is that rank's own. The other ranks were ended; what they were waiting"
        " for is a consequence and is not shown. An exception of any class arrives like this, as text,"
        " whether or not it pickles.",
    ),
    Example(
        "RankError: a rank cannot start",
        """
        class Model:
            def __reduce__(self):
                return (int, ("not a model",))

        def train(comm, model): ...

        spawn(train, 2, Model())
        """,
        "`fn` and its arguments travel by pickle into a fresh interpreter. Pass plain data (arrays,"
        " dicts, paths) and build the rest inside the rank.",
    ),
    Example(
        "RankDied: a rank was killed",
        """
        import os, signal

        def train(comm):
            comm.all_reduce(1.0)
            if comm.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            comm.barrier()

        spawn(train, 3)
        """,
        "Nobody in Python did this. SIGKILL usually comes from the system when memory runs out (see its"
        " log); SIGSEGV and SIGABRT from compiled code in that rank. The last line says how far the"
        " rank had come.",
    ),
    Example(
        "RankDied: a rank left without returning",
        """
        import sys

        def train(comm):
            if comm.rank == 1:
                sys.exit("no data for me")
            comm.barrier()

        spawn(train, 3)
        """,
        "`sys.exit`, also with 0, is no way to return: the others would wait for ever. Return from the"
        " function, or raise.",
    ),
    Example(
        "DesyncError: one rank calls something else",
        """
        import numpy as np

        def train(comm):
            comm.barrier()
            if comm.rank == 2:
                comm.broadcast(np.zeros(4), 0)
            comm.all_reduce(np.zeros(4))

        spawn(train, 4)
        """,
        "Compare the two calls. Most often a collective stands under an `if` that not all ranks take,"
        " or loops have different lengths because batches do not divide evenly. The number after # counts"
        " a rank's collectives from 1.",
    ),
    Example(
        "DesyncError: shapes differ",
        """
        import numpy as np

        def train(comm):
            comm.all_reduce(np.zeros(10 + comm.rank))

        spawn(train, 2)
        """,
        "Of two ranks, neither is the odd one out. Pad the arrays to one size, or use `all_gather`, which"
        " takes different sizes.",
    ),
    Example(
        "DesyncError: a rank returned too early",
        """
        def train(comm):
            for batch in range(3 if comm.rank == 1 else 4):
                comm.all_reduce(1.0)

        spawn(train, 3)
        """,
        "The classic of uneven data: one rank has a batch less. Agree on the number of steps first:"
        " `steps = comm.all_gather(len(batches)).min()`.",
    ),
    Example(
        "DesyncError: something is left over",
        """
        import time
        import numpy as np

        def train(comm):
            if comm.rank == 0:
                comm.send(np.zeros(3), 1)
            time.sleep(0.2)

        spawn(train, 2)
        """,
        "Every message that is sent must be received, between the same two collectives. Left alone, it"
        " would be read by the next `recv`, or by nobody.",
    ),
    Example(
        "CommTimeout: a rank does not come",
        """
        def load(path):
            while True:
                pass

        def train(comm):
            if comm.rank == 1:
                load("data")
            comm.barrier()

        spawn(train, 3, timeout=3)
        """,
        "The rank in the first line holds the others up, and its Python stack shows where. The others are"
        " listed with whom they wait for. If it merely needs longer, pass a larger `timeout`, or None.",
    ),
    Example(
        "CommTimeout: a circle of waits",
        """
        import numpy as np

        def train(comm):
            comm.send(np.zeros(1_000_000), (comm.rank + 1) % comm.world)
            comm.recv((comm.rank - 1) % comm.world)

        spawn(train, 3, timeout=3)
        """,
        "Everybody sends first, and a message of this size fits no pipe. Let even ranks send first and odd"
        " ranks receive first, as the library's own rings do.",
    ),
    Example(
        "CommTimeout: an operation's own limit",
        """
        import time

        def train(comm):
            comm.timeout = 0.5
            if comm.rank == 2:
                time.sleep(3)
            comm.barrier()

        spawn(train, 3)
        """,
        "`comm.timeout` limits how long one operation may wait, in seconds; None (the default) leaves it"
        " to spawn's deadline. It is each rank's own, and can be changed between calls.",
    ),
    Example(
        "CommError: a Comm is used after it failed",
        """
        import numpy as np

        def train(comm):
            try:
                comm.all_reduce(np.zeros(3 + comm.rank))
            except RuntimeError:
                pass
            return comm.all_reduce(0)

        spawn(train, 2)
        """,
        "After a failure no message can be trusted, so a Comm stays broken, and spawn shows the first"
        " cause. Catch the error around `spawn`, not inside the rank.",
    ),
    Example(
        "ValueError, TypeError: a wrong argument",
        """
        import numpy as np

        def train(comm):
            comm.all_reduce(np.arange(3), "mean")

        spawn(train, 1)
        """,
        "Raised before anything is sent, on the rank that called it. The message says what to write"
        " instead.",
    ),
    Example(
        "ValueError: a function that no rank can import",
        """
        spawn(lambda comm: comm.rank, 2)
        """,
        "Before anything starts. A rank is a fresh interpreter that imports the function by name: write it"
        " with `def` at the top level of a module.",
    ),
]

FRAME = """\
from tinyllm.dist.comm import spawn

{before}

if __name__ == "__main__":
    try:
        {call}
    except Exception as error:
        print(f"{{type(error).__name__}}: {{error}}")
"""


def printed(program: str) -> str:
    """What a program prints: its last line is the call that fails."""
    before, _, call = dedent(program).strip().rpartition("\n")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.py"
        path.write_text(FRAME.format(before=before, call=call))
        done = subprocess.run(
            [sys.executable, str(path)],
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {"PYTHONPATH": str(ROOT / "python")},
        )
        said = done.stdout + done.stderr
        return said.replace(f"{folder}/", "").replace(f"{ROOT / 'python'}/", "").rstrip()


def page() -> str:
    """The whole page."""
    with ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(printed, (example.program for example in EXAMPLES)))
    sections = [INTRO]
    for example, output in zip(EXAMPLES, outputs, strict=True):
        sections.append(
            f"## {example.title}\n\n"
            f"{indent(dedent(example.program).strip(), '    ')}\n\nprints\n\n"
            f"{indent(output, '    ')}\n\n{fill(example.advice, 98)}\n"
        )
    return "\n".join(sections)


if __name__ == "__main__":
    print(page(), end="")
