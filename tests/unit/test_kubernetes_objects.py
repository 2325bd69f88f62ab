"""Kubernetes: the objects that are created, what the cluster's answers mean, and the exported files."""

import errno
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import yaml

from backend.__main__ import main
from backend.config import RunSpec
from backend.config.options import SpecError, edit, parse
from backend.launch.clusters import kubernetes_nodes
from backend.launch.plan import plan
from backend.machine import GIB, Machine, machines
from backend.runs import KUBERNETES_NODES, STOP_SPARE, kubernetes, kubernetes_node
from backend.runs.follower import ClusterError
from backend.runs.kubernetes import Forbidden, Kubernetes, filled, job_name

sys.path.append(str(Path(__file__).parent.parent / "process"))
from kubernetes_cluster import node, unknown_keys

ON_KUBERNETES = {
    "launch.place": "kubernetes",
    "parallel.strategy": "fsdp2",
    "launch.nnodes": 2,
    "launch.nproc_per_node": 8,
    "kubernetes.image": "registry/footplate:1",
    "kubernetes.volumes": ("runs=/runs", "/data/models=/models"),
}
EVERYTHING = {
    "kubernetes.queue": "research",
    "kubernetes.namespace": "team",
    "kubernetes.node_labels": ("nvidia.com/gpu.product=H100",),
    "kubernetes.memory_gib": 400,
    "kubernetes.resources": ("rdma/hca=1",),
    "kubernetes.tolerations": ("dedicated=training:NoSchedule", "spot"),
    "kubernetes.service_account": "trainer",
    "launch.env": {"NCCL_DEBUG": "INFO"},
}
ONLY_JOB = {"kubernetes.secret": "tokens", "kubernetes.priority_class": "high"}
EXTRA = {"kubernetes.extra_pod_spec": '{"hostNetwork": true, "dnsPolicy": "ClusterFirstWithHostNet"}'}
MACHINE = machines()["8x80gb"]


def objects(changes, arguments=()):
    text = plan(edit(RunSpec(), {**ON_KUBERNETES, **changes}), MACHINE).files["kubernetes.yaml"]
    return filled(text, "footplate-x", "/runs/x", arguments)


@pytest.mark.parametrize("changes", [{}, EVERYTHING, {**EVERYTHING, **ONLY_JOB, **EXTRA}, {"launch.device": "cpu"}])
def test_the_official_models_know_every_key_of_a_job(changes):
    made = objects(changes)
    assert [each["kind"] for each in made] == ["Job", "Service"]
    assert not [unknown_keys(each) for each in made if unknown_keys(each)]


@pytest.mark.parametrize("changes", [{}, EVERYTHING])
def test_the_models_of_kubeflow_know_every_key_of_a_train_job(changes):
    (made,) = objects({**changes, "kubernetes.kubeflow_runtime": "torch-distributed"}, ["--from-scratch"])
    assert made["kind"] == "TrainJob" and not unknown_keys(made)
    command = made["spec"]["trainer"]["command"]
    assert command[-3:] == ["--folder=/runs/x", "--from-scratch", "--"]


@pytest.mark.parametrize("kubeflow", ["", "torch-distributed"])
def test_name_and_folder_replace_nothing_else(kubeflow):
    """Folders have any characters, and environment variables have names that users choose. Kubernetes would replace
    $(HOME) in a value, and reads $$ as $."""
    folder, env = "/runs/josé: 'a' # b\\c", {"WANDB_JOB_NAME": "x", "RUN_FOLDER": "JOB_NAME", "NOTE": "$(HOME)$$"}
    changes = {**ON_KUBERNETES, "launch.env": env, "kubernetes.kubeflow_runtime": kubeflow}
    text = plan(edit(RunSpec(), changes), MACHINE).files["kubernetes.yaml"]
    spec = filled(text, "footplate-x", folder)[0]["spec"]
    container = spec["trainer"] if kubeflow else spec["template"]["spec"]["containers"][0]
    assert f"--folder={folder}" in container["command"] if kubeflow else container["workingDir"] == folder
    found = {each["name"]: each.get("value") for each in container["env"]}
    assert {**env, "NOTE": "$$(HOME)$$$$"}.items() <= found.items() and found["FOOTPLATE_JOB"] == "footplate-x"


def test_unknown_keys_are_found():
    """The proof that the tests above can fail."""
    job, service = objects({})
    job["spec"]["template"]["spec"]["subdomian"] = "x"
    assert unknown_keys(job) == ["spec.template.spec.subdomian"]
    service["spec"]["clusterIp"] = "None"
    assert unknown_keys(service)
    (train_job,) = objects({"kubernetes.kubeflow_runtime": "torch-distributed"})
    train_job["spec"]["trainer"]["numNode"] = 2
    assert unknown_keys(train_job) == [".spec.trainer.numNode"]


