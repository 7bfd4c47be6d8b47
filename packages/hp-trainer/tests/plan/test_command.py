"""`hp plan` as it is typed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hp_protocols.errors import ConfigError
from hp_trainer.cli import plan
from hp_trainer.plan import DEVICES, device_memory, parse_memory

README = Path(__file__).parents[2] / "README.md"
RECIPE = ("--module", "qwen3_5_v2", "--config", "qwen3_5_v2_debugmodel", "--training.seq_len", "64")


def test_the_text_and_the_json_say_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert plan.main([*RECIPE, "--world-size", "4", "--device", "h100 80gb", "--json", str(file)]) == 0
    shown, found = capsys.readouterr().out, json.loads(file.read_text())
    assert "layout       dp_shard 4  (4 ranks)" in shown
    assert "512 tokens per step" in shown
    assert found["layout"]["tokens_per_step"] == 512
    assert "2.95 M = 393 k embedding + 2.56 M" in shown
    assert found["parameters"]["total"] == 2_953_400
    memory = found["memory_bytes"]
    uses = ("parameters", "gradients", "optimizer", "gathered", "reduced", "activations")
    assert sum(memory[use] for use in uses) == memory["total"]
    assert f"{memory['total'] / 2**20:.2f} MiB" in shown
    assert "\nfits         H100-80GB: 73.60 GiB of 80.00 GiB" in shown
    assert found["fits"] is True


def test_the_readme_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    (command, shown) = re.findall(r"```console\n\$ hp (plan .*?)\n(.*?)```", README.read_text(), flags=re.DOTALL)[0]
    assert plan.main(command.split()[1:]) == 0
    assert capsys.readouterr().out == shown


def test_what_does_not_fit_comes_with_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([*RECIPE, "--world_size=2", "--device-memory=36MiB", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False
    assert found["remedies"][0]["option"] == "--activation_checkpoint.mode full"
    assert found["remedies"][-1]["fits"] is True


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--world-size", "none"], "--world-size: 'none' is no number of processes"),
        (["--world-size", "6", "--parallelism.tensor_parallel_degree", "4"], "needs a multiple of 4 processes"),
        (["--training.sequence_len", "5"], "did you mean"),
        (["--device", "H1000"], "did you mean H100-80GB?"),
        (["--device", "H200", "--device-memory", "1GiB"], "--device, --device-memory: both are given"),
        (["--device-memory", "64"], "'64' is no size"),
    ],
)
def test_mistakes_are_told_as_hp_train_tells_them(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main([*RECIPE, *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("hp plan: ")
    assert told in captured.err


def test_a_file_of_the_older_trainer_is_sent_to_hp_migrate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    old = tmp_path / "old.yaml"
    old.write_text("model: {}\ndata: {train_path: here}\ntrain: {output_dir: there}\n")
    assert plan.main([str(old)]) == 2
    assert "hp plan:" in capsys.readouterr().err


def test_help_needs_no_torch(capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys; from hp_trainer.cli import main; main(['plan', '--help']); print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.startswith("usage: hp plan")
    assert told.endswith("False\n")


def test_sizes_and_devices_are_read_as_people_write_them() -> None:
    assert parse_memory("64GiB").total == 64 * 2**30
    assert parse_memory(" 80 gb").total == 80 * 10**9
    assert parse_memory("0.5TiB").total == 2**39
    assert device_memory("ascend-910b3").total == DEVICES["Ascend910B3"] * 2**30
    for wrong in ("", "GiB", "12", "0GiB", "-3GiB", "12 parsecs"):
        with pytest.raises(ConfigError, match="is no size"):
            parse_memory(wrong)
