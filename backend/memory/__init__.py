"""How much memory a run takes: bytes on each device, in the host's RAM and on disk, row by row with its formula.

Floor 2. Imports: derived, machine, shape, spec, and the rooms below. Closed form, no torch. On a CPU run "device" means
the RAM of one process.
"""

from __future__ import annotations

from dataclasses import dataclass

from backend.config import RunSpec
from backend.machine import Machine
from backend.memory.sharding import Row
from backend.memory.totals import OVERHEAD, Account
from backend.memory.uncertainty import shares
from backend.modelspec import ModelShape
from backend.resolve import resolve, selected_gpus

__all__ = ["OVERHEAD", "Account", "Estimate", "Row", "capacity", "estimate"]


@dataclass(frozen=True)
class Estimate:
    """Bytes on each device, on the host and on disk. `fits` is None, with the reason in `unknown`, if nobody knows."""

    rows: tuple[Row, ...] = ()
    capacity_bytes: int = 0
    unknown: str = ""
    shares: tuple[float, float] = (1.0, 1.0)  # least and most of the device's peak that the real one may come to

    def total(self, where: str) -> int:
        """Bytes of all rows of one place."""
        return sum(row.bytes for row in self.rows if row.where == where)

    @property
    def device_bytes(self) -> int:
        """The peak on each device."""
        return self.total("device")

    @property
    def low_bytes(self) -> int:
        """The least that the peak on each device may prove to be."""
        return round(self.shares[0] * self.device_bytes)

    @property
    def high_bytes(self) -> int:
        """The most that the peak on each device may prove to be."""
        return round(self.shares[1] * self.device_bytes)

    @property
    def host_bytes(self) -> int:
        """The peak in RAM of all processes together, beside the devices."""
        return self.total("host")

    @property
    def disk_bytes(self) -> int:
        """What the run leaves on disk at most."""
        return self.total("disk")

    @property
    def fits(self) -> bool | None:
        """Whether the peak stays within what each device has free."""
        return None if self.unknown or not self.capacity_bytes else self.device_bytes <= self.capacity_bytes


def capacity(spec: RunSpec, machine: Machine) -> int:
    """Bytes free on the fullest device that the run uses; of a CPU run, RAM for each process."""
    run = resolve(spec, machine)
    family, count = run.device, run.nproc_per_node
    if family == "cpu":
        return machine.ram_free_bytes // count
    if family != machine.device:
        return 0
    there = selected_gpus(run, machine) or machine.gpus[:count]
    return min((gpu.free_bytes for gpu in there), default=0)


def estimate(
    spec: RunSpec,
    machine: Machine,
    shape: ModelShape | None,
    why: str = "the model's config.json is not at hand",
    longest: int = 0,
    rows: int | None = None,
) -> Estimate:
    """The account of `spec`. `longest` is the longest row in tokens, `rows` how many there are, if known.

    `why` says why there is no shape, as the end of a sentence.
    """
    room = capacity(spec, machine)
    if shape is None or shape.activations_unknown:
        return Estimate((), room, shape.activations_unknown if shape else why)
    account = Account(spec, machine, shape, longest)
    return Estimate((*account.device(), *account.host(), *account.disk(rows)), room, shares=shares(account))
