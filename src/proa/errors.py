"""Every error Proa raises on purpose. Belongs here: the tree, exit codes, HTTP codes. Never: logging.

ProaError
  UsageError             an option, flag, config key or argument is wrong
  ModelError             a model cannot be used as asked
    ModelNotFound          no such folder, file, alias or repository
    ConfigError            config.json or GGUF metadata says something Proa does not implement
    WeightsError           tensors missing, unused, misshapen, truncated or corrupt
    TokenizerError         no tokenizer, or one that cannot be read
  HubError               the model hub refused, failed or cannot be reached
  ResourceError          it does not fit into memory, disk or a port is taken
  RequestError           one request cannot be served as asked
    ContextLengthExceeded  prompt plus answer exceed the model's context
  QueueFull              too many requests are waiting
  ShuttingDown           the server drains and takes no new requests
  EngineDead             the engine process died or could not start
  NativeError            the native library is missing, does not fit, or failed
  NumericsError          a result is infinite or no number
"""

from __future__ import annotations


class ProaError(Exception):
    """An error with a remedy: what happened in one sentence, then what to do about it."""

    exit_code = 1
    http_status = 500
    kind = "internal_error"

    def __init__(self, message: str, remedy: str = "", *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.param = param

    def again(self) -> ProaError:
        """The same error to raise anew: one object raised twice would collect tracebacks."""
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


# What to do about it. Loading has found all weights finite, so it is arithmetic that left the range of a type.
NOT_FINITE = (
    "The weights are finite, which loading checks, so activations grew beyond their type: use another version or "
    "quantisation of the model, or --dtype float32 on the CPU."
)


def _tree(root: type[ProaError]) -> list[type[ProaError]]:
    return [root, *(c for sub in root.__subclasses__() for c in _tree(sub))]


def error_from_wire(name: str, message: str, remedy: str, param: str | None = None) -> ProaError:
    """Rebuild an error that crossed a process border by its class name; unknown names become ProaError."""
    by_name = {cls.__name__: cls for cls in _tree(ProaError)}
    return by_name.get(name, ProaError)(message, remedy, param=param)
