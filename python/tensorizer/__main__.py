"""``python -m tensorizer`` is the command ``tensorizer``."""

import sys

from tensorizer_cli.main import main

sys.exit(main())
