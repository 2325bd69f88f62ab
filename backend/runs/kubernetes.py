"""Kubernetes: submit, find and delete jobs through the API of the cluster.

Which cluster, and with which rights, is read where kubectl reads it (KUBECONFIG, ~/.kube/config, or the pod in which
the page runs), not from the options of a run. The package kubernetes is imported on first use, because other runs do
not need it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from backend.runs import KUBERNETES_JOB, KUBERNETES_NODES, PLAN, files
from backend.runs.follower import (
    DONE,
    FAILED,
    STOPPED,
    Cluster,
    ClusterError,
    Job,
    answer,
    follow,
    is_interruption,
    stop_request,
)

# In the manifest, until it is submitted. Neither an environment variable nor an object can have such a name.
NAME, FOLDER = "{JOB_NAME}", "{RUN_FOLDER}"
JOB, ATTEMPTS = "FOOTPLATE_JOB", "FOOTPLATE_MAX_RESTARTS"  # environment variables of the pods
INTERRUPTED = "Kubernetes interrupted the run."  # in the stop file, by a pod that was asked to end
INSTALL = "pip install 'footplate[kubernetes]'"
REQUEST_SECONDS = 20.0
OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")  # of the pod in which the page runs
CANCEL_GRACE_SECONDS = 15  # for pods of a canceled job, which waits or had its time for a checkpoint
# Reasons why a container has ended that had started; the last two: its node was lost or restarted.
AFTER_START = ("Error", "Completed", "ContainerStatusUnknown", "Unknown")
NAME_LENGTH = 30  # of the run: with prefix and suffix 50 of 63, since Kubernetes appends numbers of jobs and pods

Tree = dict[str, Any]

# kind -> (group, version, plural, label of its pods)
KINDS: Mapping[str, tuple[str, str, str, str]] = {
    "Job": ("batch", "v1", "jobs", "batch.kubernetes.io/job-name"),
    "TrainJob": ("trainer.kubeflow.org", "v1alpha1", "trainjobs", "jobset.sigs.k8s.io/jobset-name"),
}


class Gone(ClusterError):
    """The cluster does not have the object, or the kind of object."""


class Forbidden(ClusterError):
    """The cluster does not allow a request."""


class Api:
    """The API of the cluster that the kubeconfig names."""

    def __init__(self) -> None:
        try:
            client = importlib.import_module("kubernetes.client")
            config = importlib.import_module("kubernetes.config")
        except ImportError:
            raise ClusterError(f"Kubernetes requires the package kubernetes. Install with: {INSTALL}.") from None
        configuration = client.Configuration()
        try:
            if os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG"):
                config.load_incluster_config(client_configuration=configuration)
                self.namespace = files.read_text(OWN_NAMESPACE.resolve()).strip()  # the path is a link
            else:
                config.load_kube_config(kubeconfig(), client_configuration=configuration)
                current = config.list_kube_config_contexts(kubeconfig())[1]
                self.namespace = current["context"].get("namespace") or "default"
        except (config.ConfigException, yaml.YAMLError, OSError, KeyError, TypeError, ValueError) as error:
            raise ClusterError(
                f"No Kubernetes cluster is configured: {str(error).rstrip('.')}. Set KUBECONFIG."
            ) from None
        configuration.retries = False  # the follower asks again by itself
        self.host = configuration.host
        api = client.ApiClient(configuration)
        self.core, self.custom = client.CoreV1Api(api), client.CustomObjectsApi(api)
        self.error: type[Exception] = client.ApiException

    def call(self, function: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        """The response of the cluster. Raises ClusterError, Gone or Forbidden with a sentence."""
        try:
            return function(*arguments, _request_timeout=REQUEST_SECONDS, **more)
        except self.error as error:
            status = int(getattr(error, "status", 0) or 0)
            kind = {404: Gone, 403: Forbidden}.get(status, ClusterError)
            text = _message(getattr(error, "body", "")) or str(getattr(error, "reason", error))
            if status == 401:
                text = "your credentials are missing or have expired"
            raise kind(f"Kubernetes at {self.host} refuses the request: {text.rstrip('.')}.") from None
        except Exception as error:  # errors of urllib3 and of credential plugins
            reason = getattr(error, "reason", error)
            raise ClusterError(f"Kubernetes does not respond at {self.host} ({reason}).") from None

    def items(self, function: Callable[..., Any], *arguments: Any, **more: Any) -> list[Tree]:
        """The objects of a list, as the cluster has sent them."""
        response = self.call(function, *arguments, _preload_content=False, **more)
        return answer(lambda: [dict(each) for each in json.loads(response.data)["items"]])

    def create(self, body: Tree, dry_run: bool = False) -> Tree:
        """Create an object; with `dry_run`, the cluster only says whether it would accept it."""
        namespace = body["metadata"].get("namespace") or self.namespace
        more: Tree = {"field_validation": "Strict", **({"dry_run": "All"} if dry_run else {})}
        if body["kind"] == "Service":
            made = self.call(self.core.create_namespaced_service, namespace, body, _preload_content=False, **more)
            return answer(lambda: dict(json.loads(made.data)))
        group, version, plural, _ = KINDS[body["kind"]]
        made = self.call(self.custom.create_namespaced_custom_object, group, version, namespace, plural, body, **more)
        return answer(dict, made or {})

    def delete(self, job: str) -> None:
        """Delete a job and its pods; one that is gone is no error."""
        namespace, name, kind = _parts(job)
        group, version, plural, _ = KINDS[kind]
        function = self.custom.delete_namespaced_custom_object
        with contextlib.suppress(Gone):
            self.call(function, group, version, namespace, plural, name, propagation_policy="Foreground")

    def delete_pods(self, job: str, grace_seconds: int) -> None:
        """Delete the pods of a job that is being deleted; otherwise they would get the time of a stop that saves."""
        for pod in self.pods(job):
            with contextlib.suppress(Gone):
                where, more = pod["metadata"], {"grace_period_seconds": grace_seconds, "_preload_content": False}
                self.call(self.core.delete_namespaced_pod, where["name"], where["namespace"], **more)

    def get(self, job: str) -> Tree | None:
        """The job, None if there is none."""
        namespace, name, kind = _parts(job)
        group, version, plural, _ = KINDS[kind]
        try:
            found = self.call(self.custom.get_namespaced_custom_object, group, version, namespace, plural, name)
        except Gone:
            return None
        return answer(dict, found)

    def pods(self, job: str) -> list[Tree]:
        """The pods of a job, replaced ones too."""
        namespace, name, kind = _parts(job)
        return self.items(self.core.list_namespaced_pod, namespace, label_selector=f"{KINDS[kind][3]}={name}")

    def events(self, job: str) -> list[Tree]:
        """What the cluster's controllers have reported about a job; nothing if the user may not read it."""
        namespace, name, _ = _parts(job)
        with contextlib.suppress(Forbidden):
            return self.items(self.core.list_namespaced_event, namespace, field_selector=f"involvedObject.name={name}")
        return []

    def last_line(self, pod: Tree) -> str:
        """The last line that a pod has printed, '' without one."""
        where = pod["metadata"]
        try:
            function = self.core.read_namespaced_pod_log
            response = self.call(function, where["name"], where["namespace"], tail_lines=1, _preload_content=False)
        except ClusterError:
            return ""
        return str(response.data.decode(errors="replace")).strip()


