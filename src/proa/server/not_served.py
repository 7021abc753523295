"""Endpoints of other servers that Proa does not have, with the reason for the error response (501, not 404)."""

from __future__ import annotations

from proa.server.errors import ApiError

_TEXT_ONLY = "Proa serves models that read and write text."
_NO_STORE = "Proa stores no files, threads or jobs."
_NO_VECTORS = "Proa generates text and computes no embeddings or scores; use a server of an embedding model."
_NO_LIBRARY = "Proa serves one model, chosen at start with `proa serve MODEL`."

_REASONS = {
    "/v1/embeddings": _NO_VECTORS,
    "/v1/rerank": _NO_VECTORS,
    "/v1/score": _NO_VECTORS,
    "/v1/moderations": "Proa has no moderation model.",
    "/v1/images": _TEXT_ONLY,
    "/v1/videos": _TEXT_ONLY,
    "/v1/audio": _TEXT_ONLY,
    "/v1/realtime": _TEXT_ONLY,
    "/v1/fine_tuning": "Proa trains no models.",
    "/v1/files": _NO_STORE,
    "/v1/uploads": _NO_STORE,
    "/v1/batches": _NO_STORE,
    "/v1/messages/batches": _NO_STORE,
    "/v1/vector_stores": _NO_STORE,
    "/v1/assistants": _NO_STORE,
    "/v1/threads": _NO_STORE,
    "/v1/conversations": _NO_STORE,
    "/api/embed": _NO_VECTORS,
    "/api/embeddings": _NO_VECTORS,
    "/api/pull": _NO_LIBRARY,
    "/api/push": _NO_LIBRARY,
    "/api/create": _NO_LIBRARY,
    "/api/copy": _NO_LIBRARY,
    "/api/delete": _NO_LIBRARY,
}


def refusal_of(path: str) -> ApiError | None:
    """Return the error for a path of such an endpoint; None for any other path."""
    for start, reason in _REASONS.items():
        if path == start or path.startswith(f"{start}/"):
            said = f"{start} is not implemented. {reason}"
            return ApiError(
                501, "not_implemented", said, headers={"x-should-retry": "false"}
            )  # clients retry from 500 on
    return None
