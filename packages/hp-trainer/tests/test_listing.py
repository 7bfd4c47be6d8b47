"""`hp list` shows what is installed, in an order to read, and survives what another package gets wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from hp_trainer.cli.listing import main


def test_recipes_are_listed_by_size_and_models_with_their_flavours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    names = [f"qwen3_5_v2_{size}\n" for size in ("0_8b", "2b", "4b", "4b_tp2_fsdp4", "9b", "27b", "debugmodel")]
    places = [out.index(name) for name in names]
    assert places == sorted(places)
    assert "qwen3_5_v2: debugmodel, 0.8B, 2B, 4B, 9B, 27B" in out


def install(folder: Path, name: str, entry_points: str) -> None:
    """What an installer leaves of a package, as far as entry points are concerned."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


def test_a_package_that_cannot_be_imported_is_named_and_the_others_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, "broken-lm", "[hp_models.specs]\nbroken = broken_lm:SPECS\n")
    (tmp_path / "broken_lm.py").write_text("import something_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main([]) == 1
    told = capsys.readouterr()
    assert "qwen3_5_v2: debugmodel" in told.out
    assert "hp list: broken: ModuleNotFoundError: No module named 'something_that_is_not_there'" in told.err
    assert "broken-lm" in told.err


def test_two_packages_that_claim_one_recipe_are_both_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "other"):
        install(tmp_path / name, name, f"[hp_trainer.recipes]\nmine.tiny = {name}:tiny\n")
        monkeypatch.syspath_prepend(tmp_path / name)
    assert main([]) == 1
    err = capsys.readouterr().err
    assert "declared twice" in err
    assert "by one" in err
    assert "by other" in err


def test_what_is_no_option_of_it_is_answered_with_its_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "usage: hp list" in capsys.readouterr().out
    assert main(["everything"]) == 2
    assert "usage: hp list" in capsys.readouterr().err
