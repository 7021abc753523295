"""The text printed when the model is ready: how to call it."""

from __future__ import annotations

import json
import shlex
from urllib.parse import urlsplit

from proa.config.options import ServerOptions


def welcome(url: str, model_name: str, options: ServerOptions) -> str:
    """Return commands and settings to paste into common clients; the API key itself is never shown."""
    needs_key = bool(options.api_key or options.api_key_file)
    key = "$API_KEY" if needs_key else "none"
    host, port = urlsplit(url).hostname, urlsplit(url).port
    where = "" if host == ServerOptions().host else f" --host {host}"  # flags of `proa launch`
    where += "" if port == ServerOptions().port else f" --port {port}"
    where += " --api-key $API_KEY" if needs_key else ""
    authorization = ' -H "Authorization: Bearer $API_KEY"' if needs_key else ""
    body = json.dumps({"model": model_name, "messages": [{"role": "user", "content": "Hello"}]})
    lines = [
        f"{model_name} is ready at {url}",
        "",
        "  Try it",
        f"    curl {url}/v1/chat/completions -H 'Content-Type: application/json'{authorization} -d {shlex.quote(body)}",
        "  OpenAI clients",
        f"    export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key}",
        "  Open WebUI",
        f"    Settings > Connections > OpenAI API: URL {url}/v1, key {key}",
        "  Anthropic clients",
        f"    export ANTHROPIC_BASE_URL={url} ANTHROPIC_API_KEY={key}",
        "  Ollama clients",
        f"    export OLLAMA_HOST={url}",
    ]
    if options.scheme == "http":  # `proa launch` does not look for servers with TLS
        lines += [
            "  Coding agents (docs/agents.md has others)",
            f"    proa launch claude {shlex.quote(model_name)}{where}    (or codex, opencode)",
        ]
    if needs_key:
        lines.append("  (set API_KEY in your shell to the key given with --api-key)")
    if not options.is_loopback and not needs_key:
        lines.append("  Note: every host that can reach this machine can use the model; --api-key KEY prevents that.")
    return "\n".join(lines)
