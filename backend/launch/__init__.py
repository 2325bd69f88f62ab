"""The launch plan: command, environment and files of a run, for each launcher."""
