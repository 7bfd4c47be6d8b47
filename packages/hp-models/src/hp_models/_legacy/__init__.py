"""The models of the older trainer: bare modules with plans as strings, reached as `get_spec("qwen3_5")`.

In: a flavour. Out: a `ModelSpec` with `build_model_fn`. Nothing here shares code with the models under the Module
protocol, so that two implementations that agree to the last bit say something.
"""

from __future__ import annotations

__all__: list[str] = []
