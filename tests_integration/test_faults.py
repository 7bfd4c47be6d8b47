"""A rank that dies, hangs or raises ends the run on all ranks, with one message that names it and what it did."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import (
    PATIENCE,
    TORCHRUN,
    Finished,
    Hp,
    checkpoint_tensors,
    losses,
    processes_in,
    records,
    wait_for,
)
from world import Ended, World

RECIPE = ("--module", "faulty", "--config", "faulty_recipe")
GRAPH = ("--compile.mode", "graph")
SOON = ("--comm.train_timeout_seconds", "8")  # for ranks that hang: the run takes no less
OLDER = """\
model: {num_hidden_layers: 2, hidden_size: 32, intermediate_size: 48, vocab_size: 300,
        config_overrides: {head_dim: 16, layer_types: [linear_attention, full_attention]}}
data: {type: dummy, max_seq_len: 16}
train: {max_steps: 100, global_batch_size: 4, micro_batch_size: 2, logging: {log_steps: 1},
        checkpoint: {save_hf_weights: false, output_dir: outputs}}
"""
Start = Callable[..., World]


@pytest.fixture
def start(tmp_path: Path, cache: Path, plugin: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a world of ranks whose run folder has the name that is given."""
    monkeypatch.chdir(tmp_path)
    worlds: list[World] = []

    def begin(
        name: str, size: int, *arguments: str, rows: list[int] | None = None, older: bool = False, **fault: Any
    ) -> World:
        variables = {"HP_CACHE_DIR": str(cache), **fault.pop("env", {}), "FAULT": json.dumps(fault)}
        if rows is not None:
            variables["FAULT_ROWS"] = json.dumps(rows)
        folder = tmp_path / f"log-{name}-{len(worlds)}"
        before = [name] if older else [*RECIPE, "--dump_folder", name]
        worlds.append(World(folder, plugin, size, [*before, *arguments], **variables))
        return worlds[-1]

    yield begin
    for one in worlds:
        one.close()


def assert_told_once(ended: Ended, message: str) -> None:
    """All ranks have ended by themselves with 1, one of them has said why, and no more than one traceback is shown."""
    assert set(ended.codes) == {1}, ended.text
    heads = re.findall(r"hp train: .*the run ends on all ranks", ended.text)
    assert len(heads) == 1, ended.text
    assert re.search(message, heads[0]), heads[0]
    assert ended.text.count("Traceback (most recent") <= 1 + ended.text.count("direct cause of"), ended.text


def assert_nothing_lost(run: Path, *, steps: int, saved: int) -> None:
    """What was done before the fault is on disk and whole."""
    assert [record["step"] for record in records(run)] == list(range(1, steps + 1))
    assert checkpoint_tensors(run / "checkpoint" / f"step-{saved}")


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_rank_that_raises_shows_its_traceback_once(start: Start, tmp_path: Path, mode: str) -> None:
    options = GRAPH if mode == "graph" else ()
    ended = start("run", 3, *options, rank=1, step=5, where="data", how="raise").wait()
    assert_told_once(ended, r"rank 1 \(host \S+, pid \d+\) failed in step 5, waiting for data: ValueError: planted")
    assert "Traceback" in ended.texts[1]
    assert "Traceback" not in ended.texts[0] + ended.texts[2]
    assert_nothing_lost(tmp_path / "run", steps=4, saved=3)


def test_a_rank_that_raises_while_building_or_saving_ends_the_others(start: Start, tmp_path: Path) -> None:
    ended = start("built", 2, rank=1, step=0, where="build", how="raise").wait()
    assert_told_once(ended, "rank 1 .* failed in building the model: ValueError: planted in build")
    assert not (tmp_path / "built").exists()
    # The save after step 3 fails, and training goes on; the last one must not.
    ended = start("saved", 2, rank=0, step=8, where="state", how="raise").wait()
    failed = "rank 0 .* failed in step 8, saving the last checkpoint"
    assert_told_once(ended, f"{failed}: CheckpointError: .*planted in state")
    assert_nothing_lost(tmp_path / "saved", steps=8, saved=6)


