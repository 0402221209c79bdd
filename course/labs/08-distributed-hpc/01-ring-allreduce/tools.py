"""What the four extensions share: pictures, progress, and how a program ends."""

import sys
from pathlib import Path

PROGRAM = Path(sys.argv[0]).name


def missing(what, install):
    """End the program, which lacks something."""
    sys.exit(f"{PROGRAM} needs {what}: {install}")


def needs_matplotlib(path):
    """Look for it before the long part of the work, if there is to be a picture at all."""
    if path:
        try:
            import matplotlib
        except ModuleNotFoundError:
            missing("matplotlib for --plot", "pip install matplotlib, or leave --plot out")
        matplotlib.use("Agg")  # it writes files and needs no display


def picture(path, draw, width=7.5, height=4.2):
    """Let ``draw(axes)`` fill a picture, and write it to ``path``."""
    import matplotlib.pyplot as plt

    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 10})
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    draw(axes)
    figure.savefig(path, dpi=80)
    plt.close(figure)
    print(f"\npicture: {path}")


def progress(text=""):
    """One line on a terminal's stderr that is written over; "" removes it."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def at_least(parser, args, **least):
    """Refuse numbers that are too small, as argparse does."""
    for name, limit in least.items():
        value = getattr(args, name)
        if min(value if isinstance(value, list) else [value]) < limit:
            parser.error(f"--{name} must be at least {limit}, got {value}")


def run(main):
    """Exit as ``main()`` says: 1 for what failed, 130 for Ctrl-C."""
    try:
        code = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        progress()
        code = complain(130, "interrupted")
    except BrokenPipeError:  # the reader has seen enough
        sys.stderr.close()
        code = 1
    except (RuntimeError, OSError, MemoryError) as error:  # a rank failed, no such folder
        progress()
        code = complain(1, str(error) or type(error).__name__)
    sys.exit(code)


def complain(code, message):
    """Say on stderr what went wrong."""
    print(f"{PROGRAM}: {message}", file=sys.stderr)
    return code
