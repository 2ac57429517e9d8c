"""One host, one process per worker: A, read slots and Δ slots in shared memory."""
