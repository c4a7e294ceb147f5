import sys

from tilewise.cli import main

sys.exit(main())
