"""A stand-in for ray where it is not installed: actors are objects of the driver's process, and nodes are counted.

`make soak` runs the same tests with the real library. FAKE_RAY names a JSON file with the number of `nodes`, of those
that are `free`, and of actors whose process has died (`dead`).
"""

import json
import os
from pathlib import Path


class RayActorError(Exception):
    pass


class exceptions:
    RayActorError = RayActorError


class _Method:
    def __init__(self, actor, name):
        self.actor, self.name = actor, name

    def remote(self, *arguments):
        return lambda: self.actor.call(self.name, arguments)


class _Actor:
    def __init__(self, kind, rank):
        self.instance, self.rank = kind(), rank

    def call(self, name, arguments):
        if self.rank in state()["dead"]:
            raise RayActorError
        return getattr(self.instance, name)(*arguments)

    def __getattr__(self, name):
        return _Method(self, name)


class _Class:
    def __init__(self, kind):
        self.kind = kind

    def options(self, num_cpus, num_gpus, memory, resources, scheduling_strategy):
        if resources.keys() & {"CPU", "GPU", "memory", "object_store_memory"}:
            raise ValueError("The resources dictionary must not contain these keys")  # as Ray says of two at a time
        self.rank = scheduling_strategy.rank
        return self

    def remote(self):
        return _Actor(self.kind, self.rank)


def state():
    return json.loads(Path(os.environ["FAKE_RAY"]).read_text())


def init(address, log_to_driver, logging_level):
    assert address == "auto"


def remote(kind):
    return _Class(kind)


def get(results):
    return [result() for result in results] if isinstance(results, list) else results()


def kill(actor):
    """Its pipe closes, as when Ray kills the process of an actor."""
    if process := getattr(actor.instance, "process", None):
        process.stdin.close()


def nodes():
    return [{"Alive": True, "Resources": {"CPU": 2.0}} for _ in range(state()["nodes"])]
