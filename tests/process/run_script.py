"""`python -m run_script SCRIPT ARGUMENTS` is `python SCRIPT ARGUMENTS`, as a module, which the fork server can run."""

import runpy
import sys

runpy.run_path(sys.argv.pop(1))
