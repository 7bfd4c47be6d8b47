"""What `hp doctor` knows about this machine: packages, torch, accelerators, and room to work.

In: nothing but the machine. Out: `Finding`s, each with a remedy where something is missing. Nothing here imports
torch in this process: a broken device extension would take the doctor down with the patient.
"""

from __future__ import annotations

from hp_trainer.doctor.accelerators import examine_accelerators
from hp_trainer.doctor.findings import Finding, Level
from hp_trainer.doctor.machine import examine_machine
from hp_trainer.doctor.packages import examine_packages
from hp_trainer.doctor.torch_build import examine_torch

__all__ = ["Finding", "Level", "examine_accelerators", "examine_machine", "examine_packages", "examine_torch"]
