"""What happens when a rank dies, hangs or raises: every rank ends, and one message says which it was and what it did.

In: what each rank is doing (`activity`), a store that all ranks reach. Out: `RankFailure`, told once per machine.
"""

from __future__ import annotations

from hp_trainer.faults.activity import activity
from hp_trainer.faults.failure import RankFailure

__all__ = ["RankFailure", "activity"]
