"""What a model's routers do on a sample of text: one safetensors file, and budgets for each layer from it.

Format ``spac-calibration-1``. Metadata (text): ``format``, ``fingerprint``, ``model``, ``layers`` (JSON, names in the
order of execution), ``experts`` N, ``top_k``, ``window`` M, ``tokens``. Tensors, L layers:

    pairs   int64   [L, N, N]  tokens that selected both experts; on the diagonal, the selections of one
    counts  int64   [L, N]     that diagonal
    curves  float32 [L, N]     share of the router mass that the best B experts hold, B = 1 .. N: the mean over windows
                               of M consecutive tokens (a verify step's rows), each with its own best experts
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vllm_spac.budgets.base import check_mass
from vllm_spac.errors import ConfigError

FORMAT = "spac-calibration-1"
PROGRESS_FORMAT = "spac-calibration-progress-1"
BUDGETS_FORMAT = "spac-budgets-1"
_AGAIN = "write it again with `vllm-spac calibrate`"
_TUNE_AGAIN = "write it again with `vllm-spac tune`"


@dataclass(frozen=True, eq=False)
class Calibration:
    """A calibration in memory; see above.

    Attributes:
        fingerprint: names the model, its revision and its weights.
        model: its name, for people.
        layers: names of the MoE layers, in the order of execution.
        top_k: experts that a token uses.
        window: tokens in a window of ``curves``; 1 + the draft tokens of a step.
        tokens: tokens observed.
    """

    fingerprint: str
    model: str
    layers: tuple[str, ...]
    top_k: int
    window: int
    tokens: int
    pairs: Tensor
    curves: Tensor

    @property
    def experts(self) -> int:
        return self.pairs.shape[1]

    @property
    def counts(self) -> Tensor:
        """int64 [L, N], selections of each expert."""
        return self.pairs.diagonal(dim1=1, dim2=2).contiguous()

    @classmethod
    def load(cls, path: str | Path, fingerprint: str, layers: Sequence[str], experts: int) -> Calibration:
        """Read the file that was written for this model.

        Raises:
            ConfigError: it cannot be read, is damaged or no calibration, or belongs to another model or revision.
        """
        found = cls.read(path)
        if found.fingerprint != fingerprint or found.layers != tuple(layers) or found.experts != experts:
            raise ConfigError(
                f"spac: {path} was made for {found.model} ({found.fingerprint[:12]}, {len(found.layers)} layers of "
                f"{found.experts} experts), not for this model or revision ({fingerprint[:12]}, {len(layers)} layers "
                f"of {experts}); run `vllm-spac calibrate` for this one"
            )
        return found

    @classmethod
    def read(cls, path: str | Path) -> Calibration:
        """Read the file of any model; ``ConfigError`` when it cannot be read, is damaged or no calibration."""
        metadata, tensors = _read(Path(path), FORMAT, "a calibration", _AGAIN)
        try:
            return cls._of(metadata, tensors)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"spac: {path} is damaged: {error!r}; {_AGAIN}") from error

    @classmethod
    def _of(cls, metadata: dict[str, str], tensors: dict[str, Tensor]) -> Calibration:
        texts = {name: metadata[name] for name in ("fingerprint", "model")}
        numbers = {name: int(metadata[name]) for name in ("top_k", "window", "tokens")}
        layers, experts = tuple(json.loads(metadata["layers"])), int(metadata["experts"])
        pairs, curves, counts = tensors["pairs"], tensors["curves"], tensors["counts"]
        _check(pairs.shape == (len(layers), experts, experts) and pairs.dtype == torch.int64, "pairs has another type")
        _check(curves.shape == (len(layers), experts) and curves.dtype == torch.float32, "curves has another type")
        found = cls(**texts, **numbers, layers=layers, pairs=pairs, curves=curves)
        _check(counts.dtype == torch.int64 and torch.equal(counts, found.counts), "counts and pairs differ")
        _check(0 < found.top_k <= experts and found.window > 0, "impossible model")
        _check(bool((found.counts.sum(1) == found.tokens * found.top_k).all()), "counts and tokens differ")
        _check(bool(curves.isfinite().all()), "a curve is not a number")
        return found

    def save(self, path: str | Path) -> None:
        """Write the file, all or nothing; ``ConfigError`` when it cannot be written."""
        tensors = {"pairs": self.pairs, "counts": self.counts, "curves": self.curves}
        _write(Path(path), tensors, self._metadata(FORMAT))

    def _metadata(self, format: str) -> dict[str, str]:
        names = ("fingerprint", "model", "experts", "top_k", "window", "tokens")
        return {"format": format, "layers": json.dumps(self.layers)} | {n: str(getattr(self, n)) for n in names}


class CalibrationRecorder:
    """Adds up what the routers do while a model runs; bounded memory.

    ``observe`` once for each MoE layer and forward, with rows of one text in their order; then ``end_text``. What a
    text leaves behind its last whole window counts as tokens, but not in the curves.

    Args:
        fingerprint, model, layers, top_k, window: see ``Calibration``.
        experts: routed experts in a layer (N).
        source: names the texts, e.g. their checksum: progress with others is not continued.

    Attributes:
        texts: those that are complete.
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
            "pairs": torch.zeros(len(layers), experts, experts, dtype=torch.int64),
            "curves": torch.zeros(len(layers), experts, dtype=torch.float64),
            "windows": torch.zeros(len(layers), dtype=torch.int64),
            "tokens": torch.zeros(len(layers), dtype=torch.int64),
        }
        self._open: dict[int, Tensor] = {}

    @property
    def tokens(self) -> int:
        """Tokens that every layer has seen."""
        return int(self._sums["tokens"].min())

    def observe(self, layer: int, probs: Tensor, topk_ids: Tensor) -> None:
        """A layer's router has scored the next rows of a text.

        Args:
            layer: its number.
            probs: float [rows, N], router scores over all experts.
            topk_ids: int [rows, k], the natural choice.
        """
        experts = self._sums["pairs"].shape[1]
        assert probs.shape == (len(topk_ids), experts) and topk_ids.shape[1] == self._top_k
        chosen = torch.zeros_like(probs, dtype=torch.float32).scatter(1, topk_ids.long(), 1.0)
        self._sums["pairs"][layer] += (chosen.T @ chosen).to("cpu", torch.int64)
        self._sums["tokens"][layer] += len(probs)
        rows = probs.detach().to("cpu", torch.float64)
        if layer in self._open:
            rows = torch.cat((self._open[layer], rows))
        whole = len(rows) // self._window
        self._open[layer] = rows[whole * self._window :].clone()
        mass = rows[: whole * self._window].view(whole, self._window, experts).sum(1)
        held = mass.sort(dim=1, descending=True).values.cumsum(1)
        self._sums["curves"][layer] += (held / held[:, -1:]).sum(0)
        self._sums["windows"][layer] += whole

    def end_text(self) -> None:
        """A text is over: no window reaches across its end."""
        self._open.clear()
        self.texts += 1

    def merge(self, other: CalibrationRecorder) -> None:
        """Add what ``other`` recorded of complete texts; ``ConfigError`` when it is of another model or window."""
        mine, theirs = ({k: v for k, v in r.facts.items() if k != "source"} for r in (self, other))
        if mine != theirs:
            raise ConfigError(f"spac: calibrations of different models or windows cannot be added; {_AGAIN}")
        assert not self._open and not other._open, "a text is not over"
        for name, value in other._sums.items():
            self._sums[name] += value
        self.texts += other.texts

    def result(self) -> Calibration:
        """What was recorded; ``ConfigError`` when there was nothing."""
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
            pairs=sums["pairs"].clone(),
            curves=(sums["curves"] / sums["windows"].clamp(min=1)[:, None]).to(torch.float32),
        )

    def save_progress(self, path: str | Path) -> None:
        """Write the state between two texts, all or nothing; ``ConfigError`` when it cannot be written."""
        assert not self._open, "a text is not over"
        _write(Path(path), self._sums, {"format": PROGRESS_FORMAT, "texts": str(self.texts)} | self.facts)

    def resume(self, path: str | Path) -> None:
        """Go on from ``save_progress``; skip the first ``texts`` texts then.

        Raises:
            ConfigError: the file cannot be read or belongs to another model, window or ``source``.
        """
        remedy = "delete it to start from the first text"
        metadata, sums = _read(Path(path), PROGRESS_FORMAT, "the progress of a calibration", remedy)
        same = all(metadata.get(name) == value for name, value in self.facts.items())
        same = same and metadata.get("texts", "").isdecimal()
        if not same or {k: (v.shape, v.dtype) for k, v in sums.items()} != {
            k: (v.shape, v.dtype) for k, v in self._sums.items()
        }:
            raise ConfigError(f"spac: {path} is the progress of another model, window or set of texts; {remedy}")
        self.texts, self._sums = int(metadata["texts"]), sums
        self._open.clear()


