"""Everything that can go wrong for a reason outside our own code.

RunnerError
├── InvalidRequest              invalid_request_error        400   `param` names the field
│   └── ContextLengthExceeded   context_length_exceeded      400
├── Unauthorized                invalid_api_key              401
├── Forbidden                   forbidden                    403
├── NotFound                    not_found                    404
│   └── ModelNotFound           model_not_found              404
├── MethodNotAllowed            method_not_allowed           405
├── BodyTooLarge                request_too_large            413
├── UnsupportedMediaType        unsupported_media_type       415
├── RateLimited                 rate_limit_exceeded          429   `retry_after_s`
├── RequestCancelled            request_cancelled            499   its client has left, or somebody took it back
├── InternalError               internal_error               500
├── EngineCrashed               engine_crashed               500   the request ran at two engine deaths
├── Overloaded                  server_overloaded            503   `retry_after_s`
├── EngineStopped               engine_stopped               503
├── Loading                     loading                      503   `retry_after_s`
├── Draining                    draining                     503
├── TimedOut                    timeout                      504
├── ConfigError                 config_error                 ---   an option or a file that the person at the terminal can mend
└── ModelError                  model_error                  ---   the model cannot be used
    └── ModelDamaged            model_damaged                ---   truncated, altered or not a model file at all

`code` and `status` are what the wire shows; the table above is checked by `tests/test_errors.py`.
"""

from collections.abc import Iterator
from typing import ClassVar


class RunnerError(Exception):
    """The base of all errors that a caller, a client or the world can cause. `str(error)` is one sentence."""

    code: ClassVar[str] = "internal_error"
    type: str = "server_error"
    status: ClassVar[int] = 500

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None, hint: str | None = None) -> None:
        """`param` names the request field at fault; `hint` is a command or option that mends it (CLI only)."""
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.hint = hint


class InvalidRequest(RunnerError):
    """A request that can never succeed as it is."""

    code = "invalid_request_error"
    type = "invalid_request_error"
    status = 400


class ContextLengthExceeded(InvalidRequest):
    """The prompt does not fit into a slot."""

    code = "context_length_exceeded"


class Unauthorized(RunnerError):
    """No API key, or a wrong one."""

    code = "invalid_api_key"
    type = "invalid_request_error"
    status = 401


class Forbidden(RunnerError):
    """A Host, Origin or content that this server does not answer."""

    code = "forbidden"
    type = "invalid_request_error"
    status = 403


class NotFound(RunnerError):
    """No such route or resource."""

    code = "not_found"
    type = "invalid_request_error"
    status = 404


class ModelNotFound(NotFound):
    """The request names a model that this server does not hold."""

    code = "model_not_found"


class MethodNotAllowed(RunnerError):
    """The route exists, the method does not."""

    code = "method_not_allowed"
    type = "invalid_request_error"
    status = 405


class BodyTooLarge(RunnerError):
    """The request body is over the limit."""

    code = "request_too_large"
    type = "invalid_request_error"
    status = 413


class UnsupportedMediaType(RunnerError):
    """The request body is not declared as JSON."""

    code = "unsupported_media_type"
    type = "invalid_request_error"
    status = 415


class RateLimited(RunnerError):
    """A client is over a bound of its own."""

    code = "rate_limit_exceeded"
    type = "requests"
    status = 429

    @classmethod
    def in_tokens(cls, message: str, *, retry_after_s: float) -> "RateLimited":
        """What is over the bound is tokens; OpenAI says so in the `type`."""
        error = cls(message, retry_after_s=retry_after_s)
        error.type = "tokens"
        return error


class RequestCancelled(RunnerError):
    """The client left, or somebody took its request back."""

    code = "request_cancelled"
    type = "invalid_request_error"
    status = 499


class InternalError(RunnerError):
    """A bug of ours that touched one request."""


class EngineCrashed(RunnerError):
    """The engine ended twice while it ran this request: it is not tried a third time."""

    code = "engine_crashed"


class Overloaded(RunnerError):
    """The queue is full."""

    code = "server_overloaded"
    status = 503


class EngineStopped(RunnerError):
    """The engine ended while this request was being answered."""

    code = "engine_stopped"
    status = 503


class Loading(RunnerError):
    """The model is not loaded yet."""

    code = "loading"
    status = 503


class Draining(RunnerError):
    """The server is ending and takes no new requests."""

    code = "draining"
    status = 503


class TimedOut(RunnerError):
    """The request waited or took longer than it may."""

    code = "timeout"
    status = 504


class ConfigError(RunnerError):
    """An option, environment variable or file that the person who started the program can mend."""

    code = "config_error"


class ModelError(RunnerError):
    """The model cannot be loaded or run."""

    code = "model_error"


class ModelDamaged(ModelError):
    """The file is truncated, altered or no model at all."""

    code = "model_damaged"


def error_for_code(code: str, message: str, param: str | None, hint: str | None = None) -> RunnerError:
    """The error that another process named by its `code`. A code nobody knows is an InternalError."""
    kind = next((kind for kind in _descendants(RunnerError) if kind.code == code), InternalError)
    return kind(message, param=param, hint=hint)


def _descendants(kind: type[RunnerError]) -> Iterator[type[RunnerError]]:
    for child in kind.__subclasses__():
        yield child
        yield from _descendants(child)
