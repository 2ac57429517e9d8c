"""Where a server listens that processes join, and how they learn its token: from a file, or from the environment."""

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from paceline.core.errors import InputError
from paceline.core.safe_files import read_json
from paceline.engine.worker_metrics import SERVER_NAME

# Variable of the environment with the token, for the server and for those that join it.
TOKEN = "PACELINE_TOKEN"

# Characters of the shortest token that a user may write.
_SHORTEST = 16


class ServerAddress(NamedTuple):
    """A server, as another process finds it."""

    host: str
    port: int
    token: str
    where: str
    """What says so: for messages."""

    @property
    def text(self) -> str:
        """Return it as ``HOST:PORT``."""
        return text_of(self.host, self.port)


def text_of(host: str, port: int) -> str:
    """Return an address as it is written.

    >>> text_of("127.0.0.1", 80), text_of("::1", 80)
    ('127.0.0.1:80', '[::1]:80')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse(address: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``.

    >>> parse("127.0.0.1:0"), parse("[::1]:80")
    (('127.0.0.1', 0), ('::1', 80))

    Raises:
        InputError: it is not that.
    """
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535 or (":" in host and not bracketed):
        raise InputError(f"address={address!r} is not HOST:PORT; write address='127.0.0.1:29400', port 0 for any")
    return (host[1:-1] if bracketed else host), int(port)


def token_of_environment() -> str | None:
    """Return the token that the environment has; None: it has none.

    Raises:
        InputError: it is too short to be one.
    """
    token = os.environ.get(TOKEN)
    if token is not None and len(token) < _SHORTEST:
        raise InputError(
            f"{TOKEN} has {len(token)} characters, which can be guessed; write export {TOKEN}=$(openssl rand -hex 32)"
        )
    return token


def new_token() -> str:
    """Return a token that nobody guesses."""
    return secrets.token_hex(32)


def found(address: str | os.PathLike[str]) -> ServerAddress:
    """Return the server that a user names, by ``HOST:PORT`` or by the folder of its run.

    Raises:
        InputError: it is neither, no server is there, or nothing says its token.
    """
    folder = Path(address)
    if folder.is_dir() or ":" not in str(address):
        if not (folder / SERVER_NAME).exists():
            raise InputError(
                f"address={str(address)!r}: no server is under way there, for it has no {SERVER_NAME}; write the "
                "folder that its out= or --out names, or HOST:PORT"
            )
        file = read_json(folder / SERVER_NAME)
        host, port, token = (file.get(name) for name in ("host", "port", "token"))
        if not (isinstance(host, str) and isinstance(port, int) and isinstance(token, str)):
            raise InputError(f"{folder / SERVER_NAME} does not say host, port and token; write address='HOST:PORT'")
        return ServerAddress(host, port, token, str(folder / SERVER_NAME))
    host, port = parse(str(address))
    if (token := token_of_environment()) is None:
        raise InputError(
            f"address={str(address)!r} needs the server's token in the environment; write "
            f"{TOKEN}=… python script.py with the token that {SERVER_NAME} in the server's out= has, or address= that "
            "folder"
        )
    return ServerAddress(host, port, token, f"the variable {TOKEN}")


@contextlib.contextmanager
def server_file(folder: Path | None, host: str, port: int, token: str) -> Iterator[None]:
    """Context manager: keep the file with address and token in the run's folder, which no other user can read."""
    if folder is None:
        yield
        return
    path, partial = folder / SERVER_NAME, folder / f".{SERVER_NAME}.{os.getpid()}"
    try:
        try:
            number = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(number, "w", encoding="utf-8") as file:
                json.dump({"host": host, "port": port, "token": token}, file)
            partial.replace(path)
        except OSError as error:
            raise InputError(f"{path} can't be written: {error}; write out= another folder") from error
        yield
    finally:
        for each in (partial, path):
            each.unlink(missing_ok=True)
