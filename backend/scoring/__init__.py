"""Custom scores of a model's outputs, which users define: a regular expression, or a function in a Python file."""