def test_one_node_needs_no_service():
    (job,) = objects({"parallel.strategy": "single"})
    variables = {each["name"]: each.get("value") for each in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert variables["PET_MASTER_ADDR"] == "localhost"


def test_what_the_pods_get():
    job, service = objects({**EVERYTHING, **ONLY_JOB}, ["--from-scratch"])
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research" and job["spec"]["suspend"]
    assert container["command"][-2:] == ["--from-scratch", "--"] and container["workingDir"] == "/runs/x"
    assert container["resources"]["limits"] == {"memory": "400Gi", "nvidia.com/gpu": "8", "rdma/hca": "1"}
    assert pod["subdomain"] == service["metadata"]["name"] == "footplate-x"
    assert pod["terminationGracePeriodSeconds"] > RunSpec().save.stop_timeout
    assert {"key": "spot", "operator": "Exists"} in pod["tolerations"]
    assert {"name": "NCCL_DEBUG", "value": "INFO"} in container["env"]
    assert [volume["mountPath"] for volume in container["volumeMounts"]] == ["/runs", "/models", "/dev/shm"]


@pytest.mark.parametrize("kubeflow", ["", "torch-distributed"])
def test_extra_settings_do_not_remove_what_the_run_needs(kubeflow):
    """Without its container the pods would train nothing, and without its volume they would not start."""
    node, shm = {"name": "node", "tty": True}, {"name": "shm", "emptyDir": {"sizeLimit": "9Gi"}}
    extra = {
        "containers": [{"name": "logs"}, node], "volumes": [shm, {"name": "cache"}], "tolerations": [{"key": "spot"}]
    }  # fmt: skip
    changes = {"kubernetes.resources": ("nvidia.com/gpu=1", "rdma/hca=1"), "kubernetes.kubeflow_runtime": kubeflow}
    job = objects({**changes, "kubernetes.extra_pod_spec": json.dumps(extra)})[0]["spec"]
    if kubeflow:
        limits = job["trainer"]["resourcesPerNode"]["limits"]
        job = job["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]["template"][
            "spec"
        ]
    pod = job["template"]["spec"]
    assert [each["name"] for each in pod["containers"]] == ["node", "logs"]
    assert pod["containers"][0]["tty"] and pod["containers"][0].get("image", kubeflow)
    assert [each["name"] for each in pod["volumes"]] == ["volume-0", "volume-1", "shm", "cache"]
    assert pod["volumes"][2] == shm
    assert [each["key"] for each in pod["tolerations"]] == ["nvidia.com/gpu", "spot"]
    limits = limits if kubeflow else pod["containers"][0]["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": "8", "rdma/hca": "1"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("volumes", ("runs",)),
        ("volumes", ("Runs=/runs",)),
        ("node_labels", ("gpu",)),
        ("resources", ("cpu=1",)),
        ("tolerations", ("a b",)),
        ("image", "an image"),
        ("namespace", "Team"),
        ("extra_pod_spec", "[1]"),
    ],
)
def test_invalid_values_are_named(name, value):
    with pytest.raises(SpecError, match=f"kubernetes.{name}"):
        parse({**ON_KUBERNETES, f"kubernetes.{name}": value})


def test_names_of_jobs():
    assert len(job_name("A very long name of a run that goes on and on, with spaces")) <= 50
    assert job_name("Ü").startswith("footplate-") and "--" not in job_name("Ü")
    assert job_name("a") != job_name("a")


def test_quantities():
    found = [kubernetes_nodes.amount(text) for text in ("7910m", "8", "131911984Ki", "1e", "0", "2.5G", "")]
    assert found == [7.91, 8, 131911984 * 1024, 0, 0, 2.5e9, 0]


