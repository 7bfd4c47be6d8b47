"""The command: `python -m align8 [--layouts …] [--rows …] [--steps N] [--out FOLDER]`.

In: options; what the chosen cells are compared with is run, too. Out: the table on standard output, two files, exit
code 1 if a cell differs or is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from align8.matrix import LAYOUTS, ROWS, plan
from align8.measure import measure
from align8.report import summary, to_markdown, write

PROCESSES = 8


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(words)
    layouts, rows = [LAYOUTS[name] for name in arguments.layouts], [ROWS[name] for name in arguments.rows]
    runs, refused = plan(layouts, rows, steps=arguments.steps)
    if not runs:
        print("align8: these rows stand on none of these layouts", file=sys.stderr)
        return 2
    # Now, not after some minutes, it turns out whether there can be a report.
    arguments.out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if arguments.keep is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="align8-")))
        else:
            folder = arguments.keep.absolute()
        findings = measure(runs, refused, folder, processes=PROCESSES)
        write(findings, arguments.out)
    print(to_markdown(findings))
    print(f"{summary(findings)}; written to {arguments.out}")
    return 0 if findings.all_ok else 1


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="align8", description=__doc__)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), metavar="LAYOUT")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--steps", type=int, help="of each run; by default 10")
    parser.add_argument("--out", type=Path, default=Path("outputs/align8"), help="folder for the two files")
    parser.add_argument("--keep", type=Path, help="a new folder for every run's own folder and output")
    arguments = parser.parse_args(words)
    if arguments.steps is not None and arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: at least 1")
    if arguments.keep is not None and arguments.keep.exists():
        parser.error(f"--keep {arguments.keep} exists already")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
