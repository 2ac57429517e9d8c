"""How bytes move between the processes of one host, how one waits, and who is still there."""
