"""PassConfig: defaults, canonical names, refusals that name field, value and what is allowed."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace

import pytest

from hp_compile import DP_MODES, PP_SCHEDULES, PassConfig, build_pass_config_from_trainer_config, normalize_dp_mode


def trainer_config(dp: object = 4, edp: object = 1, tp: object = 2) -> SimpleNamespace:
    return SimpleNamespace(
        accelerator=SimpleNamespace(tp_size=tp, sequence_parallel=True, loss_parallel=False),
        fsdp_config=SimpleNamespace(dp_shard_size=dp, edp_shard_size=edp),
    )


def test_the_defaults_are_those_of_the_contract():
    assert asdict(PassConfig()) == {
        "enable_overlap": True,
        "fsdp_enabled": True,
        "fsdp_reshard_after_forward": True,
        "fsdp_degree": None,
        "dp_mode": "fsdp",
        "dp_replicate_degree": None,
        "tp_size": 1,
        "sequence_parallel": False,
        "loss_parallel": False,
        "pp_enabled": False,
        "pp_degree": None,
        "pp_microbatch_size": 1,
        "pp_schedule": "gpipe",
        "param_dtype": None,
        "reduce_dtype": None,
        "grad_reduce": "avg",
        "bucket_mb": None,
        "reduce_every": "train_step",
    }


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ("fsdp", "fsdp"),
        (" FSDP\n", "fsdp"),
        ("Fully_Shard", "fsdp"),
        ("fully shard", "fsdp"),
        ("DDP", "ddp"),
        ("replicate ", "ddp"),
        ("hsdp", "hsdp"),
        ("Hybrid_Shard", "hsdp"),
    ],
)
def test_a_mode_is_known_by_its_aliases_whatever_case_and_space(given, mode):
    assert normalize_dp_mode(given) == mode
    assert PassConfig(dp_mode=given).dp_mode == mode


@pytest.mark.parametrize("given", ["zero3", "", None, 3])
def test_an_unknown_mode_lists_the_allowed_ones(given):
    with pytest.raises(ValueError, match=r"dp_mode=.*allowed: fsdp, ddp, hsdp"):
        normalize_dp_mode(given)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("enable_overlap", 1, "True or False"),
        ("fsdp_enabled", None, "True or False"),
        ("fsdp_reshard_after_forward", "yes", "True or False"),
        ("fsdp_degree", 0, "None or an integer of at least 1"),
        ("fsdp_degree", True, "None or an integer"),
        ("fsdp_degree", 2.0, "None or an integer"),
        ("dp_replicate_degree", -1, "None or an integer"),
        ("tp_size", 0, "an integer of at least 1"),
        ("tp_size", None, "an integer of at least 1"),
        ("sequence_parallel", 0, "True or False"),
        ("loss_parallel", "no", "True or False"),
        ("pp_enabled", 2, "True or False"),
        ("pp_degree", 0, "None or an integer"),
        ("pp_microbatch_size", 0, "an integer of at least 1"),
        ("pp_schedule", "interleaved", "'gpipe', '1f1b'"),
        ("param_dtype", "bf16", "bfloat16, float16, float32, float64"),
        ("reduce_dtype", "torch.float32", "bfloat16, float16, float32, float64"),
        ("grad_reduce", "mean", "'avg', 'sum'"),
        ("bucket_mb", -1, "None .*, 0 .* or a size in MiB"),
        ("bucket_mb", float("nan"), "a size in MiB"),
        ("bucket_mb", "25", "a size in MiB"),
        ("reduce_every", "step", "'train_step', 'optimizer_step'"),
    ],
)
def test_a_wrong_value_names_field_value_and_what_is_allowed(field, value, allowed):
    with pytest.raises(ValueError, match=rf"(?s){field}={value!r} .*allowed: .*{allowed}"):
        PassConfig(**{field: value})


def test_validate_sees_what_was_assigned_after_construction():
    config = PassConfig()
    config.tp_size = -3
    with pytest.raises(ValueError, match="tp_size=-3"):
        config.validate()


def test_replication_in_fsdp_mode_points_to_hsdp():
    with pytest.raises(ValueError, match=r"dp_replicate_degree=2 .*dp_mode='hsdp'"):
        PassConfig(dp_replicate_degree=2)
    assert PassConfig(dp_replicate_degree=1).dp_replicate_degree == 1
    assert PassConfig(dp_mode="hsdp", dp_replicate_degree=2, fsdp_degree=4).fsdp_degree == 4


def test_sharding_in_ddp_mode_points_to_hsdp():
    with pytest.raises(ValueError, match=r"fsdp_degree=4 .*dp_mode='hsdp'"):
        PassConfig(dp_mode="ddp", fsdp_degree=4)


def test_the_pipeline_fields_are_accepted_and_validated():
    for schedule in PP_SCHEDULES:
        assert PassConfig(pp_enabled=True, pp_degree=2, pp_microbatch_size=4, pp_schedule=schedule).pp_enabled
    assert DP_MODES == ("fsdp", "ddp", "hsdp")
    assert PP_SCHEDULES == ("gpipe", "1f1b")


def test_a_trainer_config_is_projected():
    config = build_pass_config_from_trainer_config(trainer_config(), enable_overlap=True)
    assert config == PassConfig(
        enable_overlap=True, fsdp_enabled=True, fsdp_degree=4, tp_size=2, sequence_parallel=True, loss_parallel=False
    )


def test_overlap_is_off_in_a_projected_config_unless_asked_for():
    assert build_pass_config_from_trainer_config(trainer_config()).enable_overlap is False


@pytest.mark.parametrize(
    ("dp", "edp", "asked", "enabled", "degree"),
    [
        (1, 1, None, False, None),
        (4, 1, None, True, 4),
        (1, 2, None, True, 1),
        (4, 1, False, False, None),
        (1, 1, True, True, 1),
    ],
)
def test_sharding_is_enabled_by_either_shard_size_or_by_asking(dp, edp, asked, enabled, degree):
    config = build_pass_config_from_trainer_config(trainer_config(dp, edp), fsdp_enabled=asked)
    assert (config.fsdp_enabled, config.fsdp_degree) == (enabled, degree)


def test_a_trainer_config_that_lacks_an_attribute_is_refused_by_path():
    config = trainer_config()
    del config.accelerator.tp_size
    with pytest.raises(ValueError, match=r"accelerator\.tp_size is missing"):
        build_pass_config_from_trainer_config(config)
    with pytest.raises(ValueError, match=r"fsdp_config\.dp_shard_size=-1 .*at least 1"):
        build_pass_config_from_trainer_config(trainer_config(dp=-1))
