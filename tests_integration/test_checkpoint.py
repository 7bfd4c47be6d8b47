"""Checkpoints from the command line: beside training, from elsewhere, and in Hugging Face format."""

from __future__ import annotations

import json
import re

from harness import SMALL, Hp, assert_same_checkpoint, losses


def test_a_run_that_saves_beside_training_and_is_stopped_meanwhile_goes_on_to_the_bit(hp: Hp, plugin: str) -> None:
    options = ["--module", "faulty", "--config", "debug_recipe", *SMALL, "--nproc", "2"]
    hp.env["PYTHONPATH"] = plugin
    whole = hp("train", *options, "--dump_folder", "whole")
    assert whole.code == 0, whole.text
    # In the first of the 4 micro-batches of step 5, while the checkpoint of step 4 grows.
    hp.env["FAULT"] = json.dumps({"rank": 0, "step": 4 * 4 + 1, "where": "forward", "how": "run SIGTERM"})
    broken = hp("train", *options, "--checkpoint.async_mode=async", "--dump_folder", "broken")
    assert broken.code == 0, broken.text
    stopped = re.search("Stopped by SIGTERM after step ([56])", broken.out)
    assert stopped, broken.text
    assert "beside training, which it held up for" in broken.err
    assert {path.name for path in (hp.cwd / "broken/checkpoint").iterdir()} == {"step-4", f"step-{stopped[1]}"}
    del hp.env["FAULT"]
    again = hp("train", "broken/resolved.yaml", "--nproc", "2")
    assert again.code == 0, again.text
    assert losses(hp.cwd / "whole") == losses(hp.cwd / "broken")
    assert_same_checkpoint(*(hp.cwd / run / "checkpoint/step-12" for run in ("whole", "broken")))


def test_weights_go_out_in_hugging_face_format_and_come_in_from_there_and_from_a_checkpoint(hp: Hp) -> None:
    options = [*SMALL, "--training.steps", "2"]
    first = hp.train(*options, "--checkpoint.last_save_in_hf", "--dump_folder", "first")
    assert first.code == 0, first.text
    exported = hp.cwd / "first/checkpoint/step-2-hf"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in exported.iterdir()}
    sources = {
        "hf": ["--checkpoint.initial_load_path=first/checkpoint/step-2-hf", "--checkpoint.initial_load_in_hf"],
        "own": ["--checkpoint.initial_load_path=first/checkpoint/step-2"],
    }
    for name, source in sources.items():
        done = hp.train(*options, *source, "--dump_folder", name)
        assert done.code == 0, done.text
        assert "checkpoint.initial_load_path, since there is no checkpoint in" in done.err
    assert losses(hp.cwd / "hf") == losses(hp.cwd / "own")
    assert losses(hp.cwd / "hf")[0] != losses(hp.cwd / "first")[0]
    wrong = hp.train(*options, "--checkpoint.initial_load_path=first", "--dump_folder", "wrong")
    assert wrong.code == 2, wrong.text
    assert "first/checkpoint/step-2" in wrong.err
    assert not (hp.cwd / "wrong").exists()
