"""`hp plan`: what a run would take, for any number of processes, on a machine that has none of them.

In: recipe and options as `hp train` takes them, a number of processes. Out: text or JSON; an exit code.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hp_config import ConfigManager, HyperTrainerConfig
from hp_protocols.errors import ConfigError, Fault, MissingExtraError
from hp_trainer.cli import messages
from hp_trainer.cli.arguments import Arguments

if TYPE_CHECKING:
    from hp_trainer.plan import DeviceMemory

OPTIONS = """\
  --world-size N          processes in all (default 1)
  --device-memory SIZE    does it fit, such as 64GiB; if not, what to change
  --device NAME           the same for a known device, such as H100-80GB
  --json FILE             also write the plan as JSON; - writes it instead of the text"""

USAGE = f"""\
usage: hp plan --module MODULE --config RECIPE --world-size N [--option value …] [options]
       hp plan RUN/resolved.yaml --world-size N [--option value …] [options]

Layout, parameters, FLOPs and memory per rank of a run, without running it: one rank's step is gone through with
tensors that have sizes but no content. No accelerator and no processes are needed. Takes every option of `hp train`.

{OPTIONS}

exit codes: 0 planned (also where it does not fit), 1 the JSON could not be written, 2 a mistake in the command or
configuration"""


def main(arguments: list[str]) -> int:
    """Run `hp plan <arguments>`."""
    if not arguments or arguments in (["-h"], ["--help"]):
        print(USAGE)
        return 0 if arguments else 2
    try:
        own, rest = _split(arguments)
        device = _device(own)
        if {"-h", "--help"} & set(rest):
            print(f"plan:\n{OPTIONS}\n", flush=True)
        config = ConfigManager().parse_args(rest, world_size=own.world_size)
        if isinstance(config, HyperTrainerConfig):
            problem = "is a YAML of the older trainer, which is not planned for"
            raise ConfigError(Fault(rest[0], problem, hint=f"hp migrate {rest[0]} -o new.yaml"))
        # Nothing runs: what parts of the run say of themselves is no news here.
        logging.disable(logging.WARNING)
        from hp_trainer.plan import advise, plan_run, render, to_plain

        kind = "cuda" if device is None else device.device_type
        plan = plan_run(config, own.world_size, device_type=kind)
        remedies = []
        if device is not None and plan.memory.total > device.usable:
            remedies = advise(config, plan, device.usable, device_type=kind)
    except ConfigError as error:
        messages.print_mistakes("hp plan", error)
        return 2
    except MissingExtraError as error:
        print(f"hp plan: {error}", file=sys.stderr)
        return 2
    finally:
        logging.disable(logging.NOTSET)
    if own.json is not None:
        text = json.dumps(to_plain(plan, device, remedies), indent=2)
        if own.json == "-":
            print(text)
            return 0
        try:
            Path(own.json).write_text(text + "\n")
        except OSError as error:
            return messages.fail("hp plan", f"--json: {error}")
    print(render(plan, device, remedies))
    return 0


def _split(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of this command, and those of the recipe."""
    parser = Arguments("hp plan")
    for flag in ("world-size", "device-memory", "device", "json"):
        names = dict.fromkeys((f"--{flag}", f"--{flag.replace('-', '_')}"))
        parser.add_argument(*names, dest=flag.replace("-", "_"), default=None)
    own, rest = parser.parse_known_args(arguments)
    given = "1" if own.world_size is None else own.world_size
    if not given.isdigit() or int(given) < 1:
        raise ConfigError(Fault("--world-size", f"{given!r} is no number of processes", allowed="at least 1"))
    own.world_size = int(given)
    return own, rest


def _device(own: argparse.Namespace) -> DeviceMemory | None:
    if own.device is None and own.device_memory is None:
        return None
    if own.device is not None and own.device_memory is not None:
        raise ConfigError(Fault("--device, --device-memory", "both are given", hint="choose one of them"))
    from hp_trainer.plan import device_memory, parse_memory

    return device_memory(own.device) if own.device is not None else parse_memory(own.device_memory)
