"""Whether vLLM can be imported in its environment, and has every argument that Footplate passes. Runs with that
environment's Python and imports nothing from Footplate; its arguments are the names to look for."""

from __future__ import annotations

import sys

from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> str:
    """What is wrong, as a sentence; '' for nothing."""
    known = {name for action in make_arg_parser(FlexibleArgumentParser())._actions for name in action.option_strings}
    missing = sorted(set(sys.argv[1:]) - known)
    return f"vllm serve of this version lacks the arguments {', '.join(missing)}." if missing else ""


if __name__ == "__main__":
    sys.exit(main())
