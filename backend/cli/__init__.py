"""The command line: one function per subcommand, called from `backend.__main__`."""
