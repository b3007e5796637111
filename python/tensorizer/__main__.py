"""``python -m tensorizer`` is the command ``tensorizer``."""

import sys

from ._cli import main

sys.exit(main())
