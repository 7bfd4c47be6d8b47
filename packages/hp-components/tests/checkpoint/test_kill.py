"""kill -9 during a save, at every file operation and at random moments: an older checkpoint is never lost.

One process imports torch once and forks: a child that saves and is killed, then a child that starts again in the
same folder, as the next run would, and reports what it finds.
"""

import json
import subprocess
import sys
import textwrap

import pytest

DRIVER = """
    import json, os, random, shutil, signal, sys, time
    from pathlib import Path

    import torch
    from torch import nn
    from hp_components import CheckpointManager
    from hp_components.checkpoint import list_checkpoints

    folder = Path(sys.argv[1])

    def manager(value, size, keep=2, mode="disabled"):
        model = nn.Linear(size, size)
        nn.init.constant_(model.weight, value)
        config = CheckpointManager.Config(interval=1, keep_latest_k=keep, async_mode=mode)
        return model, config.build(run_folder=folder, model_parts=[model])

    def save(value, size, mode):
        # Replaces step 2 and deletes step 0; in the background, while the weights change.
        model, new = manager(value, size, mode=mode)
        new.save(2, force=mode == "disabled")
        nn.init.constant_(model.weight, -value)
        new.close()

    def in_child(work):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            try:
                os.write(writer, json.dumps(work()).encode())
                os._exit(0)
            finally:
                os._exit(1)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            said = pipe.read()
        _, status = os.waitpid(child, 0)
        return said, status

    def prepare(size):
        for step in (0, 1, 2):
            assert manager(float(step), size, keep=0)[1].save(step, force=True)

    def die_at(operation):
        count = 0

        def tick():
            nonlocal count
            if count == operation:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

        def hook(event, arguments):
            # Deletions inside a folder name the file alone.
            ours = event in ("os.remove", "os.rmdir") or str(folder) in str(arguments[:1])
            if ours and event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"):
                tick()

        fsync = os.fsync
        os.fsync = lambda fd: (tick(), fsync(fd))
        sys.addaudithook(hook)

    def save_and_die(operation, size, mode):
        die_at(operation)
        save(7.0, size, mode)

    def start_again(size):
        partial = [path.name for path in (folder / "checkpoint").glob(".step-*")]
        model, again = manager(-1.0, size)
        found = {}
        for step in [info.step for info in list_checkpoints(again.folder)]:
            again.load(step)
            found[step] = sorted(set(model.weight.flatten().tolist()))
        left = [path.name for path in (folder / "checkpoint").iterdir() if not path.name.startswith("step-")]
        return {"partial": partial, "found": found, "left": left}

    def report(kind, mode, status, size):
        said, _ = in_child(lambda: start_again(size))
        seen = {"kind": kind, "mode": mode, "killed": os.WIFSIGNALED(status)}
        outcome = {**seen, **json.loads(said)}
        print(json.dumps(outcome), flush=True)
        return outcome

    def at_every_operation(mode):
        operation, status = 0, signal.SIGKILL
        while os.WIFSIGNALED(status):
            shutil.rmtree(folder)
            shutil.copytree(folder.with_name("prepared"), folder)
            _, status = in_child(lambda: save_and_die(operation, 16, mode))
            report("operation", mode, status, 16)
            operation += 1

    def save_and_tell(writer, size, mode):
        # The first file that is opened in the new folder: from here on there is something to break.
        def hook(event, arguments):
            if event == "open" and ".partial-" in str(arguments[0]):
                os.write(writer, b"x")

        sys.addaudithook(hook)
        save(7.0, size, mode)

    def at_random_moments(count, mode):
        size = 1000  # 4 MB: most of the time goes into writing
        shutil.rmtree(folder)
        in_child(lambda: prepare(size))
        done, in_the_middle, longest = 0, False, 0.06
        # A save may be much faster or slower than elsewhere: go on until one was cut in the middle.
        while done < count or (not in_the_middle and done < 40):
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                save_and_tell(writer, size, mode)
                os._exit(0)
            os.close(writer)
            assert os.read(reader, 1)
            time.sleep(random.random() * longest)
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            os.close(reader)
            in_the_middle |= bool(report("moment", mode, status, size)["partial"])
            longest *= 1 if in_the_middle else 0.8
            done += 1

    random.seed(0)
    in_child(lambda: prepare(16))
    shutil.copytree(folder, folder.with_name("prepared"))
    for mode in ("disabled", "async"):
        at_every_operation(mode)
        at_random_moments(6, mode)
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    command = [sys.executable, "-c", textwrap.dedent(DRIVER), str(tmp_path_factory.mktemp("kill") / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(outcome):
    """Step 1 is untouched; step 2 is wholly the old or wholly the new one; nothing is left over."""
    assert outcome["found"]["1"] == [1.0], outcome
    assert outcome["found"]["2"] in ([2.0], [7.0]), outcome
    assert outcome["found"].get("0", [0.0]) == [0.0], outcome
    assert outcome["left"] == [], outcome


MODES = pytest.mark.parametrize("mode", ["disabled", "async"])


@MODES
def test_a_kill_at_any_file_operation_of_a_save_costs_no_older_checkpoint(outcomes, mode):
    seen = [outcome for outcome in outcomes if (outcome["kind"], outcome["mode"]) == ("operation", mode)]
    for outcome in seen:
        check(outcome)
    assert len(seen) > 15
    assert [outcome["killed"] for outcome in seen] == [True] * (len(seen) - 1) + [False]
    # The moments were real: old and new, partial and replaced and half-deleted folders all occurred.
    assert seen[0]["found"]["2"] == [2.0]
    assert seen[-1]["found"] == {"1": [1.0], "2": [7.0]}
    kinds = {name.split(".")[2].split("-")[0] for outcome in seen for name in outcome["partial"]}
    assert kinds == {"partial", "replaced", "deleting"}


@MODES
def test_a_kill_at_a_random_moment_costs_no_older_checkpoint(outcomes, mode):
    seen = [outcome for outcome in outcomes if (outcome["kind"], outcome["mode"]) == ("moment", mode)]
    assert len(seen) >= 6
    for outcome in seen:
        check(outcome)
    # The moments were real: at least one was in the middle of a save.
    assert any(outcome["partial"] for outcome in seen)
