"""The command line: one file per command. Nothing in it imports torch before a command runs."""