def test_a_mistake_that_one_rank_alone_finds_is_told_by_it_and_by_nobody_else(start: Start) -> None:
    ended = start("run", 2, rank=1, step=3, where="data", how="mistake").wait()
    assert ended.codes == [1, 1], ended.text
    assert ended.texts[1].count("planted: is wrong in data") == 1
    assert "hp train:" not in ended.texts[0], ended.text
    assert "Traceback" not in ended.text


@pytest.mark.parametrize(("mode", "how"), [("eager", "exit"), ("graph", "SIGKILL")])
def test_a_rank_that_dies_is_named_with_what_it_was_doing(start: Start, tmp_path: Path, mode: str, how: str) -> None:
    options, where = (GRAPH, "data") if mode == "graph" else ((), "forward")
    running = start("run", 3, *options, rank=1, step=5, where=where, how=how)
    codes = [process.pid for process in running.ranks]
    ended = running.wait()
    assert ended.codes == [1, 7 if how == "exit" else -9, 1], ended.text
    doing = "waiting for data" if mode == "graph" else "forward and backward"
    said = f"rank 1 (host {socket.gethostname()}, pid {codes[1]}) has ended without a word in step 5, {doing}"
    assert ended.text.count(said) == 1, ended.text
    assert "Traceback" not in ended.text
    assert_nothing_lost(tmp_path / "run", steps=4, saved=3)


def test_ranks_that_hang_are_named_within_the_timeout(start: Start, tmp_path: Path) -> None:
    # They mostly wait, so they can do so side by side.
    looping = start("loop", 3, *SOON, rank=1, step=5, where="forward", how="loop")
    asleep = start("sleep", 2, *SOON, *GRAPH, rank=1, step=5, where="data", how="sleep")
    stopped = start("stop", 2, *SOON, rank=0, step=6, where="state", how="SIGSTOP")
    parted = start("part", 2, *SOON, rank=0, step=5, where="forward", how="skip")
    limit = r"nothing was heard for \d+ s, the limit is comm.train_timeout_seconds"
    ended = looping.wait()
    assert_told_once(ended, rf"rank 1 .* is late: .* it is in step 5, forward and backward \({limit}\)")
    assert "where rank 1 stands" in ended.texts[1]
    assert "while how ==" in ended.texts[1], "the line of its endless loop"
    assert_nothing_lost(tmp_path / "loop", steps=4, saved=3)
    ended = asleep.wait()
    assert_told_once(ended, r"rank 1 .* is late: .* it is in step 5, waiting for data")
    assert "time.sleep(1000)" in ended.texts[1]
    ended = parted.wait()
    assert_told_once(ended, r"the ranks wait for each other in different places")
    assert "in strike" in ended.text, "where the rank stands that calls what the other does not"
    # A stopped process cannot end itself; a launcher kills it as soon as the others have ended.
    wait_for(lambda: stopped.ranks[1].exitcode is not None)
    ended = stopped.wait(0.1)
    assert ended.codes == [None, 1], ended.text
    assert "rank 0" in ended.texts[1]
    assert "is stopped (SIGSTOP, or a debugger) in step 6, saving a checkpoint" in ended.texts[1]
    assert_nothing_lost(tmp_path / "stop", steps=6, saved=3)


def test_under_hp_train_the_launcher_tells_of_a_rank_that_was_killed(hp: Hp, plugin: str) -> None:
    hp.env |= {"PYTHONPATH": plugin, "FAULT": json.dumps({"rank": 1, "step": 5, "where": "data", "how": "SIGKILL"})}
    ended = finish_alone(hp, "train", *RECIPE, "--dump_folder", "run", "--nproc", "2")
    assert ended.code == 1
    told = r"hp train: rank 1 \(host \S+, pid \d+\) was ended by SIGKILL in step 5, waiting for data"
    assert len(re.findall(told, ended.err)) == 1, ended.err
    assert ended.err.count("the run ends on all ranks") == 1, ended.err
    assert "Traceback" not in ended.err
    assert_nothing_lost(hp.cwd / "run", steps=4, saved=3)


