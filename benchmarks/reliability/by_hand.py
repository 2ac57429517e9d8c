"""Start ranks as a scheduler does, with RANK, WORLD_SIZE and an address: ``by_hand.py RANKS SCRIPT WORDS…``.

With NAMESPACES, names of network namespaces, each rank runs in one of them, the first at MASTER_ADDR.
"""

import os
import socket
import subprocess
import sys


def main() -> None:
    """Start the ranks, and end with the worst of their exit codes."""
    size, namespaces = int(sys.argv[1]), os.environ.get("NAMESPACES", "").split()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1]), "WORLD_SIZE": str(size)}
    places = [["ip", "netns", "exec", name] for name in namespaces] or [[]] * size
    ranks = [
        subprocess.Popen([*place, sys.executable, *sys.argv[2:]], env=address | os.environ | {"RANK": str(rank)})
        for rank, place in enumerate(places)
    ]
    sys.exit(max(abs(process.wait()) for process in ranks))


if __name__ == "__main__":
    main()
