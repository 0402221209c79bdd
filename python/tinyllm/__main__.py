"""``python -m tinyllm``."""

import sys

from tinyllm.cli import main

if __name__ == "__main__":  # ranks import this file again
    sys.exit(main())