@cache
def _api(marker: tuple[str, float]) -> Api:
    return Api()


def kubeconfig() -> str:
    """Where kubectl looks for clusters; several files are separated by colons."""
    return os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")


def api() -> Api:
    """The API, with the kubeconfig as it is now. Raises ClusterError."""
    file = Path(kubeconfig().split(":")[0])
    return _api((kubeconfig(), file.stat().st_mtime if file.exists() else 0.0))


def filled(text: str, name: str, folder: str, arguments: Sequence[str] = ()) -> list[Tree]:
    """The objects of a manifest with the name of the job, the run's folder and further arguments of the first
    attempt."""
    objects = [_with_names(each, {NAME: name, FOLDER: folder}) for each in yaml.safe_load_all(text)]
    for command in _commands(objects):
        command[-1:] = [*arguments, command[-1]]
    return objects


def _with_names(tree: Any, names: Mapping[str, str]) -> Any:
    """`tree` with the values of `names` in its strings. In the text of the YAML, a folder would need quoting."""
    if isinstance(tree, dict):
        return {key: _with_names(value, names) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_with_names(value, names) for value in tree]
    if isinstance(tree, str):
        for placeholder, value in names.items():
            tree = tree.replace(placeholder, value)
    return tree


def _mounts(tree: Any) -> Iterator[str]:
    """All paths at which an object mounts volumes."""
    if isinstance(tree, dict):
        yield from [tree["mountPath"]] if "mountPath" in tree else []
        tree = list(tree.values())
    if isinstance(tree, list):
        for below in tree:
            yield from _mounts(below)


