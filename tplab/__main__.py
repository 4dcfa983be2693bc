"""``python -m tplab``: the command line."""

import sys

from tplab.cli import main

if __name__ == "__main__":
    sys.exit(main())
