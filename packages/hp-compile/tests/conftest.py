"""Makes the tests' own helper modules importable, in this process and in the ranks that tests start."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
# References are computed here and compared bit for bit with ranks and examples, which run with one thread each:
# torch sums in another order with another number of threads.
torch.set_num_threads(1)
