"""`python -m timeloom`: the command line."""

import sys

from timeloom_command import main

sys.exit(main())
