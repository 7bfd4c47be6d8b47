"""Which backend is chosen, what happens when there is none, and that nothing is imported before it is needed.

Each test that needs a fresh interpreter runs a script in one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run(script: str, path: Path | None = None, **variables: str) -> str:
    """Run a script in a new interpreter with `path` searched first; what it prints, or its error output."""
    environment = {k: v for k, v in os.environ.items() if k not in ("HYPER_PARALLEL_PLATFORM", "HP_DEVICE")}
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), environment.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment | variables, capture_output=True, text=True, timeout=120
    )
    return result.stdout.strip() if result.returncode == 0 else result.stderr.strip()


def write_package(folder: Path, name: str, text: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(text)


def test_no_backend_is_imported_until_an_attribute_is_used():
    script = """
import sys
import hp_protocols.platform, hp_protocols.distributed, hp_protocols.testing
from hp_protocols.platform import nn, F, ops, init, get_platform, Capability, CapabilityError
import copy, inspect, pickle
repr(nn), inspect.ismodule(nn), copy.copy(nn), hasattr(nn, "__path__")
assert pickle.loads(pickle.dumps(F)) is F
assert not {"torch", "mindspore", "numpy"} & set(sys.modules), sorted(sys.modules)
nn.Linear
assert "torch" in sys.modules
print("ok")
"""
    assert run(script) == "ok"


def test_an_unknown_name_is_refused_with_the_names_that_there_are():
    script = "from hp_protocols.platform import nn; nn.Linear"
    error = "HYPER_PARALLEL_PLATFORM='jax' names no platform; allowed: torch, mindspore"
    assert run(script, HYPER_PARALLEL_PLATFORM="jax").endswith(f"ValueError: {error}")
    assert "ValueError: HYPER_PARALLEL_PLATFORM='' names no" in run(script, HYPER_PARALLEL_PLATFORM="")


HIDE_TORCH = "import sys; sys.modules['torch'] = None\n"
HIDE_MINDSPORE = "import sys; sys.modules['mindspore'] = None\n"
SHOW_NAME = "from hp_protocols.platform import get_platform; print(get_platform().name)"


def test_torch_comes_first_then_mindspore_then_an_error_that_says_what_to_install(tmp_path):
    write_package(tmp_path, "mindspore", "float32 = bfloat16 = float16 = float64 = int64 = int32 = int8 = uint8 = 1")
    assert run("from hp_protocols.platform import platform_name; print(platform_name())", tmp_path) == "torch"
    assert run(HIDE_TORCH + SHOW_NAME, tmp_path) == "mindspore"
    error = run(HIDE_TORCH + HIDE_MINDSPORE + SHOW_NAME)
    assert error.endswith(
        'ImportError: no backend is installed: pip install "hp-protocols[torch]" '
        'or pip install "hp-protocols[mindspore]"'
    )


def test_a_chosen_backend_that_is_not_installed_is_an_error_even_if_the_other_one_is():
    error = run(HIDE_MINDSPORE + SHOW_NAME, HYPER_PARALLEL_PLATFORM="mindspore")
    assert error.endswith(
        "ImportError: platform 'mindspore' is chosen, but mindspore is not installed: "
        'pip install "hp-protocols[mindspore]"'
    )
    error = run(HIDE_TORCH + SHOW_NAME, HYPER_PARALLEL_PLATFORM="torch")
    assert error.endswith(
        "ImportError: platform 'torch' is chosen, but torch is not installed: pip install \"hp-protocols[torch]\""
    )


@pytest.fixture
def broken_torch_npu(tmp_path):
    """torch_npu on a machine without CANN: torch loads it at import, and it raises."""
    write_package(
        tmp_path,
        "torch_npu",
        "import os; os.environ['TOUCHED'] = '1'\nraise ImportError('libhccl.so: cannot open shared object file')",
    )
    info = tmp_path / "torch_npu-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    return tmp_path


def test_a_broken_torch_npu_is_explained_with_its_cause_and_the_same_way_every_time(broken_torch_npu):
    script = """
