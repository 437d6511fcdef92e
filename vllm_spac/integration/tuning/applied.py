"""Adds the knobs of a tuned profile to an engine's arguments, where the user set none of them."""

from __future__ import annotations

import copy
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_spac.checkpoint.headers import find_folder
from vllm_spac.config import SpacConfig
from vllm_spac.errors import ConfigError, UnsupportedError
from vllm_spac.integration import device
from vllm_spac.system.machine import Machine
from vllm_spac.tuning import identity
from vllm_spac.tuning.profile import TunedProfile, path_of

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger("vllm.spac")

_KEEP = ("off", "auto")


def apply(engine_args: EngineArgs, config: SpacConfig) -> SpacConfig:
    """Returns the configuration with a tuned profile's knobs, which are also added to ``engine_args``.

    With ``tuned=auto`` the profile is looked for beside the packed experts, for ``vllm serve`` alone: what a program
    configures is not changed by what somebody measured, unless it asks for that.

    Raises:
        ConfigError: ``tuned`` names a file that is no profile, is of another model, or cannot be used here.
    """
    if getattr(engine_args, "spac_tuned", False):  # this configuration has the knobs already
        return config
    asked = config.tuned not in _KEEP
    path = Path(config.tuned).expanduser() if asked else _beside(engine_args, config)
    if path is None:
        return config
    try:
        profile = TunedProfile.read(path)
        if asked:
            _check_model(engine_args, profile)
    except ConfigError as error:
        if asked:
            raise _naming(config, error) from error
        logger.warning("spac: %s; it is ignored", error)
        return config
    if problem := _problem(engine_args, config, profile):
        if asked:
            raise _naming(config, problem)
        logger.warning("spac: the tuned profile %s is ignored: %s", path, problem)
        return config
    if profile.keeps_default:
        logger.info("spac: tuned=%s: nothing was faster than the default", path)
        return config
    return _applied(engine_args, config, profile, path)


def _beside(engine_args: EngineArgs, config: SpacConfig) -> Path | None:
    """Returns the profile beside the packed experts; None if there is none, or none is wanted."""
    wanted = getattr(engine_args, "spac_command", False) or "tuned" in config.model_fields_set
    if config.tuned == "off" or not wanted:
        return None
    if (name := _identity(engine_args)) is None:
        return None
    path = path_of(config.folder, name)
    return path if path.exists() else None


def _identity(engine_args: EngineArgs) -> str | None:
    """Returns the identity of the model; None if its files are not on this machine yet."""
    try:
        return identity.identity(find_folder(str(engine_args.model)))
    except (UnsupportedError, OSError):
        return None


def _check_model(engine_args: EngineArgs, profile: TunedProfile) -> None:
    if _identity(engine_args) != profile.identity:
        raise ConfigError(
            f"it was made for another model ({profile.model}) than {engine_args.model}; run vllm-spac tune for this one"
        )


def _problem(engine_args: EngineArgs, config: SpacConfig, profile: TunedProfile) -> str | None:
    """Returns why the profile cannot be used as it was measured, and what to do; None if it can."""
    here = Machine.here(config.folder, device.names())
    if differences := profile.differences(here, identity.relevant_versions()):
        return f"it was measured with {'; '.join(differences)}; run vllm-spac tune again, or set --spac-tuned off"
    if missing := _missing(profile):
        return f"it uses {missing}, which is not there any more; run vllm-spac tune again, or set --spac-tuned off"
    given = {name: getattr(config, name) for name in config.model_fields_set if name in profile.knobs}
    theirs = SpacConfig.parse(profile.knobs)
    own = [name for name, value in given.items() if value != getattr(theirs, name)]
    flags = [f"--spac-{name.replace('_', '-')}" for name in sorted(own)]
    if profile.speculative_config is not None and engine_args.speculative_config is not None:
        flags.append("--speculative-config")
    if flags:
        return f"you set {', '.join(flags)}, which it would set; drop it, or set --spac-tuned off"
    ranks = profile.engine.get("tensor_parallel_size", 1)
    if engine_args.tensor_parallel_size != ranks:
        return f"it was measured with --tensor-parallel-size {ranks}; set --spac-tuned off"
    most = profile.engine.get("max_num_seqs")
    if profile.knobs.get("tree") and most and (engine_args.max_num_seqs or most + 1) > most:
        return f"it drafts trees, measured with --max-num-seqs {most}; add that, or set --spac-tuned off"
    try:
        SpacConfig.parse(_merged(engine_args, profile))
    except ConfigError as error:
        return f"its knobs do not go with yours: {str(error).removeprefix('spac: ')}; or set --spac-tuned off"
    return None


def _missing(profile: TunedProfile) -> str | None:
    """Returns a file or folder that the profile names and that does not exist."""
    named = [profile.knobs.get("predictor_file"), (profile.speculative_config or {}).get("model")]
    paths = [str(path) for path in named if path]
    return next((path for path in paths if os.path.isabs(path) and not os.path.exists(path)), None)


def _applied(engine_args: EngineArgs, config: SpacConfig, profile: TunedProfile, path: Path) -> SpacConfig:
    spac = _merged(engine_args, profile) | {"tuned": str(path)}
    engine_args.additional_config = {**engine_args.additional_config, "spac": spac}
    if profile.speculative_config is not None:
        engine_args.speculative_config = copy.deepcopy(profile.speculative_config)
    engine_args.spac_tuned = True
    knobs = [f"{name}={value}" for name, value in profile.knobs.items() if name not in config.model_fields_set]
    if profile.speculative_config is not None:
        drafts = profile.speculative_config
        knobs.append(f"drafts={drafts.get('method', '')} {drafts.get('num_speculative_tokens', '')}".strip())
    measured = "" if profile.ratio is None else f"; measured: {profile.ratio} times the default's tokens per second"
    logger.info("spac: tuned=%s sets %s%s", path, ", ".join(knobs), measured)
    return SpacConfig.parse(spac)


def _merged(engine_args: EngineArgs, profile: TunedProfile) -> dict:
    return {**profile.knobs, **engine_args.additional_config["spac"]}


def _naming(config: SpacConfig, problem: object) -> ConfigError:
    text = str(problem).removeprefix("spac: ")
    return ConfigError(f"spac: tuned={config.tuned} (--spac-tuned): {text}")
