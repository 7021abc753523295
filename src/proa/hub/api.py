"""HTTP client of the model hub: lists a repository, reads bytes of a file, retries, and explains error responses.

huggingface_hub reads the environment variables HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any, ClassVar, NoReturn, TypeVar
from urllib.parse import quote

import httpx
from huggingface_hub import constants, get_token

from proa.errors import HubError, ModelNotFound, ProaError
from proa.hub.reference import HubReference
from proa.hub.repository import HubFile, Repository

_TIMEOUT = httpx.Timeout(30.0, connect=10.0)
_RETRY_STATUS = (429, 500, 502, 503, 504)
_LONGEST_WAIT_S = 30.0

T = TypeVar("T")


class TransientError(Exception):
    """An error that a retry may fix, after `wait_s` if the hub sent Retry-After. `error`: raised if retries fail."""

    def __init__(self, error: HubError, wait_s: float = 0.0) -> None:
        super().__init__(str(error))
        self.error = error
        self.wait_s = wait_s


class Hub:
    """A connection to one hub with the user's token. Methods raise HubError or ModelNotFound, with a remedy."""

    retry_delays_s: ClassVar[tuple[float, ...]] = (1.0, 2.0, 4.0)

    def __init__(self) -> None:
        self.endpoint: str = constants.ENDPOINT.rstrip("/")
        self._token: str | None = get_token()
        headers = {"user-agent": "proa", "accept-encoding": "identity"}
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"  # httpx drops it on redirects to other hosts
        self._client = httpx.Client(headers=headers, follow_redirects=True, timeout=_TIMEOUT)

    def close(self) -> None:
        self._client.close()

    def repository(self, reference: HubReference) -> Repository:
        """Resolve the revision to its current commit, and list the files with their sizes."""
        if constants.HF_HUB_OFFLINE:
            raise HubError(
                f"{reference} is not complete in the cache, and HF_HUB_OFFLINE forbids downloading it.",
                "Unset HF_HUB_OFFLINE, or give a local folder or .gguf file.",
            )
        base = f"{self.endpoint}/api/models/{reference.repo}"
        info, _ = self._get_json(f"{base}/revision/{quote(reference.revision, safe='')}", reference)
        commit = str(info["sha"])
        entries: list[dict[str, Any]] = []
        url: str | None = f"{base}/tree/{commit}?recursive=true"
        while url:
            page, url = self._get_json(url, reference)
            entries += page
        return Repository(reference, commit, tuple(_hub_file(e) for e in entries if e["type"] == "file"))

    def read_range(self, repository: Repository, file: HubFile, stop: int) -> bytes:
        """Read the first `stop` bytes of a file, or all of a shorter one."""
        stop = min(stop, file.size_bytes)

        def read() -> bytes:
            with self.open_from(repository, file, 0, stop) as (_, chunks):
                return b"".join(chunks)[:stop]

        return self._retry(read)

    @contextmanager
    def open_from(
        self, repository: Repository, file: HubFile, start: int, stop: int | None = None
    ) -> Iterator[tuple[int, Iterator[bytes]]]:
        """Open a file for reading at byte `start`; yield (position of the first byte, chunks). The position is 0 if the
        server does not support ranges.

        Does not retry: only the caller knows how many bytes have arrived. Raises TransientError.
        """
        url = f"{self.endpoint}/{repository.reference.repo}/resolve/{repository.commit}/{quote(file.path)}"
        wanted = {} if start == 0 and stop is None else {"range": f"bytes={start}-{'' if stop is None else stop - 1}"}
        try:
            with self._client.stream("GET", url, headers=wanted) as response:
                if response.status_code not in (200, 206):
                    response.read()
                    self._refuse(response, repository.reference)
                yield (start if response.status_code == 206 else 0), response.iter_bytes()
        except httpx.RequestError as error:
            raise TransientError(self._unreachable(error)) from error

    def _get_json(self, url: str, reference: HubReference) -> tuple[Any, str | None]:
        """GET a JSON document; return it and the URL of the next page, if any."""

        def get() -> tuple[Any, str | None]:
            try:
                response = self._client.get(url)
            except httpx.RequestError as error:
                raise TransientError(self._unreachable(error)) from error
            if response.status_code != 200:
                self._refuse(response, reference)
            try:
                return response.json(), response.links.get("next", {}).get("url")
            except ValueError as error:
                raise HubError(
                    f"{url} answered {response.text[:80]!r}, which is not JSON: this server is not a model hub.",
                    "Check HF_ENDPOINT, and whether a proxy or login page intercepts the request.",
                ) from error

        return self._retry(get)

    def _retry(self, attempt: Callable[[], T]) -> T:
        for delay_s in self.retry_delays_s:
            try:
                return attempt()
            except TransientError as error:
                time.sleep(max(delay_s, min(error.wait_s, _LONGEST_WAIT_S)))
        try:
            return attempt()
        except TransientError as error:
            raise error.error from error

    def _unreachable(self, error: httpx.RequestError) -> HubError:
        return HubError(
            f"The model hub {self.endpoint} cannot be reached ({type(error).__name__}: {error}).",
            "Check the network, set HF_ENDPOINT to a mirror, or give a local folder or .gguf file. "
            "Bytes already downloaded are kept.",
        )

    def _refuse(self, response: httpx.Response, reference: HubReference) -> NoReturn:
        error = self._refusal(response, reference)
        if response.status_code in _RETRY_STATUS and isinstance(error, HubError):
            raise TransientError(error, _retry_after_s(response))
        raise error

    def _refusal(self, response: httpx.Response, reference: HubReference) -> ProaError:
        """Build the error for an HTTP status code of the hub and its X-Error-Code header."""
        status, code = response.status_code, response.headers.get("x-error-code", "")
        page = f"{self.endpoint}/{reference.repo}"
        has_token = self._token is not None
        if code == "GatedRepo" or status == 403:
            return self._gated(reference, status, page)
        if status == 401:
            return self._unauthorised(reference, page)
        if code == "RevisionNotFound":
            return ModelNotFound(
                f"{reference.repo} has no revision {reference.revision}.",
                f"Choose a branch, tag or commit: see {page}/tree/main.",
            )
        if status == 404:
            return ModelNotFound(
                f"There is no model {reference} on {self.endpoint}, and no such local folder.",
                f"Check the spelling at {page}; `proa models` lists short names. "
                "If the repository is private, set HF_TOKEN.",
            )
        if status == 429:
            return HubError(
                f"The hub {self.endpoint} answered 429: too many requests from this address.",
                f"Wait {_retry_after_s(response) or 60:.0f} s and run the same command again; the download resumes"
                + ("." if has_token else "; HF_TOKEN raises the limit."),
            )
        if status >= 500:
            return HubError(
                f"The hub {self.endpoint} answered {status}: an error on the hub's side.",
                "Run the same command again later (the download resumes), or set HF_ENDPOINT to a mirror.",
            )
        return HubError(f"The hub answered {status} for {reference}: {response.text[:200]!r}.", f"See {page}.")

    def _gated(self, reference: HubReference, status: int, page: str) -> HubError:
        how = "with the account that HF_TOKEN belongs to" if self._token else "and set HF_TOKEN to your access token"
        return HubError(
            f"The hub refuses access to {reference} ({status}): its licence must be accepted first.",
            f"Accept it at {page} {how} ({self.endpoint}/settings/tokens).",
        )

    def _unauthorised(self, reference: HubReference, page: str) -> HubError:
        """Build the error for 401, which without a token also means that the repository does not exist."""
        if self._token:
            return HubError(
                f"The hub refuses HF_TOKEN for {reference} (401): the token is wrong, expired or lacks read access.",
                f"Check the token at {self.endpoint}/settings/tokens, and the model's licence at {page}.",
            )
        return HubError(
            f"The hub refuses access to {reference} (401): it is gated or private, or there is no such model.",
            f"Check the name and accept the licence at {page}, create a token at {self.endpoint}/settings/tokens "
            "and set HF_TOKEN to it.",
        )


def _hub_file(entry: dict[str, Any]) -> HubFile:
    path = PurePosixPath(entry["path"])
    if path.is_absolute() or ".." in path.parts:
        raise HubError(
            f"The hub lists a file with the path {entry['path']!r}, which lies outside of the repository's folder.",
            "Do not use this repository.",
        )
    sha256 = entry["lfs"]["oid"].removeprefix("sha256:") if entry.get("lfs") else None
    return HubFile(str(path), int(entry["size"]), str(entry["oid"]), sha256, entry.get("xetHash"))


def _retry_after_s(response: httpx.Response) -> float:
    value = response.headers.get("retry-after", "")
    return float(value) if value.isdigit() else 0.0