from hp_protocols.platform import get_platform
texts = []
for _ in range(2):
    try:
        get_platform()
    except ImportError as error:
        texts.append(str(error))
assert len(texts) == 2 and texts[0] == texts[1], texts
print(texts[0])
"""
    text = run(script, broken_torch_npu)
    assert text.startswith("importing torch failed while it loaded the installed device extension torch_npu")
    assert "libhccl.so: cannot open shared object file" in text
    assert "ASCEND_HOME_PATH" in text
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in text


def test_torch_npu_is_not_touched_unless_an_npu_is_asked_for(broken_torch_npu):
    script = """
import os
from hp_protocols.platform import get_platform
from hp_protocols.errors import ConfigError
get_platform().device_type()
get_platform().device_type("cpu")
assert "TOUCHED" not in os.environ
try:
    get_platform().device_type("npu")
except ConfigError as error:
    print(error)
assert "TOUCHED" in os.environ
"""
    text = run(script, broken_torch_npu, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert text.startswith("device: 'npu' needs torch_npu, whose import fails: ImportError: libhccl.so")
    assert "ASCEND_HOME_PATH" in text


def test_an_npu_is_found_first_and_used_through_torchs_device_module():
    """A stand-in for torch_npu, registered the way torch_npu registers itself."""
    script = """
import sys, types
import torch, torch.distributed as dist
torch.utils.rename_privateuse1_backend("npu")
calls = []
npu = types.ModuleType("npu")
npu.is_available = lambda: True
npu.device_count = lambda: 8
npu.get_device_name = lambda: "Ascend910B"
npu.set_device = lambda index: calls.append(("set_device", index))
npu.synchronize = lambda: calls.append("synchronize")
npu.empty_cache = lambda: calls.append("empty_cache")
npu.max_memory_allocated = lambda: 5
npu.memory_stats = lambda: {"a": 1}
npu.mem_get_info = lambda: (1, 9)
npu.reset_peak_memory_stats = lambda: calls.append("reset")
npu.get_rng_state = lambda: torch.zeros(1)
npu.set_rng_state = lambda state: calls.append(("set_rng_state", state.item()))
npu.memory = types.ModuleType("npu.memory")
npu.memory._record_memory_history = lambda **options: calls.append(options)
npu.memory._snapshot = lambda: {"segments": []}
torch_npu = types.ModuleType("torch_npu")
torch_npu.profiler = types.ModuleType("torch_npu.profiler")
torch_npu.profiler.ProfilerActivity = types.SimpleNamespace(CPU="cpu", NPU="npu")
sys.modules |= {"torch_npu": torch_npu, "torch_npu.profiler": torch_npu.profiler}
torch._register_device_module("npu", npu)
dist.Backend.register_backend(
    "hccl", lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size, timeout), devices=["npu"]
)

from hp_protocols.platform import get_platform
platform = get_platform()
assert platform.device_type() == "npu"
assert platform.device_type("cpu") == "cpu"
assert platform.device(3) == torch.device("npu", 3)
assert platform.device_count() == 8 and platform.device_name() == "Ascend910B"
assert (platform.max_memory(), platform.memory_stats(), platform.total_memory()) == (5, {"a": 1}, 9)
platform.synchronize(); platform.empty_cache(); platform.reset_max_memory()
state = platform.get_rng_state()
assert set(state) == {"cpu", "npu"}
platform.set_rng_state(state)
assert calls == [("set_device", 3), "synchronize", "empty_cache", "reset", ("set_rng_state", 0.0)], calls
calls.clear()
assert platform.has_memory_history()
platform.start_memory_history(7)
assert platform.memory_history() == {"segments": []}
platform.stop_memory_history()
assert calls == [{"max_entries": 7}, {"enabled": None}], calls
assert platform.profiler_module() is torch_npu.profiler
assert platform.profiler_activities() == ["cpu", "npu"]
try:
    platform.device(8)
except ValueError as error:
    assert "8 is not the index of a npu device; this host has 8" in str(error), error
platform.init_process_group()
print(dist.get_backend_config())
"""
    assert run(script) == "cpu:gloo,npu:hccl"
