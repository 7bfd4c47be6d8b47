"""Which accelerators does this machine have, and can torch use them?

In: device nodes, environment variables and metadata, then what torch saw. Out: findings. The hardware is looked at
before torch is asked, so that "no driver", "no extension" and "the wrong torch" are told apart.
"""

from __future__ import annotations

import ctypes.util
import glob
import os
import shutil
from importlib import metadata
from pathlib import Path

from hp_trainer.doctor.findings import Finding, Level
from hp_trainer.doctor.torch_build import TorchReport

__all__ = ["examine_accelerators"]


def examine_accelerators(report: TorchReport) -> list[Finding]:
    """Ascend NPUs, then NVIDIA GPUs, then what hyper-parallel would train on."""
    return [*_examine_ascend(report), *_examine_nvidia(report), _device_in_use(report)]


def _examine_ascend(report: TorchReport) -> list[Finding]:
    nodes = sorted(glob.glob("/dev/davinci[0-9]*"))
    try:
        extension: str | None = metadata.version("torch-npu")
    except metadata.PackageNotFoundError:
        extension = None
    if not nodes and extension is None:
        return [Finding("Ascend NPU", Level.OPTIONAL, "no device (/dev/davinci*) and no torch-npu")]
    toolkit = os.environ.get("ASCEND_HOME_PATH")
    library = _runtime_library(toolkit)
    found = (
        f"{len(nodes)} devices, torch-npu {extension or 'not installed'}, "
        f"CANN {toolkit or 'not sourced'}, libascendcl {library or 'not found'}"
    )
    if not nodes:
        remedy = "torch-npu without a device: pip uninstall torch-npu, or pass /dev/davinci* into this container"
        return [Finding("Ascend NPU", Level.WARNING, found, remedy)]
    if extension is None:
        return [Finding("Ascend NPU", Level.WARNING, found, 'pip install "hp-trainer[npu]"')]
    if toolkit is None or library is None:
        remedy = "install the CANN toolkit and source its set_env.sh"
        return [Finding("Ascend NPU", Level.BROKEN, found, remedy)]
    if report.values.get("device") != "npu":
        return [
            Finding("Ascend NPU", Level.BROKEN, f"{found}; torch sees none", "npu-smi info shows the driver's state")
        ]
    return [Finding("Ascend NPU", Level.OK, found)]


def _runtime_library(toolkit: str | None) -> str | None:
    for folder in [Path(toolkit) / "lib64"] if toolkit else []:
        if (folder / "libascendcl.so").exists():
            return str(folder / "libascendcl.so")
    return ctypes.util.find_library("ascendcl")


def _examine_nvidia(report: TorchReport) -> list[Finding]:
    nodes = sorted(glob.glob("/dev/nvidia[0-9]*"))
    if not nodes:
        return [Finding("NVIDIA GPU", Level.OPTIONAL, "no device (/dev/nvidia*)")]
    found = f"{len(nodes)} devices"
    if report.error is None and not report.values["cuda"]:
        return [
            Finding(
                "NVIDIA GPU", Level.WARNING, f"{found}, but this torch is built without CUDA", "install a CUDA build"
            )
        ]
    if report.values.get("device") != "cuda":
        hint = "nvidia-smi shows the driver's state" if shutil.which("nvidia-smi") else "the driver is not installed"
        return [Finding("NVIDIA GPU", Level.BROKEN, f"{found}; torch sees none", hint)]
    return [
        Finding("NVIDIA GPU", Level.OK, ", ".join(sorted(set(report.values["names"]))) + f" × {report.values['count']}")
    ]


def _device_in_use(report: TorchReport) -> Finding:
    if report.error is not None:
        return Finding("trains on", Level.BROKEN, "nothing: torch does not work")
    asked = os.environ.get("HP_DEVICE")
    there = report.values["device"] or "cpu"
    if asked and asked not in (there, "cpu"):
        return Finding(
            "trains on", Level.BROKEN, f"HP_DEVICE={asked}, which is not here", f"unset HP_DEVICE, or {there}"
        )
    return Finding("trains on", Level.OK, asked or (there if there in ("npu", "cuda") else "cpu"))
