"""Settings of actor and critic under --megatron-config-path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.trainer_wiring import critic_config, trainer_config
from vime.errors import SettingsError
from vime.settings.groups import Settings
from vime.settings.parse import parse_settings
from vime.settings.roles import FIELDS_OF_ROLES, settings_of_role

FILE = """\
megatron:
- {role: actor, overrides: {lr: 2e-6, eps-clip: 0.1, lr_warmup_iters: "3"}}
- {role: critic, args: {lr: 1e-5, clip_grad: 2, value_clip: 0.5, load: /first, save: /copies,
                        freeze_params_name_list: [embedding], weight_decay: 0.1}}
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "roles.yaml").write_text(FILE)
    words = (
        "--global-batch-size 4 --advantage-estimator ppo --kl-coef 0.1 --lr 1e-6 --load /run --save /run --lambd 0.9"
    )
    return parse_settings([*words.split(), "--megatron-config-path", str(tmp_path / "roles.yaml")])


def test_each_role_has_its_own_values_and_shares_the_others(settings: Settings) -> None:
    actor, for_actor = settings_of_role(settings, "actor")
    critic, for_critic = settings_of_role(settings, "critic")
    assert (actor.trainer.lr, critic.trainer.lr) == (2e-6, 1e-5)
    assert (actor.objective.eps_clip, critic.objective.value_clip) == (0.1, 0.5)
    assert (actor.objective.lambd, critic.objective.lambd) == (0.9, 0.9)
    assert (actor.checkpoint.load, critic.checkpoint.load, critic.checkpoint.save) == ("/run", "/first", "/copies")
    assert critic.trainer.freeze_params_name_list == ("embedding",)
    assert (for_actor, for_critic) == ({"lr_warmup_iters": "3"}, {"weight_decay": 0.1})


def test_without_a_file_the_critic_starts_where_the_actor_does_and_has_no_copy() -> None:
    settings = parse_settings(["--advantage-estimator", "ppo", "--load", "/run", "--save", "/run", "--lr", "3e-6"])
    critic, overrides = settings_of_role(settings, "critic")
    assert (critic.checkpoint.load, critic.checkpoint.save, critic.trainer.lr, overrides) == (None, None, 3e-6, {})
    assert settings_of_role(settings, "actor") == (settings, {})


def test_the_critic_predicts_the_reward_without_the_actors_penalties(settings: Settings) -> None:
    critic = critic_config(settings, 1)
    assert (critic.trainer.lr, critic.trainer.clip_grad, critic.value_clip) == (1e-5, 2.0, 0.5)
    assert (critic.load, critic.save) == (Path("/first"), Path("/copies"))
    assert critic.trainer.freeze_params == ("embedding",)
    assert critic.trainer.megatron_overrides == {"weight_decay": 0.1}
    assert trainer_config(settings, 1).objective.kl_coef == 0.1
    returns = critic.returns
    assert (returns.kl_coef, returns.opd_kl_coef, returns.custom_advantages, returns.lambd) == (0.0, None, None, 0.9)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("{role: actor, overrides: {num_rollout: 3}}", "overrides.num_rollout is a flag of the whole run, allowed for"),
        ("{role: actor, overrides: {save: /x}}", "overrides.save is a flag of the whole run"),
        (
            "{role: critic, overrides: {eps_clip: 1}}",
            "overrides.eps_clip is a flag of the whole run, allowed for the c",
        ),
        ("{role: critic, overrides: {value_clip: -1}}", "overrides.value_clip is -1.0, allowed: 0 or more"),
        ("{role: critic, overrides: {lr: [1]}}", r"overrides.lr is [1] (list), allowed: a number"),
    ],
)
def test_what_a_role_may_not_have_for_itself_is_refused_with_its_place(tmp_path: Path, entry: str, said: str) -> None:
    path = tmp_path / "roles.yaml"
    path.write_text(f"megatron: [{entry}]")
    settings = parse_settings(["--megatron-config-path", str(path)])
    role: Any = "actor" if "actor" in entry else "critic"
    with pytest.raises(SettingsError) as caught:
        settings_of_role(settings, role)
    assert said in caught.value.message
    assert caught.value.next_step


def test_roles_override_flags_that_exist() -> None:
    from vime.settings.groups import all_flags

    assert {field for fields in FIELDS_OF_ROLES.values() for field in fields} <= all_flags().keys()
