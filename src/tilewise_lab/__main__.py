import sys

from tilewise_lab.cli import main

sys.exit(main())
