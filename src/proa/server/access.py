"""Access to the server: API keys, a limit of requests per minute for each key, and the TLS certificate."""

from __future__ import annotations

import hmac
import math
import re
import ssl
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from pathlib import Path

from proa.config.options import ServerOptions
from proa.errors import UsageError
from proa.server.errors import ApiError

WINDOW_S = 60.0
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]*")


class Access:
    """Checks API keys and rates. Raises UsageError if the file of keys cannot be used."""

    def __init__(self, options: ServerOptions) -> None:
        self._keys = [key.encode() for key in (*options.api_key, *_keys_in(options.api_key_file))]
        self._most = options.requests_per_minute
        self._times_s: defaultdict[bytes, deque[float]] = defaultdict(deque)  # of requests in the window, by key

    def check(self, headers: Mapping[str, str], *, is_counted: bool) -> None:
        """Raise ApiError 401 without a valid key, 429 if it was used too often. is_counted: this request counts."""
        key = self._key_of(headers)
        if is_counted and self._most is not None:
            self._count(key, self._most)

    def _key_of(self, headers: Mapping[str, str]) -> bytes:
        """Return the valid key of a request; b"" if the server has none."""
        if not self._keys:
            return b""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = (bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""))
        for key in self._keys:
            if any(hmac.compare_digest(one.strip().encode("latin-1"), key) for one in given):
                return key
        raise ApiError(
            401,
            "invalid_api_key",
            "The API key is missing or wrong. Send the header Authorization: Bearer KEY, or x-api-key: KEY.",
            headers={"www-authenticate": "Bearer"},
        )

    def _count(self, key: bytes, most: int) -> None:
        now_s, times_s = time.monotonic(), self._times_s[key]
        while times_s and times_s[0] <= now_s - WINDOW_S:
            times_s.popleft()
        if len(times_s) >= most:
            wait_s = math.ceil(times_s[0] + WINDOW_S - now_s)
            message = f"This API key may send {most} requests a minute. Retry in {wait_s} s."
            raise ApiError(429, "rate_limit_exceeded", message, retry_after_s=wait_s)
        times_s.append(now_s)


def _keys_in(path: str | None) -> list[str]:
    """Read a file of keys: one a line; empty lines and those that begin with # do not count."""
    if path is None:
        return []
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--api-key-file {path} cannot be read: {error}.", "Give a UTF-8 text file.") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UsageError(f"--api-key-file {path} has no key.", "Write one key a line.")
    return keys


def checked_origins(options: ServerOptions) -> tuple[str, ...]:
    """Return the origins of --cors-origin. Raises UsageError for one that no browser sends: it would match nothing."""
    for origin in options.cors_origin:
        if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
            raise UsageError(
                f"--cors-origin is {origin!r}, which is no origin.",
                "Give scheme and host without a path, such as https://app.example or http://localhost:3000, or *.",
                param="cors_origin",
            )
    return options.cors_origin


def tls_context(options: ServerOptions) -> ssl.SSLContext | None:
    """Load the certificate; None without one. Raises UsageError."""
    if options.ssl_certfile is None:
        if options.ssl_keyfile is not None:
            raise UsageError("--ssl-keyfile is given without a certificate.", "Give --ssl-certfile FILE too.")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    cert, key = options.ssl_certfile, options.ssl_keyfile or options.ssl_certfile

    def password() -> str:  # without it, OpenSSL would ask on the terminal
        raise UsageError(
            f"The private key {key} is encrypted, and Proa asks for no password.",
            f"Give a decrypted copy that only you can read, with --ssl-keyfile: openssl pkey -in {key} -out NEW.",
        )

    try:
        for path in (cert, key):
            Path(path).open("rb").close()
        context.load_cert_chain(cert, key, password)
    except ssl.SSLError as error:  # an OSError
        why = "they do not belong together" if error.reason == "KEY_VALUES_MISMATCH" else error.reason or "no PEM"
        raise UsageError(
            f"The certificate of {cert} with the private key of {key} cannot be used: {why}.",
            "Give PEM files: --ssl-certfile with the certificate, --ssl-keyfile with its private key.",
        ) from error
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}.", "Give readable PEM files.") from error
    return context
