"""Files of trained predictors, the tensors of all that fit a model in one safetensors file; and their training.

Format ``spac-predictors-4``. Metadata (text): ``format``, ``fingerprint``, ``model``, ``layers`` (JSON, names in the
order of execution), ``tokens`` (rows that were fitted to), ``names`` (JSON, the predictors), ``left_out`` (JSON,
predictor -> why it does not fit the model), and ``experts``, ``top_k``, ``width``, ``reach`` (``Sizes``). A tensor is
called ``PREDICTOR.TENSOR``; its dtype and shape follow from the sizes (``Trained.specs``).
Training runs in stages, so that it can be resumed when it was interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Self, cast

import torch
from torch import Tensor

from vllm_spac import components
from vllm_spac.decisions.predictors._trained import Material, Sizes, Trained
from vllm_spac.errors import ConfigError, printable
from vllm_spac.system import tensor_file
from vllm_spac.system.tensor_file import check, layer_names
from vllm_spac.system.untrusted import parse_json

FORMAT = "spac-predictors-4"
DTYPES = {"I64", "F32", "BF16"}
_MOST, _MOST_LAYERS, _MOST_REACH = 1 << 20, 1024, 8  # experts or dimensions, and others, that a file may claim
_AGAIN = "train again with `vllm-spac predictors train`"
_SIZES = tuple(field.name for field in fields(Sizes) if field.name != "layers")


@dataclass(frozen=True)
class Identity:
    """The model that predictors are of."""

    fingerprint: str  # identifies the model, its revision and its weights
    model: str
    layers: tuple[str, ...]  # names of the MoE layers, in the order of execution


@dataclass(frozen=True, eq=False)
class PredictorFile:
    """Trained predictors in memory; the module's docstring describes the format."""

    identity: Identity
    sizes: Sizes
    tokens: int  # rows that the predictors were fitted to
    tensors: Mapping[str, Mapping[str, Tensor]]  # predictor -> its tensors
    left_out: Mapping[str, str]  # predictor -> why it is not in the file

    @classmethod
    def load(cls, path: str | Path, identity: Identity, experts: int) -> PredictorFile:
        """Reads a file of this model.

        Raises:
            ConfigError: the file cannot be read, is damaged or of another kind, or of another model or revision.
        """
        found = cls.read(path)
        other = found.identity
        same = (other.fingerprint, other.layers) == (identity.fingerprint, identity.layers)
        if not same or found.sizes.experts != experts:
            raise ConfigError(
                f"spac: {path} was made for {other.model} ({other.fingerprint[:12]}, {len(other.layers)} layers of "
                f"{found.sizes.experts} experts), not for this model or revision ({identity.fingerprint[:12]}, "
                f"{len(identity.layers)} layers of {experts}); run `vllm-spac predictors train` for this one"
            )
        return found

    def check_model(self, path: str | Path, fingerprint: str) -> None:
        """Raises ``ConfigError`` unless the file, read from ``path``, is of the model with this fingerprint."""
        if self.identity.fingerprint != fingerprint:
            found = printable(f"{self.identity.model} ({self.identity.fingerprint[:12]})")
            raise ConfigError(
                f"spac: {path} was made for {found}, not for this model or revision ({fingerprint[:12]}); "
                "run `vllm-spac predictors train` for this one"
            )

    @classmethod
    def read(cls, path: str | Path) -> PredictorFile:
        """Reads a file of any model; ``ConfigError`` when it cannot be read, is damaged or of another kind."""
        metadata, tensors = tensor_file.read(Path(path), FORMAT, "a file of predictors", _AGAIN, DTYPES, trusted=True)
        try:
            return cls._of(metadata, tensors)
        except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ConfigError(f"spac: {path} is damaged: {error!r}; {_AGAIN}") from error

    @classmethod
    def _of(cls, metadata: dict[str, str], tensors: dict[str, Tensor]) -> PredictorFile:
        layers = layer_names(metadata["layers"])
        numbers = {name: int(metadata[name]) for name in _SIZES}
        check(max(numbers.values()) <= _MOST and numbers["reach"] <= _MOST_REACH, "impossible sizes")
        check(len(layers) <= _MOST_LAYERS, "impossible sizes")
        sizes, names = Sizes(layers=len(layers), **numbers), parse_json(metadata["names"])
        left_out = parse_json(metadata["left_out"])
        known = [name for name in kinds() if name in names]
        check(isinstance(names, list) and len(known) == len(names) > 0, "its predictors are not known")
        check(isinstance(left_out, dict) and not set(left_out) & set(names), "what it left out is no mapping")
        grouped: dict[str, dict[str, Tensor]] = {name: {} for name in known}
        for full, value in tensors.items():
            name, _, tensor = full.partition(".")
            grouped[name][tensor] = value
        for name in known:
            check_tensors(name, kinds()[name].specs(sizes), grouped[name])
        identity = Identity(metadata["fingerprint"], metadata["model"], layers)
        found = cls(identity, sizes, int(metadata["tokens"]), grouped, {str(k): str(v) for k, v in left_out.items()})
        for name in known:
            found.build(name)  # refuses values that a predictor cannot have
        return found

    @property
    def names(self) -> list[str]:
        """The predictors of the file, in the order in which they can be trained."""
        return [name for name in kinds() if name in self.tensors]

    def build(self, name: str, reach: int | None = None) -> Trained:
        """Returns a predictor of the file; ``KeyError`` if it has none of this name.

        Args:
            reach: layers that it looks ahead at most, 1 or more. Those that it asks look one layer ahead.
        """
        beside = {other: self.build(other, 1) for other in needed(name, self.names)}
        sizes = self.sizes if reach is None else replace(self.sizes, reach=min(reach, self.sizes.reach))
        tensors = self.tensors[name]
        with next(iter(tensors.values())).device:  # what it makes of them
            return kinds()[name](sizes, tensors, beside)

    def on(self, device: torch.device) -> Self:
        """Returns the same predictors with tensors on ``device``."""
        moved = {name: {part: t.to(device) for part, t in found.items()} for name, found in self.tensors.items()}
        return replace(self, tensors=moved)

    def save(self, path: str | Path) -> None:
        """Writes the file atomically; ``ConfigError`` when it cannot be written."""
        tensor_file.write(Path(path), flat(self.tensors), self._metadata())

    def _metadata(self) -> dict[str, str]:
        identity = {"fingerprint": self.identity.fingerprint, "model": self.identity.model}
        identity |= {"layers": json.dumps(self.identity.layers), "tokens": str(self.tokens)}
        lists = {"names": json.dumps(self.names), "left_out": json.dumps(dict(self.left_out))}
        return {"format": FORMAT} | identity | lists | {name: str(getattr(self.sizes, name)) for name in _SIZES}


