"""Opens the server's port. Imports no HTTP library: those take a second, and a port in use is refused before."""

from __future__ import annotations

import errno
import socket

from proa.errors import ProaError, ResourceError, UsageError

LISTEN_BACKLOG = 2048  # connections that the kernel completes before they are accepted


def bind(host: str, port: int) -> socket.socket:
    """Open a listening TCP socket; port 0 picks a free port. Raises ResourceError if the port is in use or reserved,
    UsageError if the address does not belong to this machine."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
    except OSError as error:
        raise UsageError(
            f"--host {host!r} cannot be resolved to an address: {error.strerror}.", "Use --host 127.0.0.1."
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        raise _bind_error(error, host, port) from error
    return listener


def _bind_error(error: OSError, host: str, port: int) -> ProaError:
    if error.errno == errno.EADDRINUSE:
        return ResourceError(
            f"Port {port} on {host} is in use by another program.",
            f"Choose another with --port {port + 1 if port < 65535 else 8000}, let the system choose with --port 0, "
            f"or find that program: ss -ltnp 'sport = :{port}'.",
        )
    if error.errno == errno.EACCES:
        return ResourceError(f"Port {port} is reserved for root.", "Choose a port above 1023 with --port.")
    return UsageError(f"Cannot listen on {host} port {port}: {error.strerror}.", "Choose another address with --host.")


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """Return the URL for clients on this machine: the loopback address if the socket listens on all addresses."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
