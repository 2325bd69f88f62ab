"""Work-arounds for defects of libraries, one module each, so that each can be found and removed on its own.

Every module says in its docstring what goes wrong without it, and has two names: `LIBRARY`, the distribution, and
`SEEN_IN`, its version that has the defect. tests/process/test_patches.py fails once the installed version no longer has
it: remove the module and its calls.
"""
