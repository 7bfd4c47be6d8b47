"""Checkpoints from the command line: beside training, from elsewhere, and in Hugging Face format."""

from __future__ import annotations

import signal
import time

import torch
from harness import RECIPE, SMALL, Hp, checkpoint_tensors, losses, wait_for


def test_a_run_that_saves_beside_training_and_is_stopped_meanwhile_goes_on_to_the_bit(hp: Hp) -> None:
    options = [*SMALL, "--nproc", "2"]
    whole = hp.train(*options, "--dump_folder", "whole")
    assert whole.code == 0, whole.text
    beside = [*options, "--checkpoint.async_mode=async", "--dump_folder", "broken"]
    broken = hp.start("train", *RECIPE, *beside)
    # Already the hidden folder in which the first checkpoint grows.
    wait_for(lambda: (hp.cwd / "broken/checkpoint").is_dir() and any((hp.cwd / "broken/checkpoint").iterdir()))
    signalled = time.monotonic()
    broken.send_signal(signal.SIGTERM)
    out, err = broken.communicate(timeout=60)
    assert broken.returncode == 0, out + err
    assert time.monotonic() - signalled < 20
    assert "Stopped by SIGTERM" in out
    assert "beside training, which it held up for" in err
    assert all(path.name.startswith("step-") for path in (hp.cwd / "broken/checkpoint").iterdir())
    again = hp("train", "broken/resolved.yaml", "--nproc", "2")
    assert again.code == 0, again.text
    assert losses(hp.cwd / "whole") == losses(hp.cwd / "broken")
    ours, theirs = (checkpoint_tensors(hp.cwd / run / "checkpoint/step-12") for run in ("whole", "broken"))
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]


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
