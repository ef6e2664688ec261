"""Train one run or launch a sweep: `python -m experiments.train placement=deepnorm model.depth=24`."""

import sys

from normflax.app import main

if __name__ == "__main__":
    sys.exit(main())
