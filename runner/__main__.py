"""`python -m runner` is the command `slotfile`."""

import sys

from runner.cli.main import main

sys.exit(main())
