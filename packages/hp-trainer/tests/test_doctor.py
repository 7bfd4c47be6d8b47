"""`hp doctor` tells a sound machine from a broken one, and says what to do; real processes, real metadata."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person's own cache may be full or not writable, which is no fault of the doctor's."""
    monkeypatch.setenv("HP_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


def hp_doctor(*arguments: str, path: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, "-c", "from hp_trainer.cli import main; raise SystemExit(main())", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def distribution(folder: Path, name: str, version: str, *, requires: str = "", entry_points: str = "") -> None:
    """What `pip install` leaves of a distribution: its metadata."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    (info / "METADATA").write_text("\n".join([*lines, *([f"Requires-Dist: {requires}"] if requires else [])]) + "\n")
    (info / "entry_points.txt").write_text(entry_points)


def test_a_sound_machine_is_told_in_four_sections_and_in_json() -> None:
    told = hp_doctor()
    assert told.returncode == 0, told.stdout + told.stderr
    for section in ("packages", "torch", "accelerators", "machine"):
        assert f"\n{section}\n" in f"\n{told.stdout}"
    assert told.stdout.endswith("Training can work here.\n")
    report = json.loads(hp_doctor("--json").stdout)
    assert {item["subject"]: item["level"] for item in report["packages"]}["hp-trainer"] == "ok"
    assert any(item["subject"] == "distributed" and "gloo" in item["found"] for item in report["torch"])


def test_a_broken_device_extension_is_named_with_its_cause_and_remedy(tmp_path: Path) -> None:
    """torch_npu without its toolkit takes `import torch` down; the doctor itself stays on its feet."""
    (tmp_path / "torch_npu.py").write_text(
        "def _autoload():\n    raise ImportError('libhccl.so: cannot open shared object file')\n"
    )
    distribution(tmp_path, "torch-npu", "2.13.0", entry_points="[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    told = hp_doctor(path=tmp_path)
    assert told.returncode == 1
    assert "does not import" in told.stdout
    assert "libhccl.so: cannot open shared object file" in told.stdout
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in told.stdout
    assert "Training cannot work here: torch" in told.stdout
    assert "Traceback" not in told.stderr
    # The remedy helps: without the extension torch imports, and the NPU that is not there is a warning.
    helped = hp_doctor(path=tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert helped.returncode == 0, helped.stdout
    assert "pip uninstall torch-npu" in helped.stdout


def test_a_requirement_that_does_not_fit_is_broken_and_says_what_to_type(tmp_path: Path) -> None:
    distribution(tmp_path, "hp-models", "0.1.0", requires="numpy<1")
    told = hp_doctor(path=tmp_path)
    assert told.returncode == 1
    assert "is outside <1" in told.stdout
    assert "pip install --upgrade hp-models" in told.stdout


def test_a_device_that_is_asked_for_and_absent_is_broken() -> None:
    told = hp_doctor(HP_DEVICE="npu")
    assert told.returncode == 1
    assert "HP_DEVICE=npu, which is not here" in told.stdout


@pytest.mark.parametrize("arguments", [("--help",), ("--jsn",)])
def test_other_words_print_the_usage(arguments: tuple[str, ...]) -> None:
    told = hp_doctor(*arguments)
    assert told.returncode == (0 if "--help" in arguments else 2)
    assert told.stdout.startswith("usage: hp doctor")
