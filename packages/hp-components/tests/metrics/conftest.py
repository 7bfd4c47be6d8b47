"""A run's metrics with a clock of its own, and readers for the curves that it leaves."""

import struct

import pytest

from hp_components import MetricsProcessor


class Clock:
    """Time that passes only when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Quiet:
    """A stream that is no terminal."""

    def __init__(self, encoding="utf-8"):
        self.text = ""
        self.encoding = encoding

    def write(self, text):
        self.text += text

    def flush(self):
        pass

    def isatty(self):
        return False


class Part:
    """One start of a run of 12 steps, a record for each; what it says is in `stream.text`."""

    def __init__(self, folder, *, rank=0, config_dict=None, stream=None, **knobs):
        self.clock, self.stream = Clock(), stream or Quiet()
        self.metrics = MetricsProcessor.Config(**({"log_freq": 1} | knobs)).build(
            run_folder=folder,
            total_steps=12,
            clock=self.clock,
            rank=rank,
            stream=self.stream,
            config_dict=config_dict,
        )

    def train(self, first, last, shift=0.0):
        """Steps `first` to `last`; the loss is step / 10, plus a shift."""
        if first == 1:
            self.metrics.begin()
        for step in range(first, last + 1):
            self.step(step, step / 10 + shift)
        return self

    def step(self, step, loss, grad_norm=1.0):
        self.clock.now += 0.5
        self.metrics.record(step, loss=loss, grad_norm=grad_norm, lr=1e-3, tokens=100)

    def resumed_from(self, state, step):
        self.metrics.load_state_dict(state)
        self.metrics.begin(step)
        return self


@pytest.fixture
def part():
    return Part


@pytest.fixture
def quiet():
    return Quiet


@pytest.fixture
def tensorboard_curves():
    """The curves as TensorBoard itself reads a folder: name → [(step, value)]."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read(folder):
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
        events.Reload()
        return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}

    return read


@pytest.fixture
def wandb_records():
    """What an offline W&B run has kept, read from its files in the order in which `wandb sync` sends them."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    def read(folder):
        wandb.teardown()  # its process may still be writing
        return [
            Record.FromString(data)
            for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=_age)
            for data in _chunks(file)
        ]

    return read


def _age(file):
    return file.stat().st_mtime_ns


def _chunks(file):
    """The format of W&B's files is that of LevelDB's log: blocks of 32 KiB, pieces with crc, length and kind."""
    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if kind == 0:
            break
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield whole
            whole = b""
