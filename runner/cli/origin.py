"""Who started this process, read as early as that can be: a parent that has died meanwhile has left its place to another process."""

import os
from typing import Final

PARENT_PID: Final = os.getppid()