@cache
def kinds() -> dict[str, type[Trained]]:
    """Returns the trained predictors by name, each after those that it asks."""
    found = {name: components.find("predictors", name) for name in components.names("predictors")}
    trained = {name: cast(type[Trained], kind) for name, kind in found.items() if issubclass(kind, Trained)}
    return dict(sorted(trained.items(), key=lambda item: (item[1].chooses, item[0])))


def needed(name: str, names: Sequence[str]) -> list[str]:
    """Returns those of ``names`` that the predictor ``name`` asks: of one that chooses, all that do not."""
    return [other for other in names if not kinds()[other].chooses] if kinds()[name].chooses else []


def check_tensors(name: str, specs: Mapping, tensors: Mapping[str, Tensor]) -> None:
    """Raises ``ValueError`` unless the tensors of a predictor have the names, dtypes and shapes of ``specs``."""
    check(set(tensors) == set(specs), f"{name} has other tensors than its sizes say")
    for tensor, (dtype, shape) in specs.items():
        value = tensors[tensor]
        check(value.dtype == dtype and value.shape == shape, f"{name}.{tensor} has another type or shape")
        check(not dtype.is_floating_point or bool(value.isfinite().all()), f"{name}.{tensor} holds no numbers")


def flat(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the tensors by ``PREDICTOR.TENSOR``."""
    return {f"{name}.{tensor}": value for name, group in tensors.items() for tensor, value in group.items()}


PROGRESS_FORMAT = "spac-predictors-progress-1"
NOT_WANTED = "it was not asked for"
_REMEDY = "delete it to start from the first stage"


class Training:
    """The stages of all predictors that fit a model, in an order in which each finds those that it asks.

    Args:
        source: identifies the texts, e.g. their checksum; progress made with others is not resumed.
        only: the predictors that are wanted; those that they ask are trained too. None: all.

    Attributes:
        left_out: predictor -> why it is not trained.

    Raises:
        ConfigError: ``only`` has a name that no trained predictor has.
    """

    def __init__(
        self, material: Material, identity: Identity, source: str, only: Collection[str] | None = None
    ) -> None:
        self.left_out: dict[str, str] = {}
        names: list[str] = []
        wanted = closure(only)
        for name, kind in kinds().items():
            if name not in wanted:
                self.left_out[name] = NOT_WANTED
            elif why := kind.unfit(material):
                self.left_out[name] = why
            else:
                names.append(name)
        self._material, self._identity, self._source = material, identity, source
        self._stages = [(name, stage) for name in names for stage in range(kinds()[name].stages(material.sizes))]
        self._made: dict[str, dict[str, Tensor]] = {name: {} for name in names}
        self.done = 0

    @property
    def stages(self) -> int:
        """Number of all stages; ``done`` of them are made."""
        return len(self._stages)

    def run(self) -> Iterator[str]:
        """Makes the stages that are missing; yields the name of the predictor after each."""
        for name, stage in self._stages[self.done :]:
            beside = {other: self._file().build(other, 1) for other in needed(name, list(self._made))}
            self._made[name] |= kinds()[name].train(stage, self._material, beside)
            self.done += 1
            yield name

    def result(self) -> PredictorFile:
        """Returns the predictors; all stages must have been made."""
        assert self.done == self.stages, "the training is not over"
        return self._file()

    def save_progress(self, path: str | Path) -> None:
        """Writes what is made so far, atomically; ``ConfigError`` when it cannot be written."""
        metadata = {"format": PROGRESS_FORMAT, "done": str(self.done)} | self._facts()
        tensor_file.write(Path(path), flat(self._made), metadata)

    def load_progress(self, path: str | Path) -> None:
        """Restores what ``save_progress`` wrote.

        Raises:
            ConfigError: the file cannot be read, is damaged, or belongs to another model or other texts.
        """
        metadata, tensors = tensor_file.read(Path(path), PROGRESS_FORMAT, "the progress of a training", _REMEDY, DTYPES)
        if any(metadata.get(name) != value for name, value in self._facts().items()):
            raise ConfigError(
                f"spac: {path} is the progress of another model, other texts or other predictors; {_REMEDY}"
            )
        try:
            done = int(metadata.get("done", ""))
            check(0 <= done <= self.stages, f"{done} of {self.stages} stages")
            made: dict[str, dict[str, Tensor]] = {name: {} for name in self._made}
            for full, value in tensors.items():
                name, _, tensor = full.partition(".")
                made[name][tensor] = value
            self._check(made, done)
        except (KeyError, ValueError) as error:
            raise ConfigError(f"spac: {path} is damaged: {error!r}; {_REMEDY}") from error
        self._made, self.done = made, done

    def _check(self, made: dict[str, dict[str, Tensor]], done: int) -> None:
        """Raises ``ValueError`` unless ``made`` are tensors of the first ``done`` stages."""
        left = {name for name, _ in self._stages[done:]}
        for name, tensors in made.items():
            specs = kinds()[name].specs(self._material.sizes)
            there = {tensor: spec for tensor, spec in specs.items() if tensor in tensors} if name in left else specs
            check_tensors(name, there, tensors)
        begun = sum(len(made[name]) * kinds()[name].stages(self._material.sizes) for name in left)
        whole = sum(len(kinds()[name].specs(self._material.sizes)) for name, _ in self._stages[:done] if name in left)
        check(begun == whole, "it holds the tensors of other stages")

    def _file(self) -> PredictorFile:
        material = self._material
        finished = {name for name, _ in self._stages} - {name for name, _ in self._stages[self.done :]}
        tensors = {name: made for name, made in self._made.items() if name in finished}
        return PredictorFile(self._identity, material.sizes, material.samples.rows, tensors, self.left_out)

    def _facts(self) -> dict[str, str]:
        identity = self._identity
        return {
            "fingerprint": identity.fingerprint,
            "layers": json.dumps(identity.layers),
            "sizes": json.dumps(astuple(self._material.sizes)),
            "source": self._source,
            "predictors": json.dumps(list(self._made)),
        }


def closure(only: Collection[str] | None) -> set[str]:
    """Returns the predictors called ``only``, and those that they ask; all of them for None.

    Raises:
        ConfigError: no trained predictor has such a name.
    """
    known = list(kinds())
    if unknown := sorted(set(only or ()) - set(known)):
        raise ConfigError(f"spac: no trained predictor is called {unknown[0]}; use {', '.join(known)}")
    found = set(known if only is None else only)
    for name in reversed(known):  # each comes after those that it asks
        if name in found:
            found.update(needed(name, known))
    return found
