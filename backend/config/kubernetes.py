"""The job that a run becomes on a Kubernetes cluster."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from backend.config.fields import KUBERNETES, JsonText, Lines, Section, Ui, each_matches, matches

LABEL = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
NAME = matches(LABEL, "must be a name in Kubernetes: lowercase letters, digits, - and .")


VOLUMES = each_matches(
    rf"({LABEL}|/[^=]*)=/[^=]+",
    "must have one volume per line: NAME=/path for a volume claim, or /node/path=/path for a folder of the node",
)
AMOUNTS = each_matches(
    r"(?!(cpu|memory)=)[\w.:/-]+=\d+[A-Za-z]*",
    "must have one NAME=amount per line, for resources other than cpu and memory",
)
LABELS = each_matches(r"[\w./-]+=[\w.-]*", "must have one LABEL=value of a node per line")
TOLERATIONS = each_matches(
    r"[\w./-]+(=[\w.-]+)?(:(NoSchedule|PreferNoSchedule|NoExecute))?",
    "must have one KEY=value:effect of a taint per line",
)


class Kubernetes(Section):
    """The Kubernetes job: its image and volumes, and the resources that it requests for each node's pod."""

    image: Annotated[
        str, matches(r"[\w./:@-]+", "must be the name of an image, such as registry/footplate:1"),
        Ui("Image", when=KUBERNETES),
    ] = ""  # fmt: skip
    """Container image in which Footplate is installed; the Containerfile of the project makes one."""
    volumes: Annotated[Lines, VOLUMES, Ui("Volumes", when=KUBERNETES, widget="lines")] = ()
    """Volumes of each pod, one NAME=/path per line: a volume claim and the path in the pod, such as runs=/runs. The
    runs folder must be in one of them, under the same path as here."""
    queue: Annotated[str, NAME, Ui("Kueue queue", when=KUBERNETES)] = ""
    """Local queue of Kueue that decides when the job starts; empty submits the job directly."""
    namespace: Annotated[str, NAME, Ui("Namespace", when=KUBERNETES)] = ""
    """Namespace of the job; empty uses that of your kubeconfig."""
    node_labels: Annotated[Lines, LABELS, Ui("Node labels", when=KUBERNETES, widget="lines")] = ()
    """Labels that the nodes must have, one LABEL=value per line, such as
    nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3."""
    cpus: Annotated[int, Field(ge=0, le=4096), Ui("CPUs per node", when=KUBERNETES)] = 0
    """CPUs to request on each node; 0 requests 90% of the CPUs in proportion to the GPUs used, or 90% of all CPUs
    without GPUs, since each node also runs pods of the cluster."""
    memory_gib: Annotated[int, Field(ge=0, le=2**16), Ui("Memory per node", when=KUBERNETES, unit="GiB")] = 0
    """RAM of each pod, which is killed if it uses more; 0 sets no limit."""
    gpu_resource: Annotated[
        str, matches(r"[\w.-]+/[\w.-]+", "must be the name of a resource, such as nvidia.com/gpu"),
        Ui("GPU resource", when=KUBERNETES),
    ] = "nvidia.com/gpu"  # fmt: skip
    """Name under which the cluster offers its GPUs, such as nvidia.com/gpu or amd.com/gpu."""
    resources: Annotated[Lines, AMOUNTS, Ui("Further resources per node", when=KUBERNETES, widget="lines")] = ()
    """Further resources of each pod, one NAME=amount per line, such as rdma/hca=1; usually empty."""
    tolerations: Annotated[Lines, TOLERATIONS, Ui("Tolerations", when=KUBERNETES, widget="lines")] = ()
    """Taints of nodes that the pods tolerate, one KEY=value:effect per line; the taint of the GPU resource is always
    tolerated."""
    priority_class: Annotated[str, NAME, Ui("Priority class", when=KUBERNETES)] = ""
    """Priority class of the pods; empty uses the cluster's default."""
    service_account: Annotated[str, NAME, Ui("Service account", when=KUBERNETES)] = ""
    """Service account of the pods; empty uses the namespace's default."""
    secret: Annotated[str, NAME, Ui("Secret", when=KUBERNETES)] = ""
    """Secret whose entries become environment variables of the run, such as HF_TOKEN."""
    python: Annotated[str, Ui("Python in the image", when=KUBERNETES)] = "python"
    """Python interpreter in the image; Footplate must be installed in it."""
    kubeflow_runtime: Annotated[str, NAME, Ui("Kubeflow runtime", when=KUBERNETES)] = ""
    """Training runtime of Kubeflow Trainer, such as torch-distributed: the run becomes a TrainJob. Empty makes a Job,
    which needs no Kubeflow."""
    extra_pod_spec: Annotated[JsonText, Ui("Extra pod settings (JSON)", when=KUBERNETES, widget="text")] = ""
    """Keys that are merged into the pod's spec and override it, for settings without an option, such as
    {"hostNetwork": true}; containers and volumes are added to those of the run, or to the one of their name, and
    tolerations are added. Usually empty."""
