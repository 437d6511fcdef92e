"""Adds the knobs of a tuned profile to an engine's arguments, where the user set none of them."""

from __future__ import annotations

import copy
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_spac.config import tuned_profile
from vllm_spac.config.config import SpacConfig
from vllm_spac.config.tuned_profile import TunedProfile, path_of, rounds
from vllm_spac.config.types import ALLOWED, ROUNDED
from vllm_spac.errors import ConfigError, Remedy, UnsupportedError, flag, printable, use
from vllm_spac.integration.hooks import device
from vllm_spac.storage.checkpoint.headers import find_folder
from vllm_spac.system.machine import Machine

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger("vllm.spac")

_AGAIN = "run vllm-spac tune again, or set --spac-tuned off"


def apply(engine_args: EngineArgs, config: SpacConfig) -> SpacConfig:
    """Returns the configuration with a tuned profile's knobs, which are also added to ``engine_args``.

    With ``tuned=auto`` the profile is looked for beside the packed experts, for ``vllm serve`` without a preset alone:
    what a program or a paper configures is not changed by what somebody measured, unless it asks for that. A profile is
    data and decides nothing that matters: one that cannot be used, for any reason, is a warning, and the engine starts
    untuned.

    Raises:
        ConfigError: the user named a file that does not exist.
    """
    if getattr(engine_args, "spac_tuned", False):  # this configuration has the knobs already
        return config
    named = config.tuned_profile
    path = _beside(engine_args, config) if named in ("auto", "off") else Path(named)
    if path is None:
        return config
    if named not in ("auto", "off") and not path.exists():
        raise ConfigError.refused(
            f"spac: tuned={path} ({flag('tuned')}): there is no such file",
            Remedy("make it with vllm-spac tune"),
            use(tuned="auto"),
        )
    try:
        profile = TunedProfile.read(path)
        problem = _problem(engine_args, config, profile)
    except ConfigError as error:
        problem = str(error).removeprefix("spac: ")
    if problem:
        text = f"spac: the tuned profile {path} is not used, and the server starts untuned: {problem}"
        logger.warning("%s", printable(text))
        return config
    if profile.keeps_default:
        logger.info("spac: tuned=%s: nothing was faster than the default", path)
        return config
    return _applied(engine_args, config, profile, path)


def _beside(engine_args: EngineArgs, config: SpacConfig) -> Path | None:
    """Returns the profile beside the packed experts; None if there is none, or none is wanted."""
    command = getattr(engine_args, "spac_command", False) and config.preset is None
    if config.tuned_profile == "off" or not (command or "tuned" in config.model_fields_set):
        return None
    if (name := _identity(engine_args)) is None:
        return None
    path = path_of(config.folder, name)
    return path if os.path.lexists(path) else None


def _identity(engine_args: EngineArgs) -> str | None:
    """Returns the identity of the model; None if its files are not on this machine yet."""
    try:
        return tuned_profile.identity(find_folder(str(engine_args.model)))
    except (UnsupportedError, OSError):
        return None


def _problem(engine_args: EngineArgs, config: SpacConfig, profile: TunedProfile) -> str | None:
    """Returns why the profile cannot be used as it was measured, and what to do; None if it can."""
    if _identity(engine_args) != profile.identity:
        return f"it was made for another model ({profile.model}) than {engine_args.model}; {_AGAIN}"
    here = Machine.here(config.folder, device.names())
    if differences := profile.differences(here, tuned_profile.relevant_versions()):
        return f"it was measured with {'; '.join(differences)}; {_AGAIN}"
    return (
        _not_allowed(config, profile)
        or _draft_problem(engine_args, profile)
        or _contradiction(engine_args, config, profile)
    )


def _not_allowed(config: SpacConfig, profile: TunedProfile) -> str | None:
    if not rounds(profile.knobs):
        return None
    # On a GPU kernels of ours round by default, and plane=slots asks for stock's bits.
    usual = ALLOWED[0] if device.is_cpu() or config.plane == "slots" else ALLOWED[1]
    if (config.tuned_allow or usual) == ALLOWED[1]:
        return None
    instead = f"set --spac-tuned {config.tuned_profile}@allow={ALLOWED[1]}, or {_AGAIN}"
    return f"its knobs are {ROUNDED}, which the command line does not allow; {instead}"


def _draft_problem(engine_args: EngineArgs, profile: TunedProfile) -> str | None:
    """Returns what is wrong with the draft model that the profile names; one that has to be downloaded is missing."""
    if (named := (profile.speculative_config or {}).get("model")) is None or profile.speculative_config is None:
        return None
    if profile.speculative_config["method"] == "ngram":
        return "its ngram drafts name a model; " + _AGAIN
    if getattr(engine_args, "trust_remote_code", False):
        return f"with --trust-remote-code its draft model {named} could run code; give --speculative-config yourself"
    try:
        if (find_folder(named) / "config.json").is_file():
            return None
    except (UnsupportedError, OSError, ValueError):  # no name that a file system or a hub can have
        pass
    return f"it uses the draft model {named}, which is not there any more; {_AGAIN}"


def _contradiction(engine_args: EngineArgs, config: SpacConfig, profile: TunedProfile) -> str | None:
    """Returns which of the user's own arguments the profile does not go with."""
    try:
        theirs = SpacConfig.parse(profile.knobs)
    except ConfigError as error:
        return f"its knobs are none: {str(error).removeprefix('spac: ')}; {_AGAIN}"
    given = {name: getattr(config, name) for name in config.model_fields_set if name in profile.knobs}
    own = [name for name, value in given.items() if value != getattr(theirs, name)]
    flags = list(map(flag, sorted(own)))
    if profile.speculative_config is not None and engine_args.speculative_config is not None:
        flags.append("--speculative-config")
    if flags:
        return f"you set {', '.join(flags)}, which it would set; drop it, or set --spac-tuned off"
    ranks = profile.engine.get("tensor_parallel_size", 1)
    if engine_args.tensor_parallel_size != ranks:
        return f"it was measured with --tensor-parallel-size {ranks}; set --spac-tuned off"
    if engine_args.pipeline_parallel_size > 1:
        return "it was measured with one pipeline stage; set --spac-tuned off"
    try:
        SpacConfig.parse(_merged(engine_args, profile))
    except ConfigError as error:
        return f"its knobs do not go with yours: {str(error).removeprefix('spac: ')}; or set --spac-tuned off"
    return None


def _applied(engine_args: EngineArgs, config: SpacConfig, profile: TunedProfile, path: Path) -> SpacConfig:
    allow = "" if config.tuned_allow is None else f"@allow={config.tuned_allow}"
    spac = _merged(engine_args, profile) | {"tuned": f"{path}{allow}"}
    engine_args.additional_config = {**engine_args.additional_config, "spac": spac}
    if profile.speculative_config is not None:
        engine_args.speculative_config = copy.deepcopy(profile.speculative_config)
    engine_args.spac_tuned = True
    knobs = [f"{name}={value}" for name, value in profile.knobs.items() if name not in config.model_fields_set]
    if profile.speculative_config is not None:
        drafts = profile.speculative_config
        knobs.append(f"drafts={drafts.get('method', '')} {drafts.get('num_speculative_tokens', '')}".strip())
    measured = "" if profile.ratio is None else f"; measured: {profile.ratio} times the default's tokens per second"
    logger.info("%s", printable(f"spac: tuned={path} sets {', '.join(knobs)}{measured}"))
    return SpacConfig.parse(spac)


def _merged(engine_args: EngineArgs, profile: TunedProfile) -> dict:
    return {**profile.knobs, **engine_args.additional_config["spac"]}
