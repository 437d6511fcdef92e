"""Trains all predictors of a file in stages, so that an interrupted training can be resumed."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import astuple, replace
from pathlib import Path

from torch import Tensor

from vllm_spac.errors import ConfigError
from vllm_spac.prediction.file import DTYPES, Identity, PredictorFile, check_tensors, flat, kinds, needed
from vllm_spac.predictors._recall import Hits
from vllm_spac.predictors._trained import Material, Trained
from vllm_spac.system import tensor_file
from vllm_spac.system.tensor_file import check

PROGRESS_FORMAT = "spac-predictors-progress-1"
NOT_WANTED = "it was not asked for"
_REMEDY = "delete it to start from the first stage"


class Training:
    """The stages of all predictors that fit a model, in an order in which each finds those that it uses.

    Args:
        material: what the predictors are made from.
        identity: of the model.
        source: identifies the texts, e.g. their checksum; progress made with others is not resumed.
        drafter: as in ``PredictorFile``.
        only: the predictors that are wanted; those that they use are trained too. None: all.

    Attributes:
        left_out: predictor -> why it is not trained.

    Raises:
        ConfigError: ``only`` has a name that no trained predictor has.
    """

    def __init__(
        self,
        material: Material,
        identity: Identity,
        source: str,
        drafter: str = "",
        only: Collection[str] | None = None,
    ) -> None:
        self.left_out: dict[str, str] = {}
        names: list[str] = []
        wanted = closure(only)
        for name, kind in kinds().items():
            if name not in wanted:
                self.left_out[name] = NOT_WANTED
            elif why := self._unfit(name, kind, material, names):
                self.left_out[name] = why
            else:
                names.append(name)
        self._material, self._identity, self._source, self._drafter = material, identity, source, drafter
        self._stages = [(name, stage) for name in names for stage in range(kinds()[name].stages(material.sizes))]
        self._made: dict[str, dict[str, Tensor]] = {name: {} for name in names}
        self.done = 0

    @staticmethod
    def _unfit(name: str, kind: type[Trained], material: Material, names: list[str]) -> str:
        missing = [other for other in needed(name, names) if other not in names]
        return f"it needs {missing[0]}" if missing else kind.unfit(material)

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
        """Returns the predictors with their recall on texts not fitted to; all stages must have been made."""
        assert self.done == self.stages, "the training is not over"
        file, (_, judged) = self._file(), self._material.others.halves()
        return replace(file, recall={name: Hits.of(file.build(name), judged).recalls() for name in file.names})

    def save_progress(self, path: str | Path) -> None:
        """Writes what is made so far, atomically; ``ConfigError`` when it cannot be written."""
        metadata = {"format": PROGRESS_FORMAT, "done": str(self.done)} | self._facts()
        tensor_file.write(Path(path), flat(self._made), metadata)

    def resume(self, path: str | Path) -> None:
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
        rows, drafter = material.samples.rows, self._drafter
        return PredictorFile(self._identity, material.sizes, rows, tensors, self.left_out, {}, drafter)

    def _facts(self) -> dict[str, str]:
        identity = self._identity
        return {
            "fingerprint": identity.fingerprint,
            "layers": json.dumps(identity.layers),
            "sizes": json.dumps(astuple(self._material.sizes)),
            "source": self._source,
            "drafter": self._drafter,
            "predictors": json.dumps(list(self._made)),
        }


def closure(only: Collection[str] | None) -> set[str]:
    """Returns the predictors called ``only``, and those that they use; all of them for None.

    Raises:
        ConfigError: no trained predictor has such a name.
    """
    known = list(kinds())
    if unknown := sorted(set(only or ()) - set(known)):
        raise ConfigError(f"spac: no trained predictor is called {unknown[0]}; use {', '.join(known)}")
    found = set(known if only is None else only)
    for name in reversed(known):  # each comes after those that it uses
        if name in found:
            found.update(needed(name, known))
    return found
