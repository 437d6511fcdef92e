"""A tuned profile: the knobs that ``vllm-spac tune`` found for a model on a machine.

One way to serve a model that may be measured, and how exact it is.

Identifies the model and the versions that a tuned profile belongs to, without reading weights.

The profile that ``vllm-spac tune`` writes: knobs that were measured to be faster, for one model on one machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vllm_spac.config.config import SpacConfig, component_knobs
from vllm_spac.config.types import BudgetBound
from vllm_spac.decisions.comparison import Ratio
from vllm_spac.errors import ConfigError, brief
from vllm_spac.system import files
from vllm_spac.system.files import make_folder, write_text, writing
from vllm_spac.system.machine import Machine, versions
from vllm_spac.system.untrusted import open_file, read_text

Departure = Literal["rounding", "lossy"]  # from vLLM's tokens; none of them: exact
Knob = str | int | float | bool

DEFAULT, LRU = "default", "policy=lru"  # names of the baselines

# Knobs that candidates, and so a tuned profile, may set: those that decide speed, and none that writes anything.
MAY_SET = frozenset(
    {
        "slots", "store", "host_memory", "policy", "prefetch", "predictor_file", "guard", "tree", "cpu_experts",
        "io_threads", "decisions", "budget", "budget_ranking", "budget_coverage",
    }
)  # fmt: skip


def departures(knobs: Mapping[str, Any]) -> frozenset[Departure]:
    """Returns what knobs do to tokens: ``rounding`` other than vLLM's kernel's, a ``lossy`` budget, or nothing."""
    found: set[Departure] = set()
    if knobs.get("budget") is not None:
        found.add("lossy")
    ours = str(knobs.get("decisions", "auto")).startswith("device")
    if ours or str(knobs.get("cpu_experts", "off")) != "off":
        found.add("rounding")
    return frozenset(found)


@dataclass(frozen=True)
class Candidate:
    """One way to serve.

    Attributes:
        name: shown, and unique among the candidates of a run.
        group: what it changes; of each group one can be combined with those of others.
        knobs: of the plugin; None: stock vLLM.
        drafts: vLLM's ``speculative_config``; None: no drafts.
        options: further arguments of the engine, of stock vLLM alone.
        note: what it costs in quality, if it is lossy.
    """

    name: str
    group: str
    knobs: Mapping[str, Knob] | None
    drafts: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def is_stock(self) -> bool:
        return self.knobs is None

    @property
    def departures(self) -> frozenset[Departure]:
        return departures(self.knobs or {})

    @property
    def allowance(self) -> Departure | None:
        """What a server has to allow (``tuned=auto@allow=``) for the choice to be used; None: nothing."""
        return "lossy" if "lossy" in self.departures else "rounding" if "rounding" in self.departures else None

    @property
    def same_steps(self) -> bool:
        """Whether its steps have the rows that steps without drafts have, so that its tokens must be equal."""
        return self.drafts is None and not self.departures


def combine(default: Candidate, ranked: list[Candidate]) -> Candidate | None:
    """Returns the best candidate of each group together, or None if fewer than two groups changed anything.

    Args:
        default: what each of them changes.
        ranked: candidates that were faster than ``default``, the fastest first; stock vLLM left out.
    """
    chosen: dict[str, Candidate] = {}
    knobs = dict(default.knobs or {})
    drafts, notes = default.drafts, []
    for candidate in ranked:
        changed = {name: value for name, value in (candidate.knobs or {}).items() if name not in (default.knobs or {})}
        if candidate.group in chosen or (drafts is not None and candidate.drafts is not None):
            continue
        if any(knobs.get(name, value) != value for name, value in changed.items()) or not _valid(knobs | changed):
            continue
        chosen[candidate.group] = candidate
        knobs |= changed
        drafts = candidate.drafts or drafts
        notes += [candidate.note] if candidate.note else []
    if len(chosen) < 2:
        return None
    name = " + ".join(candidate.name for candidate in chosen.values())
    return Candidate(name, "combined", knobs, drafts, note="; ".join(notes))


def _valid(knobs: Mapping[str, Knob]) -> bool:
    try:
        SpacConfig.parse(dict(knobs))
    except ConfigError:  # these do not go together, which is no reason not to combine the others
        return False
    return True


_WEIGHTS = (".safetensors", ".bin", ".pt")
_VERSIONS = ("vllm", "vllm_spac", "torch")  # that decide speed


def identity(folder: Path) -> str:
    """Returns 32 hexadecimal digits that change with ``config.json`` and the names and sizes of the weight files.

    A profile decides speed and no token, so the weights themselves need not be the same.

    Raises:
        OSError: there is no ``config.json``, or the folder cannot be read.
    """
    files = sorted((path.name, path.stat().st_size) for path in folder.iterdir() if path.suffix in _WEIGHTS)
    config = (folder / "config.json").read_bytes()
    return xxhash.xxh3_128_hexdigest(config + json.dumps(files).encode())


def relevant_versions() -> dict[str, str]:
    """Returns the versions that a speed depends on; empty text for what is not installed."""
    found = versions()
    return {name: found[name] or "" for name in _VERSIONS}


def changed(then: dict[str, str], now: dict[str, str]) -> list[str]:
    """Returns ``vllm: 0.32.0, not 0.33.0`` for each version that differs."""
    differing = {name: text for name, text in then.items() if text != now.get(name)}
    return [f"{name}: {text or 'none'}, not {now.get(name) or 'none'}" for name, text in differing.items()]


FORMAT: Final = "spac-tuned-3"
_MOST_BYTES = 1 << 20  # of a file: one of a hundred candidates has 50 KB
_AGAIN = "run vllm-spac tune again"


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Measured(_Frozen):
    """What was measured of one candidate.

    Attributes:
        speed: tokens per second over the default's, in the last round with both; None: it was not measured.
        tokens_per_second, first_token: medians of its last round, the latter in seconds.
        rounds: in how many it was measured.
        tokens: how its tokens compare with the default's.
        problem: why there is no speed.
    """

    name: str
    speed: float | None = None
    tokens_per_second: float | None = None
    first_token: float | None = None
    rounds: int = 0
    tokens: str = ""
    note: str = ""
    problem: str = ""


class Drafts(BaseModel):
    """What a profile may say of drafts, of vLLM's ``speculative_config``: no class, no code, nothing that is lossy."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    method: Literal["ngram", "eagle", "eagle3", "mtp", "draft_model", "medusa", "mlp_speculator"]
    model: str | None = None
    num_speculative_tokens: int | None = Field(None, ge=1, le=1024)
    prompt_lookup_max: int | None = Field(None, ge=1, le=1024)
    prompt_lookup_min: int | None = Field(None, ge=1, le=1024)
    draft_tensor_parallel_size: int | None = Field(None, ge=1, le=1024)
    max_model_len: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _consistent(self) -> Drafts:
        if self.model is None and self.method not in ("ngram", "mtp"):
            raise ValueError(f"drafts of {self.method} need a model")
        return self

    @classmethod
    def check(cls, config: dict[str, Any]) -> None:
        """Raises ``ValueError``, in one line, if a profile may not say ``config``."""
        try:
            cls.model_validate(config)
        except ValidationError as error:
            raise ValueError(_listed(error, "drafts")) from None