def folder_problem(job: Tree, folder: Path) -> str:
    """Why the pods of `job` could not read the run's folder, as sentences; '' if they can."""
    if any(folder.is_relative_to(path) for path in _mounts(job)):
        return ""
    return (
        f"The run's folder {folder} is in none of kubernetes.volumes, so the pods could not read it. Add the volume "
        "with the runs folder, under the same path as here."
    )


def _commands(objects: Sequence[Tree]) -> Iterator[list[str]]:
    """The command of the node's program in each object that has one."""
    for each in objects:
        if each["kind"] == "Job":
            yield each["spec"]["template"]["spec"]["containers"][0]["command"]
        elif each["kind"] == "TrainJob":
            yield each["spec"]["trainer"]["command"]


class Kubernetes(Cluster):
    """The cluster of the kubeconfig, and the run in `folder`."""

    name = "Kubernetes"
    interruption = INTERRUPTED

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.deleted: set[str] = set()

    def submit(self, arguments: Sequence[str]) -> str:
        """Create the objects of kubernetes.yaml. The Service belongs to the Job, and is deleted with it."""
        text = files.read_text(self.folder / KUBERNETES_JOB)
        name = job_name(json.loads(files.read_text(self.folder / PLAN))["name"])
        place = self.folder.resolve()
        job, *others = filled(text, name, str(place), arguments)
        if why := folder_problem(job, place):
            raise ClusterError(why)
        cluster = api()
        namespace = job["metadata"].get("namespace") or cluster.namespace
        made = f"{namespace}/{name}" + ("" if job["kind"] == "Job" else f"/{job['kind']}")
        uid = cluster.create(job).get("metadata", {}).get("uid", "")
        owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": name, "uid": uid}
        try:
            for other in others:
                other["metadata"]["ownerReferences"] = [owner]
                cluster.create(other)
        except ClusterError:
            cluster.delete(made)
            raise
        return made

    def find(self, job: str, max_age: float) -> Job | None:
        """A job, and what its pods wait for."""
        cluster = api()
        if (about := cluster.get(job)) is None:
            known = job in self.deleted or is_interrupted(self.folder)
            return Job(job, "Deleted", end=STOPPED, cause="The Kubernetes job was deleted.") if known else None
        status = about.get("status", {})
        true = {each["type"]: each for each in status.get("conditions", ()) if each.get("status") == "True"}
        if "Complete" in true:
            return Job(job, "Complete", end=DONE)
        pods = cluster.pods(job)
        if "Failed" in true:
            if is_interrupted(self.folder):  # a TrainJob, whose runtime has replaced no pod
                return Job(job, "Failed", end=STOPPED, cause=INTERRUPTED)
            return Job(job, "Failed", end=FAILED, cause=self._cause(cluster, job, pods, true["Failed"]))
        if about["metadata"].get("deletionTimestamp"):
            self.deleted.add(job)
            return Job(job, "Deleting")
        is_running = any(pod.get("status", {}).get("phase") == "Running" for pod in pods)
        if "Suspended" in true or about["spec"].get("suspend"):
            if is_running:  # its pods still save; a job that waits would lose their stop request
                return Job(job, "Suspending")
            return Job(job, "Suspended", waits=True, text=_suspension(about, cluster.events(job)))
        live = [pod for pod in pods if pod.get("status", {}).get("phase") in ("Pending", "Running", "Succeeded")]
        waiting = [pod for pod in live if pod["status"]["phase"] == "Pending"]
        spec = about["spec"]
        nodes = spec.get("completions") or spec.get("trainer", {}).get("numNodes") or 1
        if len(live) - len(waiting) >= nodes:
            return Job(job, "Running")
        reasons = sorted({text for pod in waiting if (text := _reason(pod))}) or _warnings(cluster.events(job))
        text = " ".join(reasons) or "Kubernetes has not started the pods yet."
        return Job(job, "Pending", waits=True, text=text)

    def cancel(self, job: str) -> None:
        """Delete the job. Kubernetes asks its pods to end, and keeps the job until they have."""
        api().delete(job)
        self.deleted.add(job)
        api().delete_pods(job, CANCEL_GRACE_SECONDS)

    def _cause(self, cluster: Api, job: str, pods: Sequence[Tree], condition: Tree) -> str:
        """Why a job failed, unless its own log says so."""
        for pod in pods:
            for ended in _terminations(pod):
                if ended.get("reason") == "OOMKilled":
                    return (
                        f"The pod {pod['metadata']['name']} was killed because it used more memory than its limit. "
                        "Increase kubernetes.memory_gib, or keep less in RAM, for example by offloading less."
                    )
                if ended.get("reason") not in AFTER_START:
                    text = str(ended.get("message") or ended.get("reason") or "it has no reason").rstrip(".")
                    return f"The pod {pod['metadata']['name']} could not start: {text}."
        started = self.folder.joinpath(KUBERNETES_NODES, _parts(job)[1]).exists()  # a pod of this job has begun
        if not started and (said := next(filter(None, map(cluster.last_line, pods)), "")):
            return said if said.endswith(".") else f"The pod could not start the run: {said}."
        return "" if started else f"Kubernetes says: {condition.get('message') or condition.get('reason')}."


