"""`hp plot`: the loss curves of one run or several, as a picture and as a line of text each.

In: run folders. Out: a PNG, and one line per run on standard output; an exit code. Does not import torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hp_protocols.errors import ConfigError, Fault
from hp_trainer.cli.arguments import Arguments
from hp_trainer.cli.frame import run_command

USAGE = """\
usage: hp plot RUN_FOLDER [RUN_FOLDER ...] [--out FILE.png]

Draw the training loss over steps: each run's curve in one line of text, and all of them in one picture.

  --out FILE.png   the picture (default: loss.png in the run folder, or here if there are several runs)

exit codes: 0 fine, 2 a mistake in the command"""

RECORDS = "metrics.jsonl"
CURVE_WIDTH = 40


def main(arguments: list[str]) -> int:
    """Run `hp plot <arguments>`."""
    return run_command("hp plot", USAGE, arguments, plot)


def plot(arguments: list[str]) -> None:
    """Read the options and draw."""
    parser = Arguments("hp plot")
    parser.add_argument("runs", metavar="RUN_FOLDER", type=Path, nargs="+")
    parser.flag("out", type=Path)
    options = parser.parse_args(arguments)
    runs: list[Path] = list(dict.fromkeys(options.runs))
    draw(runs, options.out or (runs[0] / "loss.png" if len(runs) == 1 else Path("loss.png")))


def draw(runs: list[Path], out: Path) -> None:
    """Write the picture and print the lines.

    Raises:
        ConfigError: a folder has no records, none of them has a loss, or the picture cannot be written.
    """
    from hp_components.metrics import plot_loss, read_records

    if missing := [run for run in runs if not (run / RECORDS).is_file()]:
        raise ConfigError([Fault(str(run), f"is no run folder: it has no {RECORDS}") for run in missing])
    if out.suffix.lower() != ".png":
        raise ConfigError(Fault("--out", f"{out} is no PNG", allowed="a name that ends with .png"))
    width = max(len(str(run)) for run in runs)
    for run in runs:
        print(f"{run!s:{width}}  {line_of(list(read_records(run / RECORDS)))}")
    try:
        drawn = plot_loss({str(run): run / RECORDS for run in runs}, out, "" if len(runs) > 1 else runs[0].name)
    except OSError as error:
        raise ConfigError(Fault("--out", f"{out} cannot be written: {error.strerror or error}")) from error
    if not drawn:
        raise ConfigError(Fault(str(runs[0]), "has no record with a loss yet"))
    print(out)


def line_of(records: list[dict[str, Any]]) -> str:
    """A run's loss in one line: the curve, its ends, its steps."""
    from hp_components.metrics import sparkline

    steps = [record for record in records if "event" not in record]
    if not steps:
        return "no record yet"
    losses = [record["loss"] for record in steps]
    ends = " to ".join("nan" if loss is None else f"{loss:.4f}" for loss in (losses[0], losses[-1]))
    text = f"{ends} in {steps[-1]['step']:,} steps"
    curve = sparkline(losses, CURVE_WIDTH)
    try:
        curve.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return text
    return f"{curve}  {text}"