def test_nodes():
    """Their GPUs by the labels of operators and clouds; cordoned nodes run no pods."""
    rows = [
        node("a", "7910m", **{"nvidia.com/gpu": "8"}, labels={"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}),
        node("b", spec={"unschedulable": True}),
        node(
            "c", spec={"taints": [{"key": "spot", "effect": "NoSchedule"}, {"key": "x", "effect": "PreferNoSchedule"}]}
        ),
        node("d", **{"nvidia.com/gpu": "8"}, labels={"cloud.google.com/gke-accelerator": "nvidia-tesla-a100"}),
    ]
    found = list(kubernetes_nodes.parse(rows, "nvidia.com/gpu"))
    assert [(each.cores, each.gpus, each.gpu_type, each.taints) for each in found] == [
        (7, 8, "NVIDIA-H100-80GB-HBM3", ()),
        (2, 0, "", ("spot",)),
        (2, 8, "A100 40GB", ()),  # Google's name of those with 80 GB is nvidia-a100-80gb
    ]


def test_pods_may_get_the_smallest_gpus(monkeypatch):
    kinds = (
        ("NVIDIA-H100-80GB-HBM3", 8, 96),
        ("Tesla-T4", 8, 48),
        ("Tesla-T4", 8, 48),
        ("Tesla-T4", 1, 8),
        ("", 0, 99),
    )
    listed = [kubernetes_nodes.Node(cores, 512 * GIB, gpus, kind, {}, ()) for kind, gpus, cores in kinds]
    monkeypatch.setattr(kubernetes_nodes, "nodes", lambda resource: listed)
    machine, _ = kubernetes_nodes.machine(edit(RunSpec(), ON_KUBERNETES), Machine())
    assert (machine.gpus[0].name, len(machine.gpus), machine.nodes, machine.cores) == ("T4", 8, 3, 48)
    large, problem = kubernetes_nodes.machine(edit(RunSpec(), {**ON_KUBERNETES, "kubernetes.cpus": 90}), Machine())
    assert (large.gpus[0].name, large.nodes, large.cores, problem) == ("H100", 1, 96, "")
    beyond = edit(RunSpec(), {**ON_KUBERNETES, "kubernetes.cpus": 200})
    most, _ = kubernetes_nodes.machine(beyond, Machine())
    assert (most.cores, most.nodes) == (96, 1), "the refusal of the job tells the most CPUs that it could have"


def test_the_memory_and_the_cpus_of_a_pod(monkeypatch):
    """The kernel ends a pod at its memory limit. Where the user may not list nodes, they have what the job requests."""
    listed = [kubernetes_nodes.Node(64, 512 * GIB, 0, "", {}, ())]
    monkeypatch.setattr(kubernetes_nodes, "nodes", lambda resource: listed)

    def machine(**chosen):
        spec = edit(RunSpec(), {**ON_KUBERNETES, **{f"kubernetes.{key}": value for key, value in chosen.items()}})
        made, problem = kubernetes_nodes.machine(spec, Machine(cores=4, ram_free_bytes=GIB, ram_bytes=GIB))
        return made.ram_free_bytes / GIB, made.cores, problem

    assert machine() == (512, 64, "")
    assert machine(memory_gib=16) == (16, 64, "")
    assert machine(memory_gib=600)[2].startswith("Each pod would request 600 GiB of RAM, and the nodes of the")

    def forbidden(resource):
        raise Forbidden("no")

    monkeypatch.setattr(kubernetes_nodes, "nodes", forbidden)
    assert machine(memory_gib=16, cpus=32) == (16, 32, "")


class Answers:
    """The answers of a cluster about one job."""

    def __init__(self, job, pods=(), events=(), line=""):
        self.job, self.listed, self.reported, self.line = job, list(pods), list(events), line

    def get(self, job):
        return self.job

    def pods(self, job):
        return self.listed

    def events(self, job):
        return self.reported

    def last_line(self, pod):
        return self.line


def pod(phase, state=None, condition=None, image="footplate:1"):
    statuses = [{"image": image, "state": state}] if state else []
    return {
        "metadata": {"name": "x-0-abcde"},
        "status": {"phase": phase, "containerStatuses": statuses, "conditions": [condition] if condition else []},
    }


def found(monkeypatch, tmp_path, answers):
    monkeypatch.setattr(kubernetes, "api", lambda: answers)
    return Kubernetes(tmp_path).find("team/x", 0)


def job(*conditions, **more):
    about = {"metadata": {"labels": more.pop("labels", {})}, "spec": {"completions": 2, **more}}
    return {**about, "status": {"conditions": [{"type": each, "status": "True"} for each in conditions]}}


UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available: 3 Insufficient gpu."}
QUOTA = {"type": "Warning", "message": "exceeded quota: team, requested: nvidia.com/gpu=8"}


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        (Answers(job(), [pod("Pending", condition=UNSCHEDULABLE)]), "The scheduler says: 0/3 nodes are available"),
        (
            Answers(
                job(), [pod("Running"), pod("Pending", {"waiting": {"reason": "ImagePullBackOff", "message": "no"}})]
            ),
            "Kubernetes cannot pull the image footplate:1: no.",
        ),
        (Answers(job(), [pod("Pending", {"waiting": {"reason": "ContainerCreating"}})]), "is preparing the containers"),
        (
            Answers(
                job(), [pod("Pending", {"waiting": {"reason": "CreateContainerConfigError", "message": "no secret"}})]
            ),
            "cannot start a container: no secret.",
        ),
        (Answers(job(), events=[QUOTA]), "cannot create the pods: exceeded quota"),
        (Answers(job()), "Kubernetes has not started the pods yet."),
        (Answers(job(suspend=True)), "is suspended"),
        (
            Answers(
                job("Suspended", labels={"kueue.x-k8s.io/queue-name": "q"}),
                events=[{"reason": "Pending", "message": "couldn't assign flavors"}],
            ),
            "Kueue has not started it from the queue q yet: couldn't assign flavors.",
        ),
    ],
)
def test_why_a_job_waits(monkeypatch, tmp_path, answers, text):
    waiting = found(monkeypatch, tmp_path, answers)
    assert waiting.waits and not waiting.end
    assert text in waiting.text


