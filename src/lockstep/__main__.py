"""Entry point of ``python -m lockstep``, the same as the command ``lockstep``."""

import sys

from lockstep.cli.run import main

if __name__ == "__main__":
    sys.exit(main())
