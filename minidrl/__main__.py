"""``python -m minidrl``: see minidrl/run/cli.py."""

import sys

from minidrl.run.cli import main

if __name__ == "__main__":
    sys.exit(main())