def test_a_suspended_job_does_not_wait_before_its_pods_have_ended(monkeypatch, tmp_path):
    """The follower removes the stop request of a job that waits."""
    assert not found(monkeypatch, tmp_path, Answers(job("Suspended"), [pod("Running"), pod("Failed")])).waits
    assert found(monkeypatch, tmp_path, Answers(job("Suspended"), [pod("Failed"), pod("Failed")])).waits


@pytest.mark.parametrize(
    ("answers", "cause"),
    [
        (
            Answers(job("Failed"), [pod("Failed", {"terminated": {"reason": "OOMKilled"}})]),
            "more memory than its limit",
        ),
        (
            Answers(job("Failed"), [pod("Failed", {"terminated": {"reason": "StartError", "message": "no bash"}})]),
            "could not start: no bash.",
        ),
        (
            Answers(
                job("Failed"), [pod("Failed", {"terminated": {"reason": "Error"}})], line="No module named backend"
            ),
            "The pod could not start the run: No module named backend.",
        ),
    ],
)
def test_why_a_job_failed(monkeypatch, tmp_path, answers, cause):
    failed = found(monkeypatch, tmp_path, answers)
    assert failed.end == "failed" and cause in failed.cause


def test_a_pod_that_was_lost_with_its_node_had_started(monkeypatch, tmp_path):
    """The kubelet and containerd report such containers after the node was lost or restarted."""
    for reason in ("ContainerStatusUnknown", "Unknown"):
        lost = pod("Failed", {"terminated": {"reason": reason, "message": "The container could not be located"}})
        assert "could not start" not in found(monkeypatch, tmp_path, Answers(job("Failed"), [lost])).cause


def test_pods_of_earlier_jobs_say_nothing_about_this_one(monkeypatch, tmp_path):
    """A resumed run has a new job, whose pods may not start, such as with another image."""
    answers = Answers(job("Failed"), [pod("Failed", {"terminated": {"reason": "Error"}})], line="No module backend")
    (tmp_path / KUBERNETES_NODES / "footplate-earlier").mkdir(parents=True)
    assert "No module backend" in found(monkeypatch, tmp_path, answers).cause
    (tmp_path / KUBERNETES_NODES / "x").mkdir()
    assert found(monkeypatch, tmp_path, answers).cause == ""


def test_a_job_that_is_gone_is_unknown_unless_its_pods_were_asked_to_end(monkeypatch, tmp_path):
    assert found(monkeypatch, tmp_path, Answers(None)) is None
    (tmp_path / "stop").write_text(f"save\n{kubernetes.INTERRUPTED}\n")
    assert found(monkeypatch, tmp_path, Answers(None)).end == "stopped"
    (tmp_path / "stop").unlink()
    cluster, deleting = Kubernetes(tmp_path), job()  # somebody deletes a job whose pods have not started
    deleting["metadata"]["deletionTimestamp"] = "2026-11-24T10:30:00Z"
    for answers, end in ((Answers(deleting), ""), (Answers(None), "stopped")):
        monkeypatch.setattr(kubernetes, "api", lambda answers=answers: answers)
        assert cluster.find("team/x", 0).end == end


