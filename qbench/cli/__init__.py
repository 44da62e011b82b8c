"""The command line: one file a command, each over a verb of the package."""
