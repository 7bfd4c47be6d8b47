"""What must work in an environment without torch: hp_protocols, hp_config, PassConfig and PassPlan of hp_compile.

In: an environment with the wheels and without torch. Out: exit code 1 if torch is there or something needs it.
"""

import importlib.util
import sys


def main() -> int:
    if importlib.util.find_spec("torch") is not None:
        print("torch is installed here, so this proves nothing")
        return 1
    import hp_compile
    import hp_config
    import hp_protocols

    hp_protocols.Configurable.Config()
    hp_config.TrainingConfig(steps=3)
    hp_compile.PassConfig(dp_mode="hsdp", fsdp_degree=2).validate()
    hp_compile.PassPlan()
    try:
        hp_compile.PassConfig(dp_mode="no such mode")
    except ValueError as error:
        print(f"refused as it should be: {error}")
    else:
        print("PassConfig took a mode that does not exist")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
