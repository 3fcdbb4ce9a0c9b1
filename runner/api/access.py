"""Request ids and the access log: one `key=value` line a request, with sizes, times and the reason of its end, never text."""

import json
import logging
import re
import secrets
from typing import Final

from aiohttp import web

from runner.api.call import Call, Choice
from runner.api.errors import shown
from runner.errors import RunnerError

REQUEST_ID_HEADER: Final = "x-request-id"
_LOG: Final = logging.getLogger("slotfile.access")
_SANE_ID: Final = re.compile(r"[!-~]{1,128}")
_PLAIN: Final = re.compile(r"[!#-<>-~]+")


def request_id(given: str | None) -> str:
    """The client's own id where it is 1 to 128 printable ASCII characters, else a new one."""
    return given if given is not None and _SANE_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"


class AccessEntry:
    """What will be said of one request. Written once its response is out and the engine has said its last word."""

    def __init__(self, request: web.BaseRequest, client: str, started_at: float) -> None:
        """`client`: the address that it is told by, never a key."""
        self.request_id = request_id(request.headers.get(REQUEST_ID_HEADER))
        self.started_at = started_at
        self.status = 499
        self.call: Call | None = None
        self.error: RunnerError | None = None
        self._client = client
        self._method = request.method
        self._path = request.path

    def finish(self, ended_at: float) -> None:
        """Write the line, now or after the engine's last word."""
        total_s = ended_at - self.started_at
        if self.call is None:
            self._write(total_s)
        else:
            self.call.when_over(lambda: self._write(total_s))

    def _write(self, total_s: float) -> None:
        if not _LOG.isEnabledFor(logging.INFO):
            return
        fields: dict[str, object] = {
            "id": self.request_id,
            "client": self._client,
            "method": shown(self._method),
            "path": shown(self._path),
            "status": self.status,
            **(_generation_fields(self.call.choices) if self.call is not None else {}),
            "total_s": f"{total_s:.4f}",
            "reason": self._reason,
        }
        _LOG.info(" ".join(f"{key}={_value(value)}" for key, value in fields.items()))

    @property
    def _reason(self) -> str:
        error = self.error or (self.call.error if self.call is not None else None)
        if error is not None:
            return error.code
        if self.call is None:
            return "disconnected" if self.status == 499 else "-"
        return ",".join(dict.fromkeys(choice.finished.reason for choice in self.call.choices if choice.finished is not None))


def _generation_fields(choices: list[Choice]) -> dict[str, object]:
    """Sizes added up over the choices; the times are those of the slowest."""
    ends = [choice.finished for choice in choices if choice.finished is not None]
    stamps = [end.stamps for end in ends]
    return {
        "n_prompt": sum(choice.n_prompt for choice in choices),
        "n_cached": sum(end.n_cached for end in ends),
        "n_completion": sum(choice.n_completion for choice in choices),
        "queue_s": _longest([(at.arrived_at, at.admitted_at) for at in stamps]),
        "prefill_s": _longest([(at.admitted_at, at.first_token_at) for at in stamps]),
        "decode_s": _longest([(at.first_token_at, at.finished_at) for at in stamps]),
    }


def _longest(spans: list[tuple[float, float]]) -> str:
    """Spans that have both instants; `-` where there is none."""
    lengths = [end - start for start, end in spans if start > 0 and end > 0]
    return f"{max(lengths):.4f}" if lengths else "-"


def _value(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
