"""Ray: submit, find and stop jobs through the REST API of a cluster's head node.

Nothing of ray is imported here. The job runs ray-driver.py of the run's folder (`ray_driver.py`), which reserves nodes
and starts `ray_node.py` on each. Where the head is and the token come from the same variables as for Ray's own
commands, not from the options of a run: a file from somebody else must not decide where the token is sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

from backend.runs import RAY_DRIVER, RAY_JOB, RAY_NODES, RAY_STATUS, files
from backend.runs.follower import DONE, FAILED, STOPPED, Cluster, ClusterError, Job, follow

ADDRESS = "RAY_API_SERVER_ADDRESS"
DEFAULT_ADDRESS = "http://127.0.0.1:8265"
TOKEN, TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
REQUEST_SECONDS = 20.0
NODE_SECONDS = 40.0  # how long the processes of a node may take to end after the job
# Variables that a job gets from the environment of its submission; the nodes have their own PATH and HOME.
INHERITED = ("XDG_CACHE_HOME", "FOOTPLATE_CACHE", "HF_HOME", "HF_HUB_CACHE")
ENDED: Mapping[str, str] = {"SUCCEEDED": DONE, "STOPPED": STOPPED, "FAILED": FAILED}
MESSAGE = 400  # characters that are kept of a job's message, which may quote 20,000 of its log


def address(environment: Mapping[str, str] = os.environ) -> str:
    """The URL of the head node's dashboard."""
    found = environment.get(ADDRESS) or environment.get("RAY_ADDRESS", "")
    return found.rstrip("/") if found.startswith(("http://", "https://")) else DEFAULT_ADDRESS


def token(environment: Mapping[str, str] = os.environ) -> str:
    """The cluster's token, from where Ray looks for it; '' if there is none."""
    if found := environment.get(TOKEN):
        return found.strip()
    path = Path(environment.get(TOKEN_PATH) or Path.home() / ".ray" / "auth_token")
    try:
        return files.read_text(path.resolve()).strip()  # a Kubernetes secret is a link
    except (OSError, ValueError):
        return ""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would send the token to another server."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def request(path: str, body: Mapping[str, Any] | None = None, method: str = "") -> Any:
    """The JSON response to a request, None if there is no such job. Raises ClusterError."""
    where = address()
    headers = {"Content-Type": "application/json"}
    if secret := token():
        headers["Authorization"] = f"Bearer {secret}"
    data = None if body is None else json.dumps(body).encode()
    try:
        sent = urllib.request.Request(f"{where}{path}", data, headers, method=method or None)
        # Proxies are for the internet; the head of a cluster is reached directly, as by Ray's own commands.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)
        with opener.open(sent, timeout=REQUEST_SECONDS) as response:
            return json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404:
                return None
            if error.code in (401, 403):
                raise ClusterError(
                    f"Ray at {where} requires a token: set {TOKEN} or {TOKEN_PATH} where the page is started."
                    if not headers.get("Authorization")
                    else f"Ray at {where} does not accept the token in {TOKEN} or {TOKEN_PATH}."
                ) from None
            said = error.read(MESSAGE).decode(errors="replace").strip().splitlines()
        raise ClusterError(f"Ray at {where} responds with {error.code}: {said[-1] if said else error.reason}") from None
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise ClusterError(f"Ray does not respond at {where} ({reason}); set {ADDRESS} to the head node.") from None


class Ray(Cluster):
    """The Ray cluster of RAY_API_SERVER_ADDRESS, and the run in `folder`."""

    name = "Ray"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def submit(self, arguments: Sequence[str]) -> str:
        """Submit the run's driver. The id is chosen here, so that a job is found although the response was lost."""
        job = f"footplate-{secrets.token_hex(4)}"
        settings = json.loads(files.read_text(self.folder / RAY_JOB))
        place = self.folder.resolve()
        words = (settings["ray_python"], str(place / RAY_DRIVER), str(place), job, *arguments)
        variables = {name: os.environ[name] for name in INHERITED if os.environ.get(name)}
        body: dict[str, Any] = {
            "entrypoint": shlex.join(words),
            "submission_id": job,
            "metadata": {"run": place.name},
        }
        body["runtime_env"] = {"env_vars": variables}
        try:
            if request("/api/jobs/", body) is None:
                raise ClusterError(f"There is no Ray dashboard at {address()}; set {ADDRESS} to that of the head node.")
        except ClusterError:
            found = None
            with contextlib.suppress(ClusterError):
                found = request(f"/api/jobs/{job}")
            if not found:
                raise
        return job

    def find(self, job: str, max_age: float) -> Job | None:
        """A job, and what its driver has written about it."""
        if (about := request(f"/api/jobs/{job}")) is None:
            return None
        state = str(about.get("status", ""))
        driver = self._driver(job)
        if end := ENDED.get(state):
            cause = "The Ray job was stopped." if end == STOPPED else ""
            return Job(job, state, end=end, cause=cause if driver or end != FAILED else _message(about))
        if not driver:
            return Job(job, state, waits=True, text="Waiting for Ray to start the job.")
        return Job(job, state, bool(driver.get("waits")), str(driver.get("text", "")))

    def cancel(self, job: str) -> None:
        """Stop a job. Ray kills its driver after 3 seconds, and then the processes on the nodes end."""
        request(f"/api/jobs/{job}/stop", method="POST")

    def wait_for_processes(self) -> str:
        """Wait for the end of the processes: each node has a file while some may be running there. Returns a sentence
        about those that are left, or ''."""
        until = time.monotonic() + NODE_SECONDS
        while left := sorted(self.folder.joinpath(RAY_NODES).glob("*")):
            if time.monotonic() > until:
                hosts = ", ".join(_host(file) for file in left)
                return f"Ray's nodes {hosts} have not reported that the processes of the run ended."
            time.sleep(0.2)
        return ""

    def _driver(self, job: str) -> dict[str, Any]:
        """What the driver of this job has written; empty before it has started."""
        try:
            found = json.loads(files.read_text(self.folder / RAY_STATUS))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) and found.get("job") == job else {}


def _host(marker: Path) -> str:
    """The host name in the file of a node; the name of the file if that cannot be read, or was just deleted."""
    try:
        return files.read_text(marker, errors="replace").strip()
    except OSError:
        return marker.name


def _message(about: Mapping[str, Any]) -> str:
    """Why a job failed whose driver did not start, from the end of its message."""
    lines = [line.strip() for line in str(about.get("message", "")).splitlines() if line.strip()]
    last = lines[-1][:MESSAGE].rstrip(".") if lines else "it ended without a message"
    return f"The Ray job could not start: {last}. Set ray.python to the Python that has the cluster's Ray."


if __name__ == "__main__":
    sys.exit(follow(Ray(Path()), sys.argv[1:]))
