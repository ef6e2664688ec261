"""`python -m normflax` is the `normflax` command."""

import sys

from normflax.cli import main

sys.exit(main())
