"""``python -m hetero_gateway`` is the same as the console script."""

import sys

from hetero_gateway.cli import main

sys.exit(main())
