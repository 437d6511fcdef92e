"""Calibrations: statistics of a model's routing on a sample of text, in one safetensors file; and budgets from them.

Format ``spac-calibration-4``. Metadata (text): ``format``, ``fingerprint``, ``model``, ``layers`` (JSON, names in the
order of execution), ``experts`` N, ``top_k``, ``window`` M, ``tokens``. Tensors, L layers:

    counts  int64   [L, N]     tokens that selected an expert
    curves  float32 [2, L, N]  share of a mass that the B best experts hold, B = 1 .. N: the mean over windows of M
                               consecutive tokens (the rows of a verify step). In each window the ranking ``selected``
                               gives the best experts. First for the mass ``selected``, the routing weights of the
                               experts that the tokens selected, then for ``scores``, the routers' scores of all
                               experts (``MASSES``)

A budget for each layer is chosen from a calibration, and kept in a JSON file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_spac.errors import ConfigError
from vllm_spac.methods.moe_spec.settings import MASSES, check_mass, check_mass_of
from vllm_spac.system import files, tensor_file
from vllm_spac.system.files import write_text, writing
from vllm_spac.system.tensor_file import check, layer_names
from vllm_spac.system.untrusted import parse_json, read_text

FORMAT = "spac-calibration-4"
PROGRESS_FORMAT = "spac-calibration-progress-4"
_DTYPES = {"I64", "F32", "F64"}
_AGAIN = "write it again with `vllm-spac quality calibrate`"


@dataclass(frozen=True, eq=False)
class Calibration:
    """A calibration in memory; the module's docstring describes the format."""

    fingerprint: str  # identifies the model, its revision and its weights
    model: str
    layers: tuple[str, ...]  # names of the MoE layers, in the order of execution
    top_k: int
    window: int  # tokens per window of ``curves``; 1 + the draft tokens of a step
    tokens: int
    counts: Tensor  # int64 [L, N], selections of each expert
    curves: Tensor

    @property
    def experts(self) -> int:
        return self.counts.shape[1]

    def curve(self, mass_of: str) -> Tensor:
        """float32 [L, N], the curves of one of ``MASSES``."""
        return self.curves[MASSES.index(mass_of)]

    @classmethod
    def load(cls, path: str | Path, fingerprint: str, layers: Sequence[str] | None, experts: int) -> Calibration:
        """Reads a calibration of this model; ``layers`` is None while the layers are not known yet.

        Raises:
            ConfigError: the file cannot be read, is damaged or no calibration, or belongs to another model or revision.
        """
        calibration = cls.read(path)
        calibration.check_model(path, fingerprint, layers, experts)
        return calibration

    def check_model(self, path: str | Path, fingerprint: str, layers: Sequence[str] | None, experts: int) -> None:
        """Raises ``ConfigError`` if this calibration, read from ``path``, is of another model or revision."""
        expected = self.layers if layers is None else tuple(layers)
        if self.fingerprint != fingerprint or self.layers != expected or self.experts != experts:
            raise ConfigError(
                f"spac: {path} was made for {self.model} ({self.fingerprint[:12]}, {len(self.layers)} layers of "
                f"{self.experts} experts), not for this model or revision ({fingerprint[:12]}, {len(expected)} layers "
                f"of {experts}); run `vllm-spac quality calibrate` for this one"
            )

    @classmethod
    def read(cls, path: str | Path) -> Calibration:
        """Reads a calibration of any model; ``ConfigError`` when it cannot be read, is damaged or no calibration."""
        metadata, tensors = tensor_file.read(Path(path), FORMAT, "a calibration", _AGAIN, _DTYPES, trusted=True)
        try:
            return cls._of(metadata, tensors)
        except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ConfigError(f"spac: {path} is damaged: {error!r}; {_AGAIN}") from error

    @classmethod
    def _of(cls, metadata: dict[str, str], tensors: dict[str, Tensor]) -> Calibration:
        layers, experts = layer_names(metadata["layers"]), int(metadata["experts"])
        counts, curves = tensors["counts"], tensors["curves"]
        check(counts.shape == (len(layers), experts) and counts.dtype == torch.int64, "counts has another type")
        check(curves.shape == (len(MASSES), *counts.shape) and curves.dtype == torch.float32, "curves has another type")
        calibration = cls(
            fingerprint=metadata["fingerprint"],
            model=metadata["model"],
            layers=layers,
            top_k=int(metadata["top_k"]),
            window=int(metadata["window"]),
            tokens=int(metadata["tokens"]),
            counts=counts,
            curves=curves,
        )
        check(0 < calibration.top_k <= experts and calibration.window > 0, "impossible model")
        check(bool((counts.sum(1) == calibration.tokens * calibration.top_k).all()), "counts and tokens differ")
        check(bool(curves.isfinite().all()), "a curve is not a number")
        return calibration

    def save(self, path: str | Path) -> None:
        """Writes the file atomically; ``ConfigError`` when it cannot be written."""
        tensor_file.write(Path(path), {"counts": self.counts, "curves": self.curves}, self._metadata(FORMAT))

    def _metadata(self, format: str) -> dict[str, str]:
        names = ("fingerprint", "model", "experts", "top_k", "window", "tokens")
        return {"format": format, "layers": json.dumps(self.layers)} | {n: str(getattr(self, n)) for n in names}


