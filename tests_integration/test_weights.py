"""`hp export` and `hp import`: weights go to transformers and come back as the same bits."""

from __future__ import annotations

import json

import torch
from harness import RECIPE, SMALL, Hp, checkpoint_tensors


def test_weights_of_a_run_go_to_transformers_and_back(hp: Hp) -> None:
    assert hp.train(*SMALL, "--training.steps", "2", "--dump_folder", "run").code == 0
    exported = hp("export", "run", "--to", "hf")
    assert exported.code == 0, exported.text
    folder = hp.cwd / "hf" / "step-2-hf"
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3_5_text"

    import transformers

    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert len(transformers.AutoTokenizer.from_pretrained(folder)) == theirs.config.vocab_size

    imported = hp("import", str(folder), "--to", "imported", *RECIPE)
    assert imported.code == 0, imported.text
    ours, back = (checkpoint_tensors(hp.cwd / path) for path in ("run/checkpoint/step-2", "imported/checkpoint/step-0"))
    weights = {name: value for name, value in ours.items() if name.startswith(".model.")}
    assert weights.keys() == back.keys()
    assert not [name for name in weights if not torch.equal(weights[name], back[name])]
    started = hp.train(
        *SMALL, "--training.steps", "1", "--checkpoint.initial_load_path", "imported/checkpoint/step-0",
        "--dump_folder", "next",
    )  # fmt: skip
    assert started.code == 0, started.text


def test_mistakes_are_told_and_nothing_is_written(hp: Hp) -> None:
    for arguments in (("export", "nowhere"), ("import", "nowhere", "--to", "new", *RECIPE), ("import", "x")):
        told = hp(*arguments)
        assert told.code == 2, told.text
        assert "Traceback" not in told.text
    assert not (hp.cwd / "new").exists()