def tune(calibration: Calibration, mass: float, coverage: str = "substitution") -> dict[str, int]:
    """The smallest budget of each layer whose best experts hold ``mass`` of a window's router mass in the mean.

    Args:
        mass: share in (0, 1]; 1.0 gives N.
        coverage: no budget is below ``top_k`` under ``substitution``, nor below 1 under ``truncation``.

    Returns:
        name of each layer -> budget.

    Raises:
        ConfigError: ``mass`` is out of range, ``coverage`` unknown, or the calibration saw no whole window.
    """
    check_mass(mass)
    if coverage not in ("truncation", "substitution"):
        raise ConfigError(f"spac: coverage={coverage!r}: use truncation or substitution")
    if not bool((calibration.curves[:, -1] > 0).all()):
        raise ConfigError(
            f"spac: the calibration saw {calibration.tokens} tokens and no window of {calibration.window}; calibrate "
            "with more text"
        )
    least = calibration.top_k if coverage == "substitution" else 1
    if mass == 1.0:
        return dict.fromkeys(calibration.layers, calibration.experts)
    needed = 1 + (calibration.curves[:, :-1] < torch.tensor(mass, dtype=torch.float32)).sum(1)
    return {name: max(least, budget) for name, budget in zip(calibration.layers, needed.tolist(), strict=True)}