def test_a_pod_that_is_asked_to_end_writes_the_request_at_once(monkeypatch, tmp_path):
    """A request without its text would be that of a user, which cancels a job whose other pods wait."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kubernetes_node.signal, "signal", lambda *_: None)
    node = kubernetes_node.Node("job", 0)
    seen = []
    monkeypatch.setattr(Path, "write_text", lambda path, *_, **__: seen.append(path.name))
    node._request_stop(15, None)
    assert kubernetes.is_interrupted(tmp_path) and "stop" not in seen
    (tmp_path / "stop").write_bytes(b"save")
    node._request_stop(15, None)
    assert (tmp_path / "stop").read_bytes() == b"save", "a user has asked first: the pod does not come back"
    (tmp_path / "stop").rename(tmp_path / STOP_SPARE)
    opened, open_file = [], os.open
    monkeypatch.setattr("os.open", lambda path, *more: opened.append(Path(path).name) or open_file(path, *more))
    for pod_of_job in (node, kubernetes_node.Node("job", 1)):
        pod_of_job._request_stop(15, None)
        (tmp_path / "stop").unlink()
    names = [name for name in opened if "stop" in name]
    assert len(set(names)) == 2, "one pod would empty the file of another one"
    monkeypatch.setattr("os.open", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    node._request_stop(15, None)
    assert not (tmp_path / "stop").exists(), "on a full disk, the spare file would be a request without its text"


@pytest.mark.parametrize("page", [b"<html>log in</html>", b"[]", b"{}", b'{"items": [1]}'])
def test_a_page_of_a_proxy_is_no_answer(page):
    cluster = object.__new__(kubernetes.Api)
    cluster.error = OSError
    with pytest.raises(ClusterError, match="or of a proxy, cannot be read"):
        cluster.items(lambda **_: SimpleNamespace(data=page))


def test_without_a_cluster_or_the_package(monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ClusterError, match=r"No Kubernetes cluster is configured: .*Set KUBECONFIG"):
        kubernetes.api()
    (tmp_path / "broken").write_text("{")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "broken"))
    with pytest.raises(ClusterError, match="No Kubernetes cluster is configured"):
        kubernetes.api()
    monkeypatch.setitem(sys.modules, "kubernetes.client", None)
    with pytest.raises(ClusterError, match=r"footplate\[kubernetes\]"):
        kubernetes.Api()


def test_an_unreachable_cluster_is_named(monkeypatch, tmp_path):
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],
        "users": [{"name": "u", "user": {"token": "secret-token"}}],
    }  # fmt: skip
    (tmp_path / "config").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(ClusterError, match=r"does not respond at http://127\.0\.0\.1:9") as raised:
        kubernetes.api().get("team/x")
    assert "secret-token" not in str(raised.value)


def test_export_for_kubernetes_and_skypilot(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changes = {**ON_KUBERNETES, "launch.nproc_per_node": 8, "launch.place": "local", "launch.rendezvous": "static"}
    data = tmp_path / "train.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n' * 20)
    spec = {"launch.master_addr": "10.0.0.1", "data.source": "files", "data.files": (str(data),)}
    spec |= {"kubernetes.volumes": ("runs=/runs",)}
    tree = edit(RunSpec(), {**changes, **spec}).model_dump(mode="json", exclude_defaults=True)
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(tree))
    for target, file, code in (("kubernetes", "kubernetes.yaml", 1), ("skypilot", "task.yaml", 0)):
        assert main(["export", "spec.yaml", "--to", target, "--machine", "2x8x80gb"]) == code
        assert {"spec.yaml", "resolved.json", "fsdp.json", file} <= {
            each.name for each in (tmp_path / target).iterdir()
        }
    shown = capsys.readouterr()
    assert "cd kubernetes" not in shown.out and "cd skypilot && sky launch task.yaml" in shown.out
    assert "The files are in kubernetes. Change what is refused before you use them." in shown.err
    assert "kubernetes.image has no effect" not in shown.err and "kubernetes.volumes has no effect" not in shown.err
    assert shown.err.count("Not exported: kubernetes.image: only Kubernetes reads it, SkyPilot does not") == 1
    outside = f"Refused there: --out: The run's folder {tmp_path / 'kubernetes'} is in none of kubernetes.volumes"
    assert outside in shown.err and shown.err.count("none of kubernetes.volumes") == 1, "SkyPilot copies the folder"
    job, _ = yaml.safe_load_all((tmp_path / "kubernetes" / "kubernetes.yaml").read_text())
    assert job["spec"]["template"]["spec"]["containers"][0]["workingDir"] == str(tmp_path / "kubernetes")
    task = yaml.safe_load((tmp_path / "skypilot" / "task.yaml").read_text())
    assert task["num_nodes"] == 2 and task["resources"]["accelerators"].endswith(":8")
    assert task["file_mounts"][str(data)] == str(data)
    assert "--nproc-per-node=8" in task["run"] and "--standalone" not in task["run"] and "--nnodes" not in task["run"]
    assert task["volumes"] == {"/runs": "runs"} and "/runs/$SKYPILOT_TASK_ID\n" in task["run"]
