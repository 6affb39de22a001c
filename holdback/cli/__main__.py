"""`python -m holdback.cli` is the command `holdback`; `holdback up` starts its processes this way."""

import sys

from holdback.cli import main
from holdback.parent import end_with_parent

end_with_parent()
sys.exit(main())
