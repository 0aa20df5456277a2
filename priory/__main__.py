"""`python -m priory`: the command line."""

import sys

from priory.cli import main

if __name__ == "__main__":
    sys.exit(main())
