"""`python -m holdback.cli` is the command `holdback`; `holdback up` starts its processes this way."""

import sys

from holdback.cli import main

sys.exit(main())
