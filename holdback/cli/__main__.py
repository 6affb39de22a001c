"""`python -m holdback.cli` is the command `holdback`; `holdback up` starts its processes this way."""

import ctypes
import os
import signal
import sys

from holdback.cli import PARENT_VARIABLE, main

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Asks Linux to end this process when the one that started it is gone, however it went."""
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        sys.exit("the process that started this one has ended")


end_with_parent()
sys.exit(main())