class CalibrationRecorder:
    """Accumulates routing statistics while a model runs, in bounded memory.

    Call ``observe`` once per MoE layer and forward, with the rows of one text in order, and ``end_text`` after each
    text. Tokens after the last whole window of a text are counted, but are not in the curves.

    Args:
        experts: routed experts per layer (N).
        source: identifies the texts, e.g. their checksum; progress made with other texts is not resumed.
    """

    def __init__(
        self,
        fingerprint: str,
        model: str,
        layers: Sequence[str],
        experts: int,
        top_k: int,
        window: int,
        source: str = "",
    ) -> None:
        assert layers and 1 <= top_k <= experts and window >= 1
        self.facts = {
            "fingerprint": fingerprint,
            "model": model,
            "layers": json.dumps(list(layers)),
            "experts": str(experts),
            "top_k": str(top_k),
            "window": str(window),
            "source": source,
        }
        self.texts = 0
        self._layers, self._top_k, self._window = tuple(layers), top_k, window
        self._sums = {
            "counts": torch.zeros(len(layers), experts, dtype=torch.int64),
            "curves": torch.zeros(len(MASSES), len(layers), experts, dtype=torch.float64),
            "windows": torch.zeros(len(layers), dtype=torch.int64),
            "tokens": torch.zeros(len(layers), dtype=torch.int64),
        }
        self._open: dict[int, Tensor] = {}

    @property
    def tokens(self) -> int:
        """Number of tokens observed in every layer."""
        return int(self._sums["tokens"].min())

    def observe(self, layer: int, probs: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> None:
        """Adds the next rows of a text, as scored by the router of one layer.

        Args:
            probs: float [rows, N], router scores over all experts.
            topk_weights: float [rows, k], the routing weights.
            topk_ids: int [rows, k], the natural choice.
        """
        experts = self._sums["counts"].shape[1]
        assert probs.shape == (len(topk_ids), experts) and topk_ids.shape[1] == self._top_k
        chosen = torch.zeros_like(probs, dtype=torch.float32).scatter(1, topk_ids.long(), 1.0)
        self._sums["counts"][layer] += chosen.sum(0).to("cpu", torch.int64)
        self._sums["tokens"][layer] += len(probs)
        selected = torch.zeros_like(probs).scatter(1, topk_ids.long(), topk_weights.to(probs.dtype))
        rows = torch.stack((selected, probs.detach(), probs.detach() * chosen), 1).to("cpu", torch.float64)
        if layer in self._open:
            rows = torch.cat((self._open[layer], rows))
        whole = len(rows) // self._window
        self._open[layer] = rows[whole * self._window :].clone()
        mass = rows[: whole * self._window].view(whole, self._window, len(MASSES) + 1, experts).sum(1)
        mass, own = mass[:, : len(MASSES)], mass[:, -1]
        order = mass[:, MASSES.index("scores")].sort(dim=1, descending=True, stable=True).indices
        order = order.gather(1, own.gather(1, order).sort(dim=1, descending=True, stable=True).indices)
        held = mass.gather(2, order[:, None].expand_as(mass)).cumsum(2)
        self._sums["curves"][:, layer] += (held / held[:, :, -1:]).sum(0)
        self._sums["windows"][layer] += whole

    def end_text(self) -> None:
        """Ends a text: no window spans its end."""
        self._open.clear()
        self.texts += 1

    def result(self) -> Calibration:
        """The calibration of all texts so far; ``ConfigError`` if no token was observed."""
        sums = self._sums
        if self.tokens == 0:
            raise ConfigError("spac: the calibration saw no token; use prompts that are not empty")
        assert int(sums["tokens"].max()) == self.tokens, "the layers saw different numbers of tokens"
        return Calibration(
            fingerprint=self.facts["fingerprint"],
            model=self.facts["model"],
            layers=self._layers,
            top_k=self._top_k,
            window=self._window,
            tokens=self.tokens,
            counts=sums["counts"].clone(),
            curves=(sums["curves"] / sums["windows"].clamp(min=1)[:, None]).to(torch.float32),
        )

    def save_progress(self, path: str | Path) -> None:
        """Writes the state between two texts, atomically; ``ConfigError`` when it cannot be written."""
        assert not self._open, "a text is not over"
        tensor_file.write(Path(path), self._sums, {"format": PROGRESS_FORMAT, "texts": str(self.texts)} | self.facts)

    def resume(self, path: str | Path) -> None:
        """Restores what ``save_progress`` wrote; the caller then skips the first ``texts`` texts.

        Raises:
            ConfigError: the file cannot be read or belongs to another model, window or ``source``.
        """
        remedy = "delete it to start from the first text"
        metadata, sums = tensor_file.read(Path(path), PROGRESS_FORMAT, "the progress of a calibration", remedy, _DTYPES)
        same = all(metadata.get(name) == value for name, value in self.facts.items())
        same = same and metadata.get("texts", "").isdecimal()
        if not same or {k: (v.shape, v.dtype) for k, v in sums.items()} != {
            k: (v.shape, v.dtype) for k, v in self._sums.items()
        }:
            raise ConfigError(f"spac: {path} is the progress of another model, window or set of texts; {remedy}")
        self.texts, self._sums = int(metadata["texts"]), sums
        self._open.clear()


LAYERS_FORMAT = "spac-budgets-1"
_AGAIN_BY_LAYER = "write it again with `vllm-spac quality budgets`"


def choose(
    calibration: Calibration, mass: float, coverage: str = "substitution", mass_of: str = "selected"
) -> dict[str, int]:
    """The smallest budget per layer whose best experts hold ``mass`` of a window's mass on average.

    Args:
        mass: share in (0, 1]; 1.0 gives N.
        coverage: budgets are at least ``top_k`` under ``substitution``, and at least 1 under ``truncation``.
        mass_of: the mass that ``mass`` is a share of, one of ``MASSES``.

    Returns:
        layer name -> budget.

    Raises:
        ConfigError: ``mass`` is out of range, ``mass_of`` or ``coverage`` unknown, or the calibration saw no whole
            window.
    """
    check_mass(mass)
    check_mass_of(mass_of)
    if coverage not in ("truncation", "substitution"):
        raise ConfigError(f"spac: coverage={coverage!r}: use truncation or substitution")
    curves = calibration.curve(mass_of)
    if not bool((curves[:, -1] > 0).all()):
        raise ConfigError(
            f"spac: the calibration saw {calibration.tokens} tokens and no window of {calibration.window}; calibrate "
            "with more text"
        )
    least = calibration.top_k if coverage == "substitution" else 1
    if mass == 1.0:
        return dict.fromkeys(calibration.layers, calibration.experts)
    needed = 1 + (curves[:, :-1] < torch.tensor(mass, dtype=torch.float32)).sum(1)
    return {name: max(least, budget) for name, budget in zip(calibration.layers, needed.tolist(), strict=True)}


def write_budgets(path: str | Path, fingerprint: str, budgets: dict[str, int], asked: dict[str, Any]) -> None:
    """Writes a budget file atomically; ``ConfigError`` when it cannot be written.

    Args:
        budgets: layer name -> B.
        asked: the targets that the budgets were tuned to (``mass``, ``mass_of``, ``coverage``); for information only.
    """
    content = {"format": LAYERS_FORMAT, "fingerprint": fingerprint, "tuned_to": asked, "budgets": budgets}
    with writing(f"spac: {path}"):
        write_text(Path(path), json.dumps(content, indent=2) + "\n")


def read_budgets(
    path: str | Path, fingerprint: str | None, layers: Sequence[str] | None, experts: int
) -> dict[str, int]:
    """Reads the budget of each layer, in the order of ``layers``.

    Args:
        fingerprint: of the model; None if not known yet, then it is not compared.
        layers: names of the MoE layers; None if not known yet.

    Raises:
        ConfigError: the file cannot be read, is no budget file, belongs to another model or revision, lacks a layer,
            names an unknown one, or has a budget that is no number from 1 to ``experts``.
    """
    if problem := files.refusal(Path(path)):
        raise ConfigError(f"spac: budget (--spac-budget): {problem}")
    try:
        content = parse_json(read_text(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"spac: {path} (--spac-budget) cannot be read: {error}; {_AGAIN_BY_LAYER}") from error
    if not isinstance(content, dict) or content.get("format") != LAYERS_FORMAT:
        raise ConfigError(f"spac: {path} (--spac-budget) is no budget file of {LAYERS_FORMAT}; {_AGAIN_BY_LAYER}")
    budgets = content.get("budgets")
    other = fingerprint is not None and content.get("fingerprint") != fingerprint
    if other or not isinstance(budgets, dict) or (layers is not None and set(budgets) != set(layers)):
        raise ConfigError(
            f"spac: {path} (--spac-budget) was made for another model or revision: {content.get('fingerprint')}, "
            f"not {fingerprint}, or its layers differ; run `vllm-spac quality calibrate`, then `vllm-spac "
            "quality budgets`"
        )
    for name, budget in budgets.items():
        if type(budget) is not int or not 1 <= budget <= experts:
            raise ConfigError(f"spac: {path} (--spac-budget): the budget of {name} is {budget!r}; use 1 to {experts}")
    return {name: budgets[name] for name in (budgets if layers is None else layers)}