def test_under_torchrun_a_stopped_rank_ends_the_run_and_leaves_no_process(hp: Hp, plugin: str) -> None:
    hp.env |= {"PYTHONPATH": plugin, "FAULT": json.dumps({"rank": 1, "step": 5, "where": "data", "how": "SIGSTOP"})}
    ended = finish_alone(
        hp,
        *(*TORCHRUN, "--shutdown-timeout", "1", "-m", "hp_trainer.train"),
        *(*RECIPE, *SOON, "--dump_folder", "run"),
        module="torch.distributed.run",
    )
    assert ended.code == 1
    assert ended.err.count("is stopped (SIGSTOP, or a debugger) in step 5, waiting for data") == 1, ended.err
    assert_nothing_lost(hp.cwd / "run", steps=4, saved=3)


def test_under_torchrun_sigterm_saves_once(hp: Hp, plugin: str) -> None:
    hp.env |= {"PYTHONPATH": plugin}
    run = hp.start(
        *(*TORCHRUN, "-m", "hp_trainer.train", *RECIPE, "--dump_folder", "run"),
        *("--training.steps", "100000"),
        module="torch.distributed.run",
    )
    wait_for(lambda: _steps(hp.cwd / "run") >= 2)
    run.send_signal(signal.SIGTERM)
    out, err = run.communicate(timeout=PATIENCE)
    assert "Stopped by SIGTERM after step" in out, out + err
    done = len(records(hp.cwd / "run"))
    assert err.count(f"saved checkpoint run/checkpoint/step-{done} in") == 1, err
    assert_nothing_lost(hp.cwd / "run", steps=done, saved=done)


def test_one_rank_that_makes_inf_is_named_and_all_ranks_leave_the_update_out(start: Start, tmp_path: Path) -> None:
    for name, options in (("eager", ()), ("graph", GRAPH)):
        ended = start(name, 2, *options, rank=1, step=4, where="loss", how="inf").wait()
        assert ended.codes == [0, 0], ended.text
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        skipped = [line for line in lines if line.get("event") == "update_skipped"]
        assert [(line["step"], line["ranks"]) for line in skipped] == [(4, [1])]
        assert "step 4: the update is left out: the loss is not finite on rank 1" in ended.texts[0]
        assert len(records(tmp_path / name)) == 8
    assert losses(tmp_path / "eager")[4:] == losses(tmp_path / "graph")[4:]


