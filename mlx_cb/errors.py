"""Every exception that mlx-cb raises on purpose, with the HTTP status and code it maps to.

    MlxCbError                  500 internal_error
    ├── InvalidRequest          400 invalid_value            the client's field is wrong
    │   ├── ContextLengthExceeded  400 context_length_exceeded
    │   └── LimitExceeded       400 limit_exceeded           a cap of this server or this user
    ├── RequestTooLarge         413 request_too_large
    ├── Unauthorized            401 invalid_api_key
    ├── Forbidden               403 forbidden
    │   └── Cancelled           403 cancelled                by the operator, not by the client
    ├── ModelNotFound           404 model_not_found          (exit code 3 on the command line)
    ├── UnsupportedModel        500 unsupported_model        (exit code 3)
    ├── OutOfMemory             500 out_of_memory            (exit code 4)
    ├── DeadlineExceeded        408 deadline_exceeded        before there was anything to answer
    ├── Overloaded              429 rate_limit_exceeded      carries retry_after
    └── EngineDead              503 engine_dead              carries retry_after
        └── Draining            503 draining                 takes nothing new; carries retry_after

A message says what is wrong, why, and what to do about it, in one sentence or two.
"""

from __future__ import annotations


class MlxCbError(Exception):
    """Base of all errors raised on purpose.

    `param` names the request field at fault, `retry_after` is in seconds.
    """

    status = 500
    code = "internal_error"
    exit_code = 1

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after


class InvalidRequest(MlxCbError):
    """A field of the request has a value that cannot be served."""

    status = 400
    code = "invalid_value"
    exit_code = 2


class ContextLengthExceeded(InvalidRequest):
    """Prompt and requested output do not fit into the model's context."""

    code = "context_length_exceeded"


class LimitExceeded(InvalidRequest):
    """The request asks for more than this server, or its user, may have; the cap is named."""

    code = "limit_exceeded"


class RequestTooLarge(MlxCbError):
    """The request body is larger than the server accepts."""

    status = 413
    code = "request_too_large"


class Unauthorized(MlxCbError):
    """No key, or a wrong one, where a key is required."""

    status = 401
    code = "invalid_api_key"


class Forbidden(MlxCbError):
    """The key is right, but does not carry this right."""

    status = 403
    code = "forbidden"


class Cancelled(Forbidden):
    """The operator has ended the request; to send it again is against his will."""

    code = "cancelled"


class ModelNotFound(MlxCbError):
    """The named model is not here and cannot be had."""

    status = 404
    code = "model_not_found"
    exit_code = 3


class UnsupportedModel(MlxCbError):
    """The model is here, but this server cannot run it right."""

    code = "unsupported_model"
    exit_code = 3


class OutOfMemory(MlxCbError):
    """The memory allowed cannot hold the weights and one request."""

    code = "out_of_memory"
    exit_code = 4


class DeadlineExceeded(MlxCbError):
    """The request's time was over before its first token."""

    status = 408
    code = "deadline_exceeded"


class Overloaded(MlxCbError):
    """More work is waiting than can be served in the time allowed."""

    status = 429
    code = "rate_limit_exceeded"


class EngineDead(MlxCbError):
    """The engine process ended or makes no progress; it is being started again."""

    status = 503
    code = "engine_dead"


class Draining(EngineDead):
    """The operator lets what runs finish and takes nothing new."""

    code = "draining"
