"""One host, one process per worker: the versions of A and the Δs in shared memory."""
