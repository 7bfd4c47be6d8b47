"""`hp sample`: what a trained model writes.

In: a run folder, a prompt, how to choose tokens. Out: the text on standard output as it comes; an exit code.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

from hp_protocols.errors import ConfigError, Fault
from hp_trainer.cli.arguments import Arguments
from hp_trainer.cli.frame import run_command

USAGE = """\
usage: hp sample RUN_FOLDER [options]

Continue a prompt with the newest checkpoint of a run. The likeliest token is taken each time, so that the same command
writes the same text; with a temperature tokens are drawn.

  --prompt TEXT         what the text begins with; default: the beginning of a document
  --max_new_tokens N    tokens to write at most (default 200); the end of the document ends it earlier
  --temperature T       draw tokens; 1 as the model thinks, less is safer, more is wilder (default 0: the likeliest)
  --top_k K             draw from the likeliest K tokens
  --seed N              another seed draws another text (default 0)
  --step N              the checkpoint of that step instead of the newest

exit codes: 0 fine, 2 a mistake in the command"""


def main(arguments: list[str]) -> int:
    """Run `hp sample <arguments>`."""
    return run_command("hp sample", USAGE, arguments, lambda given: write(parse(given)))


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options, checked.

    Raises:
        ConfigError: one of them is no such value, or would do nothing.
    """
    parser = Arguments("hp sample")
    parser.add_argument("run_folder", metavar="RUN_FOLDER", type=Path)
    parser.flag("prompt", default="")
    parser.flag("max_new_tokens", type=int, default=200)
    parser.flag("temperature", type=float, default=0.0)
    parser.flag("top_k", type=int)
    parser.flag("seed", type=int)
    parser.flag("step", type=int)
    options = parser.parse_args(arguments)
    faults = []
    if options.max_new_tokens < 1:
        faults.append(Fault("--max_new_tokens", f"{options.max_new_tokens} is too few", allowed="1 or more"))
    if not 0.0 <= options.temperature < float("inf"):
        faults.append(Fault("--temperature", f"{options.temperature} is no temperature", allowed="0 or more"))
    if options.top_k is not None and options.top_k < 1:
        faults.append(Fault("--top_k", f"{options.top_k} is too few", allowed="1 or more"))
    if options.temperature == 0.0:
        for name in ("top_k", "seed"):
            if getattr(options, name) is not None:
                problem = "does nothing while the likeliest token is taken each time"
                faults.append(Fault(f"--{name}", problem, hint="give a --temperature above 0, such as 0.8"))
    if faults:
        raise ConfigError(faults)
    return options


def write(options: argparse.Namespace) -> None:
    """Load the model and write the text."""
    from hp_trainer.sampling import generate, load_trained_model, stream_text

    trained = load_trained_model(options.run_folder, options.step)
    tokenizer = trained.tokenizer
    prompt = tokenizer.encode(options.prompt, add_bos=tokenizer.bos_id is not None, add_eos=False)
    if not prompt:
        raise ConfigError(Fault("--prompt", "is empty, and this tokenizer has no token that begins a document"))
    tokens = generate(
        trained.module,
        prompt,
        max_new_tokens=options.max_new_tokens,
        context=trained.context,
        vocab_size=tokenizer.vocab_size,
        device=trained.device,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed or 0,
        stop=tokenizer.eos_id,
    )
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal of few characters shows the others by their numbers.
        sys.stdout.reconfigure(errors="backslashreplace")
    print(f"{options.run_folder}, after step {trained.step}:\n", file=sys.stderr, flush=True)
    print(options.prompt, end="", flush=True)
    try:
        for piece in stream_text(tokenizer, prompt, tokens):
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass  # the reader has seen enough
    print()