def is_interrupted(folder: Path) -> bool:
    """Whether a pod, and not a user, has requested that the run in `folder` stops."""
    return is_interruption(stop_request(folder), INTERRUPTED)


def _parts(job: str) -> tuple[str, str, str]:
    """Namespace, name and kind in the id of a job."""
    namespace, name, kind = (*job.split("/"), "Job")[:3]
    return namespace, name, kind


def job_name(run: str) -> str:
    """A new name for a job of the run with this name."""
    slug = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")[:NAME_LENGTH].strip("-")
    return f"footplate-{slug}-{secrets.token_hex(4)}".replace("--", "-")


def _message(body: Any) -> str:
    """The message of an answer that refuses a request."""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def _terminations(pod: Tree) -> Iterator[Tree]:
    for status in pod.get("status", {}).get("containerStatuses", ()):
        if ended := status.get("state", {}).get("terminated"):
            yield ended


def _reason(pod: Tree) -> str:
    """What a pending pod waits for, as a sentence; '' if it does not say."""
    status = pod["status"]
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        waiting = container.get("state", {}).get("waiting", {})
        reason, text = waiting.get("reason", ""), str(waiting.get("message", "")).rstrip(".")
        if reason in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName"):
            return f"Kubernetes cannot pull the image {container.get('image', '')}: {text or reason}."
        if reason in ("ContainerCreating", "PodInitializing"):
            return "Kubernetes is preparing the containers: it pulls the image and mounts the volumes."
        if reason:
            return f"Kubernetes cannot start a container: {text or reason}."
    for condition in status.get("conditions", ()):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"The scheduler says: {str(condition.get('message') or condition.get('reason')).rstrip('.')}."
    return ""


def _warnings(events: Sequence[Tree]) -> list[str]:
    """Why the job's controller cannot create pods, such as a quota."""
    texts = [str(event.get("message", "")).rstrip(".") for event in events if event.get("type") == "Warning"]
    return [f"Kubernetes cannot create the pods: {texts[-1]}."] if texts else []


def _suspension(about: Tree, events: Sequence[Tree]) -> str:
    queue = about["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name")
    if not queue:
        return "The job is suspended. It starts when someone resumes it: kubectl patch with suspend: false."
    why = [str(event.get("message", "")).rstrip(".") for event in events if event.get("reason") == "Pending"]
    return f"Kueue has not started it from the queue {queue} yet{': ' + why[-1] if why else ''}."


if __name__ == "__main__":
    sys.exit(follow(Kubernetes(Path()), sys.argv[1:]))
