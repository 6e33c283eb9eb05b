"""Errors for clients: a status, one sentence, and OpenAI's error object."""

from __future__ import annotations

from collections.abc import Mapping

from tierstore.errors import TierStoreError

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(TierStoreError):
    """An error that is answered with ``status``. ``param`` names the invalid field."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, object]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        code = "model_not_found" if self.status == 404 and self.param == "model" else None
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": code}}


def bad_request(message: str, *, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)
