"""The exceptions that Proa raises for expected errors, with their exit codes and HTTP status codes.

ProaError
  UsageError             an option, flag, config key or argument is wrong
  ModelError             the model cannot be used
    ModelNotFound          no such folder, file, alias or repository
    ConfigError            config.json or GGUF metadata has an unsupported or invalid value
    WeightsError           tensors are missing, unused, of the wrong shape, truncated or corrupt
    TokenizerError         the tokenizer is missing, unreadable or unsupported
  HubError               the model hub refused the request, failed or is unreachable
  ResourceError          not enough memory or disk space, or the port is in use
  RequestError           a request has an invalid or unsupported parameter
    ContextLengthExceeded  prompt plus answer exceed the model's context length
  QueueFull              too many requests are waiting
  ShuttingDown           the server is draining and accepts no new requests
  EngineDead             the engine process died or could not start
  NativeError            the native library is missing, of another version, or failed
  NumericsError          a result is non-finite (NaN or Inf)
"""

from __future__ import annotations


class ProaError(Exception):
    """Base class. `message`: what is wrong, in one sentence; `remedy`: what to do; `param`: the option or request field
    at fault."""

    exit_code = 1
    http_status = 500
    kind = "internal_error"

    def __init__(self, message: str, remedy: str = "", *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.param = param

    def again(self) -> ProaError:
        """Return a copy to raise again: raising one exception object repeatedly accumulates its traceback."""
        return type(self)(self.message, self.remedy, param=self.param)

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".rstrip()


class UsageError(ProaError):
    exit_code = 2
    http_status = 400
    kind = "invalid_request_error"


class ModelError(ProaError):
    exit_code = 3
    http_status = 400
    kind = "model_error"


class ModelNotFound(ModelError):
    http_status = 404
    kind = "model_not_found"


class ConfigError(ModelError):
    kind = "config_error"


class WeightsError(ModelError):
    kind = "weights_error"


class TokenizerError(ModelError):
    kind = "tokenizer_error"


class HubError(ProaError):
    exit_code = 5
    http_status = 502
    kind = "hub_error"


class ResourceError(ProaError):
    exit_code = 4
    http_status = 507
    kind = "resource_error"


class RequestError(ProaError):
    exit_code = 2
    http_status = 400
    kind = "invalid_request_error"


class ContextLengthExceeded(RequestError):
    kind = "context_length_exceeded"


class QueueFull(ProaError):
    http_status = 429
    kind = "queue_full"


class ShuttingDown(ProaError):
    http_status = 503
    kind = "shutting_down"


class EngineDead(ProaError):
    exit_code = 6
    http_status = 503
    kind = "engine_dead"


class NativeError(ProaError):
    kind = "native_error"


class NumericsError(ProaError):
    kind = "numerics_error"


# The remedy for non-finite results. Loading refuses non-finite weights, so activations must have overflowed.
NOT_FINITE = (
    "All weights are finite (checked at load), so activations overflowed their type: use another version or "
    "quantisation of the model, or --dtype float32 on the CPU."
)


def _tree(root: type[ProaError]) -> list[type[ProaError]]:
    return [root, *(c for sub in root.__subclasses__() for c in _tree(sub))]


def error_from_wire(name: str, message: str, remedy: str, param: str | None = None) -> ProaError:
    """Rebuild an error received from another process, by its class name; an unknown name gives ProaError."""
    by_name = {cls.__name__: cls for cls in _tree(ProaError)}
    return by_name.get(name, ProaError)(message, remedy, param=param)
