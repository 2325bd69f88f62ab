"""Work-arounds for defects of libraries, one module each, so that each can be found and removed on its own.

Every module says in its docstring what goes wrong without it, and has three names: `LIBRARY`, the distribution;
`SEEN_IN`, its version that has the defect; and `obsolete()`, which is true once the installed version no longer has it.
tests/process/test_patches.py fails then: remove the module and its calls.
"""