class TunedProfile(_Frozen):
    """A tuned profile.

    Attributes:
        model: as it was named; ``identity``: its content, as of ``identity``.
        choice: name of the candidate; ``default`` if none was faster.
        knobs: that ``vllm serve`` adds; ``speculative_config``: likewise. Both empty with ``default``.
        ratio: of the choice over the default, in turns; None if no candidate came to that.
        files: xxh3_128 of the content of each file that a knob names.
        engine: further arguments of the engines that were measured.
        arguments: of the command, that decide what was measured.
    """

    format: Literal["spac-tuned-3"] = FORMAT
    model: str
    identity: str
    machine: Machine
    versions: dict[str, str]
    choice: str
    knobs: dict[str, Knob]
    speculative_config: dict[str, Any] | None = None
    ratio: Ratio | None = None
    measured: tuple[Measured, ...] = ()
    files: dict[str, str] = {}
    engine: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    command: str = ""
    date: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> TunedProfile:
        if odd := sorted(self.knobs.keys() - MAY_SET):
            raise ValueError(f"a tuned profile sets no {', '.join(odd)}")
        for name, kind in component_knobs().items():
            value = self.knobs.get(name)
            if value is not None and not kind.is_ours(value):  # nothing is imported
                raise ValueError(f"{name}={brief(value)} is the name of no {kind.noun} of this package")
        if (budget := self.knobs.get("budget")) is not None and BudgetBound.parse(str(budget)).file is not None:
            raise ValueError(f"budget={brief(budget)} is no number: a tuned profile names no file of budgets")
        if self.speculative_config is not None:
            Drafts.check(self.speculative_config)
        for name in ("tensor_parallel_size", "max_num_seqs"):
            if type(self.engine.get(name, 1)) is not int:
                raise ValueError(f"{name} of its engine is no number")
        return self

    @classmethod
    def read(cls, path: Path) -> TunedProfile:
        """Reads a profile, and imports nothing that it names; ``ConfigError`` if there is none, or it is none.

        Also if another user owns it or may write it.
        """
        if problem := files.refusal(path):
            raise ConfigError(problem)
        try:
            return cls.model_validate_json(read_text(path, _MOST_BYTES))
        except FileNotFoundError as error:
            raise ConfigError(f"there is no tuned profile {path}; make it with vllm-spac tune MODEL") from error
        except ValidationError as error:
            problems = _listed(error, "file")
            raise ConfigError(f"{path} is no tuned profile of format {FORMAT}: {problems}; {_AGAIN}") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"the tuned profile {path} cannot be read: {error}; {_AGAIN}") from error

    def write(self, path: Path) -> None:
        """Writes the profile atomically; ``ConfigError`` if it cannot be written."""
        with writing(path, "name a folder with --disk-dir DIR"):
            make_folder(path.parent)
            write_text(path, self.model_dump_json(indent=1) + "\n")

    def differences(self, machine: Machine, versions: dict[str, str]) -> list[str]:
        """Returns what has changed since: ``cores: 8, not 4`` of each property of the machine and each version."""
        return [*self.machine.differences(machine), *changed(self.versions, versions)]

    @property
    def keeps_default(self) -> bool:
        return not self.knobs and self.speculative_config is None


def digest(path: Path) -> str:
    """Returns xxh3_128 of a file's content; ``OSError`` if it cannot be read."""
    found = xxhash.xxh3_128()
    with open_file(path) as file:
        while block := file.read(_MOST_BYTES):
            found.update(block)
    return found.hexdigest()


def digests(knobs: Mapping[str, Knob]) -> dict[str, str]:
    """Returns the digest of each file that ``knobs`` name, by its path; ``OSError`` if one cannot be read."""
    named = knobs.get("predictor_file")
    return {} if named is None else {str(named): digest(Path(str(named)))}


def _listed(error: ValidationError, whole: str) -> str:
    """The first problems in one line; ``whole``: what one of no field in particular is of."""
    found = error.errors(include_url=False, include_context=False, include_input=False)[:3]
    return "; ".join(f"{'.'.join(map(str, each['loc'])) or whole}: {each['msg']}" for each in found)


def path_of(folder: Path, identity: str) -> Path:
    """Returns where the profile of a model is: beside its packed experts in ``folder``."""
    return folder / f"tuned-{identity}.json"
