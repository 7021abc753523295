"""API keys from flags and files, requests a minute, TLS."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from fakes import FakeEngine, Reply
from proa.config.options import ServerOptions
from proa.errors import UsageError
from proa.server import access
from proa.server.access import Access, tls_context
from proa.server.app import build_app
from proa.server.errors import ApiError
from proa.text.tokenizer import Tokenizer
from served import Served, make_service


def status_of(checked: Access, key: str, *, is_counted: bool = True) -> int:
    try:
        checked.check({"authorization": f"Bearer {key}"}, is_counted=is_counted)
    except ApiError as error:
        assert error.status == 401 or 0 < int(error.headers["retry-after"]) <= 60  # noqa: PT017
        return error.status
    return 200


def test_keys_of_flags_and_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\none\n\n  two \n")
    checked = Access(ServerOptions(api_key=("three", "four"), api_key_file=str(path)))
    keys = ("one", "two", "three", "four", "five", "", "# ours")
    assert [status_of(checked, key) for key in keys] == [200] * 4 + [401] * 3


@pytest.mark.parametrize("content", [None, b"# none\n\n", b"\xff\xfe"])
def test_files_without_keys_are_refused(tokenizer: Tokenizer, tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match="--api-key-file"):
        build_app(make_service(tokenizer, FakeEngine(), api_key_file=str(path)))  # before the first request


@pytest.mark.parametrize(
    "origin", ["app.example", "https://app.example/", "https://a.b/path", "https://a.b, https://c.d"]
)
def test_origins_that_no_browser_sends_are_refused(tokenizer: Tokenizer, origin: str) -> None:
    build_app(
        make_service(tokenizer, FakeEngine(), cors_origin=("*", "null", "http://[::1]:3000", "app://obsidian.md"))
    )
    with pytest.raises(UsageError, match=f"--cors-origin is '{origin}'"):
        build_app(make_service(tokenizer, FakeEngine(), cors_origin=("http://a.b", origin)))


def test_requests_a_minute_for_each_key(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(access, "time", SimpleNamespace(monotonic=lambda: now_s))
    checked = Access(ServerOptions(api_key=("one", "two"), requests_per_minute=2))
    assert [status_of(checked, "one") for _ in range(3)] == [200, 200, 429]
    assert status_of(checked, "one", is_counted=False) == 200
    assert status_of(checked, "two") == 200
    now_s = 59.0
    assert status_of(checked, "one") == 429
    now_s = 60.0
    assert [status_of(checked, "one") for _ in range(3)] == [200, 200, 429]


def test_rates_without_keys(tokenizer: Tokenizer) -> None:
    with Served(tokenizer, Reply(tokenizer.encode("Hi")), requests_per_minute=2) as served:
        codes = [httpx.post(f"{served.url}/tokenize", json={"prompt": "x"}).status_code for _ in range(3)]
        assert codes[2] == 429
        assert httpx.get(f"{served.url}/health").status_code in (200, 503)


def certificate(folder: Path) -> tuple[Path, Path]:
    cert, key = folder / "cert.pem", folder / "key.pem"
    command: list[Any] = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert,
                          "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no openssl program to make a certificate")
    return cert, key


def test_https(tokenizer: Tokenizer, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    options: dict[str, Any] = {"ssl_certfile": str(cert), "ssl_keyfile": str(key)}
    with Served(tokenizer, Reply(tokenizer.encode("Hi")), **options) as served:
        assert served.url.startswith("https://127.0.0.1:")
        assert httpx.get(f"{served.url}/version", verify=ssl.create_default_context(cafile=cert)).status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(served.url.replace("https", "http") + "/version")
    with pytest.raises(UsageError, match="ssl-keyfile is given"):
        tls_context(ServerOptions(ssl_keyfile=str(key)))


@pytest.mark.parametrize(
    ("cert", "key", "message"),
    [
        (
            "cert",
            "encrypted",
            "encrypted, and Proa asks for no password. .*: openssl pkey -in .*encrypted.pem -out NEW",
        ),
        ("cert", "other", "cert.pem with the private key of .*other.pem cannot be used: they do not belong together"),
        ("cert", "cert", "cert.pem with the private key of .*cert.pem cannot be used: no PEM"),
        ("cert", "none", "none.pem cannot be read: No such file"),
        ("none", "key", "none.pem cannot be read: No such file"),
    ],
)
def test_certificates_and_keys_that_cannot_be_used(cert: str, key: str, message: str, tmp_path: Path) -> None:
    _, made = certificate(tmp_path)
    openssl: list[Any] = ["openssl", "genpkey", "-algorithm", "RSA", "-out", tmp_path / "other.pem"]
    subprocess.run(openssl, check=True, capture_output=True)
    openssl = ["openssl", "pkey", "-in", made, "-aes256", "-passout", "pass:x", "-out", tmp_path / "encrypted.pem"]
    subprocess.run(openssl, check=True, capture_output=True)
    paths = {"ssl_certfile": tmp_path / f"{cert}.pem", "ssl_keyfile": tmp_path / f"{key}.pem"}
    with pytest.raises(UsageError, match=message):
        tls_context(ServerOptions(**{name: str(path) for name, path in paths.items()}))  # type: ignore[arg-type]