def write_budgets(path: str | Path, fingerprint: str, budgets: dict[str, int]) -> None:
    """Write a budget file, all or nothing; ``ConfigError`` when it cannot be written."""
    text = json.dumps({"format": BUDGETS_FORMAT, "fingerprint": fingerprint, "budgets": budgets}, indent=2) + "\n"
    with _replacing(Path(path)) as partial:
        partial.write_text(text)


def read_budgets(path: str | Path, fingerprint: str, layers: Sequence[str], experts: int) -> dict[str, int]:
    """The budget of each layer, in the order of ``layers``.

    Raises:
        ConfigError: the file cannot be read, is no budget file, belongs to another model or revision, lacks a layer,
            names an unknown one, or has a budget that is no number from 1 to ``experts``.
    """
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"spac: {path} (--spac-budget-file) cannot be read: {error}; {_TUNE_AGAIN}") from error
    if not isinstance(content, dict) or content.get("format") != BUDGETS_FORMAT:
        raise ConfigError(f"spac: {path} (--spac-budget-file) is no budget file of {BUDGETS_FORMAT}; {_TUNE_AGAIN}")
    budgets = content.get("budgets")
    if content.get("fingerprint") != fingerprint or not isinstance(budgets, dict) or set(budgets) != set(layers):
        raise ConfigError(
            f"spac: {path} (--spac-budget-file) was made for another model or revision: {content.get('fingerprint')}, "
            f"not {fingerprint}, or its layers differ; run `vllm-spac calibrate` and `vllm-spac tune` for this one"
        )
    for name, budget in budgets.items():
        if type(budget) is not int or not 1 <= budget <= experts:
            raise ConfigError(
                f"spac: {path} (--spac-budget-file): the budget of {name} is {budget!r}; use 1 to {experts}"
            )
    return {name: budgets[name] for name in layers}


def _read(path: Path, format: str, what: str, remedy: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != format:
                raise ConfigError(f"spac: {path} is not {what} of format {format}; {remedy}")
            return metadata, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"spac: {path} cannot be read as {what}: {error}; {remedy}") from error


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    with _replacing(path) as partial:
        save_file({name: value.cpu().contiguous() for name, value in tensors.items()}, partial, metadata)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file beside ``path`` that takes its place, unless the block fails."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"spac: {path} cannot be written: {error}; name another file") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _check(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)