def test_the_older_trainer_names_the_callback_that_raised_and_saves_at_sigterm(start: Start, tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(OLDER)
    older = {"older": True, "env": {"OLDER": "1"}}
    ended = start("old.yaml", 2, **older, rank=1, step=3, where="callback", how="raise").wait()
    assert_told_once(ended, r"rank 1 .* failed in step 3, Striking.on_step_end: ValueError: planted in callback")
    ended = start("old.yaml", 2, **older, rank=1, step=3, where="callback", how="SIGTERM").wait()
    assert ended.codes == [0, 0], ended.text
    # Noted at the end of step 3, and so agreed on before step 4, which is the last.
    assert [path.name for path in (tmp_path / "outputs-2" / "checkpoint").iterdir()] == ["step-4"]
    ended = start(
        "old.yaml", 2, "--train.checkpoint.output_dir=killed", **older, rank=0, step=3, where="callback", how="SIGKILL"
    )
    assert ended.wait().codes == [-9, 1]
    assert "rank 0" in ended.logs[1].read_text()
    assert "has ended without a word in step 3, Striking.on_step_end" in ended.logs[1].read_text()


def test_data_that_end_unevenly_end_the_run_cleanly_and_a_resume_says_so(start: Start, tmp_path: Path) -> None:
    # Two micro-batches per step: rank 1 has one for the third step, and none for the fourth.
    options = ("--training.global_batch_size", "6")
    ended = start("run", 3, *options, rows=[9, 5, 9]).wait()
    assert ended.codes == [0, 0, 0], ended.text
    assert "The data ended after step 3." in ended.texts[0]
    assert ended.text.count("step 4: the data of rank 1 have ended (1 of 3 ranks)") == 1
    assert_nothing_lost(tmp_path / "run", steps=3, saved=3)
    ended = start("run", 3, *options, rows=[9, 5, 9]).wait()
    assert ended.codes == [0, 0, 0], ended.text
    assert "No data are left after step 3" in ended.texts[0]


def test_a_signal_saves_once_and_a_second_ctrl_c_ends_at_once(start: Start, tmp_path: Path) -> None:
    long = ("--training.steps", "100000")
    told = start("told", 2, *long)
    # All ranks get it from the terminal; rank 1 sleeps in its data, and rank 0 waits for it in a collective.
    pressed = start("pressed", 2, *long, rank=1, step=5, where="data", how="sleep")
    for name, steps in (("told", 2), ("pressed", 4)):
        wait_for(lambda name=name, steps=steps: _steps(tmp_path / name) >= steps)
    told.ranks[1].terminate()
    press(pressed)
    wait_for(lambda: "press Ctrl-C again" in pressed.logs[0].read_text())
    # What comes within a second of a rank's own first is the same press, from the terminal and from a launcher.
    ended = pressed.wait(between=lambda: press(pressed), seconds_between=1.5)
    assert ended.codes == [130, 130], ended.text
    assert ended.text.count("press Ctrl-C again to end at once") == 1
    ended = told.wait()
    assert ended.codes == [0, 0], ended.text
    assert "Stopped by" in ended.text
    assert len(list((tmp_path / "told" / "checkpoint").glob("step-*"))) >= 1


def test_ranks_that_do_not_come_are_named(start: Start, tmp_path: Path) -> None:
    soon = ("--comm.init_timeout_seconds", "5")
    alone = start("alone", 2, *soon, env={"WORLD_SIZE": "3"})
    nowhere = start("nowhere", 1, *soon, env={"WORLD_SIZE": "2", "MASTER_ADDR": "no-such-host.invalid"})
    ended = alone.wait()
    assert ended.codes == [1, 1], ended.text
    assert ended.text.count("rank 2 of 3 did not come within 5 s (comm.init_timeout_seconds); rank 0 (host") == 1
    assert "Traceback" not in ended.text
    ended = nowhere.wait()
    assert ended.codes == [2], ended.text
    assert "MASTER_ADDR: no-such-host.invalid:" in ended.text
    assert "could not be reached within 5 s (comm.init_timeout_seconds)" in ended.text
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        own = {"WORLD_SIZE": "2", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}
        ended = start("taken", 1, env=own).wait()
    assert ended.codes == [2], ended.text
    assert f"MASTER_PORT: {port} on 127.0.0.1 is in use by another program" in ended.text
    assert not list(tmp_path.glob("*/metrics.jsonl"))


def test_machines_that_do_not_meet_are_a_mistake_in_the_endpoint(hp: Hp, plugin: str) -> None:
    hp.env |= {"PYTHONPATH": plugin}
    options = [*RECIPE, "--nnodes", "2"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        busy = hp("train", *options, "--node-rank", "0", "--rdzv-endpoint", endpoint)
    assert busy.code == 2
    assert f"--rdzv-endpoint: {endpoint}: the port is in use by another program" in busy.err
    soon = ("--comm.init_timeout_seconds", "3")
    empty = hp("train", *options, *soon, "--node-rank", "1", "--rdzv-endpoint", endpoint)
    assert empty.code == 2
    assert f"--rdzv-endpoint: the 2 machines did not meet at {endpoint}" in empty.err
    assert "Traceback" not in busy.err + empty.err


def press(ranks: World) -> None:
    """Ctrl-C, as every process of a terminal gets it."""
    for process in ranks.ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid or 0, signal.SIGINT)


def finish_alone(hp: Hp, *arguments: str, **options: str) -> Finished:
    """Run a launcher and its two ranks in the test's folder, and see that no process is left there."""
    run = hp.start(*arguments, **options)
    wait_for(lambda: len(processes_in(hp.cwd)) >= 3)
    out, err = run.communicate(timeout=PATIENCE)
    wait_for(lambda: not processes_in(hp.cwd), seconds=20)
    return Finished(run.returncode, out, err)


def _steps(run: Path) -> int:
    return len(records(run)) if (run / "metrics.jsonl").exists() else 0
