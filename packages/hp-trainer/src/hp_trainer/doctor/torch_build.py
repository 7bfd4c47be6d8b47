"""Which torch is installed, and does it import and work?

In: its metadata, then a child process that imports it. Out: findings, and `TorchReport` with what the child saw.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from hp_trainer.doctor.findings import Finding, Level

__all__ = ["TorchReport", "examine_torch"]

SECONDS_TO_IMPORT = 120.0

# Runs in a child: a broken extension or a hanging driver must not take the doctor along. The last line is JSON.
_CHILD = """\
import json, os, shutil, sys
import torch, torch.distributed as dist
report = {"version": torch.__version__, "threads": torch.get_num_threads(), "cuda": torch.version.cuda}
report["backends"] = [name for name in ("gloo", "nccl", "mpi", "ucc", "xccl")
                      if dist.is_available() and getattr(dist, f"is_{name}_available")()]
report["sum"] = float(torch.ones(4) @ torch.ones(4))
device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
report["device"] = None if device is None else device.type
report["count"] = torch.accelerator.device_count() if device is not None else 0
if device is not None:
    module = torch.get_device_module(device)
    report["names"] = [module.get_device_name(index) for index in range(report["count"])]
    report["device_sum"] = float(torch.ones(4, device=device) @ torch.ones(4, device=device))
print(json.dumps(report))
"""


@dataclass(frozen=True, slots=True)
class TorchReport:
    """What a child process saw: `values` of a working torch, or the error of one that is not."""

    values: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def examine_torch() -> tuple[list[Finding], TorchReport]:
    """Findings about torch itself, and the report that the accelerators are judged by."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        remedy = 'pip install "hp-protocols[torch]"; the README says which build of torch to take'
        return [Finding("torch", Level.BROKEN, "not installed", remedy)], TorchReport(error="not installed")
    report = _import_in_child()
    if report.error is not None:
        return [Finding("torch", Level.BROKEN, f"{version} does not import: {report.error}", _remedy(report))], report
    values = report.values
    build = f"built for CUDA {values['cuda']}" if values["cuda"] else "without CUDA"
    threads = f"{values['threads']} thread{'s' * (values['threads'] != 1)}"
    findings = [Finding("torch", Level.OK, f"{values['version']}, {build}, {threads}")]
    if "gloo" in values["backends"]:
        findings.append(Finding("distributed", Level.OK, ", ".join(values["backends"])))
    else:
        remedy = "this build of torch has no gloo: several processes on a CPU cannot work; take an official build"
        findings.append(Finding("distributed", Level.BROKEN, ", ".join(values["backends"]) or "no backend", remedy))
    return findings, report


def _import_in_child() -> TorchReport:
    try:
        child = subprocess.run(
            [sys.executable, "-c", _CHILD], capture_output=True, text=True, timeout=SECONDS_TO_IMPORT, check=False
        )
    except subprocess.TimeoutExpired:
        return TorchReport(error=f"it did not finish within {SECONDS_TO_IMPORT:.0f} s")
    if child.returncode == 0:
        return TorchReport(values=json.loads(child.stdout.splitlines()[-1]))
    return TorchReport(error=_cause(child.stderr) or f"the process ended with code {child.returncode}")


def _cause(stderr: str) -> str:
    """The errors of a traceback, innermost first: chained ones end each block with a line that is not indented."""
    lines = [line for line in stderr.splitlines() if line and not line[0].isspace()]
    chained = [line for line in lines if not line.startswith(("Traceback", "The above", "During handling"))]
    return " ← ".join(dict.fromkeys(chained[-3:]))


def _remedy(report: TorchReport) -> str:
    if "torch_npu" in (report.error or ""):
        switch = "set" if "TORCH_DEVICE_BACKEND_AUTOLOAD" not in os.environ else "keep"
        return (
            "source the CANN toolkit's set_env.sh (ASCEND_HOME_PATH); or run without the NPU: "
            f"{switch} TORCH_DEVICE_BACKEND_AUTOLOAD=0, or pip uninstall torch-npu"
        )
    return "reinstall torch; the README says which build to take"
