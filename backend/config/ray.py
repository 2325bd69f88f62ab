"""The job that a run becomes on a Ray cluster."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from backend.config.fields import RAY, Lines, Section, Ui, each_matches

AMOUNTS = each_matches(  # Ray's smallest fraction of a resource is 0.0001
    r"(?!(CPU|GPU|object_store_memory)=)[\w.:/-]+=\d+(\.\d{1,4})?",
    "must have one NAME=amount per line, with at most four decimals, for resources other than CPU, GPU and "
    "object_store_memory",
)


class Ray(Section):
    """The Ray job: the resources that it reserves on each node."""

    cpus: Annotated[int, Field(ge=0, le=4096), Ui("CPUs per node", when=RAY)] = 0
    """CPUs to reserve on each node; 0 reserves CPUs in proportion to the GPUs used, or all CPUs without GPUs."""
    resources: Annotated[Lines, AMOUNTS, Ui("Custom resources per node", when=RAY, widget="lines")] = ()
    """Further resources to reserve on each node, one NAME=amount per line, such as accelerator_type:H100=0.001, or
    memory in bytes; usually empty."""
    python: Annotated[str, Ui("Python of the Ray job", when=RAY)] = "python"
    """Python interpreter on the head node that has the cluster's version of ray; python works in Ray's own images. The
    training itself uses Footplate's Python."""
