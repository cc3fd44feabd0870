"""Health, the machine, metrics, and the browser's session."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from ondevice.core.process import own_version
from ondevice.server import metrics, schemas, security
from ondevice.server.daemon import Daemon
from ondevice.server.routes import Serving, refused

router = APIRouter(tags=["system"])


@router.get(
    "/v1/health",
    response_model=schemas.Health,
    responses={503: {"model": schemas.Health, "description": "The supervisor does not run."}},
)
async def health(request: Request, response: Response) -> dict[str, object]:
    """Return whether the daemon works; needs no token."""
    # On the event loop: all threads may wait for a model, and a watchdog checks the daemon here.
    daemon: Daemon = request.app.state.daemon
    if not daemon.alive:
        response.status_code = 503
    return {
        "status": "ok" if daemon.alive else "failing",
        "version": own_version(),
        "token_needed": security.needs_token(daemon.store, request.app.state.host),
    }


@router.get("/v1/system", response_model=schemas.System)
def system(daemon: Serving) -> dict[str, Any]:
    """Return memory, disk, temperatures and power of this machine."""
    return metrics.system(daemon.store.root) | {"memory_limit_by": daemon.supervisor.cgroup.how}


@router.get("/v1/metrics", response_model=schemas.MetricsResponse)
def metrics_json(daemon: Serving) -> dict[str, object]:
    """Return the figures of the daemon as JSON."""
    return daemon.metrics.to_dict()


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
def prometheus(daemon: Serving) -> Response:
    """Return the figures of the daemon and the machine for Prometheus."""
    return Response(
        daemon.metrics.prometheus(), media_type="text/plain; version=0.0.4; charset=utf-8"
    )


@router.post("/v1/session", response_model=schemas.SessionKey)
def log_in(
    daemon: Serving, body: schemas.SessionRequest, request: Request, response: Response
) -> object:
    """Exchange a token for the two halves of a session, for the page: a cookie and a key."""
    tries = request.app.state.tries
    address = "unknown"
    if request.client:
        address = request.client.host
    token = security.check(daemon.store, body.token)
    if token is None:
        if refusal := tries.refusal(address):
            return refused(*refusal)
        tries.failed(address)
        return refused(
            401, "unknown token", "a token", "another", "`ondevice serve token` makes one"
        )
    cookie, key = security.create_session(daemon.store, token)
    response.set_cookie(
        _cookie(request),
        cookie,
        max_age=int(security.SESSION_S),
        httponly=True,
        samesite="strict",
        secure=request.app.state.tls,
        path="/",
    )
    return {"key": key}


@router.delete("/v1/session", response_model=schemas.Done)
def log_out(daemon: Serving, request: Request, response: Response) -> dict[str, bool]:
    """End the session of the cookie."""
    security.end_session(daemon.store, security.session_of(request.scope, request.app.state.tls))
    response.delete_cookie(
        _cookie(request), httponly=True, samesite="strict", secure=request.app.state.tls
    )
    return {"ok": True}


def _cookie(request: Request) -> str:
    return security.cookie_name(request.scope["server"][1], request.app.state.tls)
