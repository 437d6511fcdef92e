"""The config.json of a model by its name: of a folder, of the Hugging Face hub, or of the copies in this package."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from vllm_spac.errors import UnsupportedError
from vllm_spac.storage.checkpoint.described import described
from vllm_spac.storage.checkpoint.headers import (
    CONFIG,
    INDEX,
    QUANTISED_BESIDE,
    Checkpoint,
    find_folder,
    is_hub_name,
    read_checkpoint,
    read_config,
    read_total,
)
from vllm_spac.storage.checkpoint.quantisation import FormatKernels
from vllm_spac.system.host_memory import gib


@dataclass(frozen=True)
class NamedModel:
    """What is known of a model before its weights are here."""

    name: str  # what ``vllm serve`` is given
    config: dict[str, Any]  # content of its ``config.json``
    folder: Path  # that has it; of a copy in this package, the name of the model
    origin: Literal["folder", "config.json", "copy"]  # ``folder`` if weights are there, too
    revision: str | None = None  # of a name on the hub; None: the newest
    total: int | None = None  # bytes of its weights' files; None: there is no index that says so
    problem: str = ""  # why it is a copy, or why there is no index

    def checkpoint(self, kernels: FormatKernels | None = None) -> Checkpoint:
        """Returns the sizes: from the headers of the weights, or calculated; arguments as ``described``."""
        return (
            read_checkpoint(self.folder, kernels)
            if self.origin == "folder"
            else described(self.config, self.folder, kernels)
        )

    @property
    def remark(self) -> str:
        """A sentence about sizes that are not from headers; empty if they are."""
        if self.origin == "folder":
            return ""
        if self.origin == "copy":
            return f"sizes are calculated from vllm_spac's own copy of its config.json, because {self.problem}"
        files = f"; the files of its weights have {gib(self.total)}, layers for drafts included" if self.total else ""
        return "sizes are calculated from config.json, without a checkpoint" + files + self.problem


def published() -> dict[str, dict[str, Any]]:
    """Returns the configs in this package, by the models' names on the hub."""
    found = json.loads((files(__package__) / "published.json").read_text(encoding="utf-8"))
    whole = {name: {**found.get(entry.get("like"), {}), **entry} for name, entry in found.items()}
    return {name: {key: value for key, value in entry.items() if key != "like"} for name, entry in whole.items()}


def find_model(model: str, revision: str | None = None) -> NamedModel:
    """Finds ``model``: a folder, a ``config.json``, or a name on the Hugging Face hub.

    Of a name, the config and the index of its weights are downloaded. huggingface_hub does so as for vLLM: by HF_HOME,
    HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE, and only once.

    Args:
        revision: of a name on the hub: a branch, a tag or a commit.

    Raises:
        UnsupportedError: there is none, or it is not reached; the message says what to do.
    """
    if not os.path.isfile(model) and is_hub_name(model):
        return _from_hub(model, revision)
    if revision is not None:
        raise UnsupportedError(f"{model} is not a name on the hub, which --revision {revision} is of; leave it out")
    path = Path(model) if os.path.isfile(model) else find_folder(model) / CONFIG
    name = str(path.parent) if os.path.isfile(model) else model
    return NamedModel(name, read_config(path), path.parent, "folder" if _has_weights(path) else "config.json")


def _has_weights(config: Path) -> bool:
    return config.name == CONFIG and any(config.parent.glob("*.safetensors"))


def _from_hub(model: str, revision: str | None) -> NamedModel:
    """Downloads ``config.json``, or takes this package's copy where the hub gives none."""
    from huggingface_hub import errors

    try:
        path = _download(model, CONFIG, revision)
    except errors.GatedRepoError as error:
        raise UnsupportedError(
            f"the hub gives {model} only to users who asked for it; ask on its page, and set HF_TOKEN to your token"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UnsupportedError(
            f"the hub has no model {model}, or it is private; check the name, or set HF_TOKEN to one that may read it"
        ) from error
    except errors.RevisionNotFoundError as error:
        problem = f"{model} has no revision {revision} on the hub; name another with --revision"
        raise UnsupportedError(problem) from error
    except errors.RemoteEntryNotFoundError as error:
        raise UnsupportedError(
            f"{model} has no config.json on the hub, as repositories of GGUF files have none; name the original model"
        ) from error
    except (errors.HTTPError, errors.HFValidationError, OSError) as error:
        return _copy(model, revision, error)
    total, problem = _beside_config(model, revision)
    origin: Literal["folder", "config.json"] = "folder" if _has_weights(path) else "config.json"
    return NamedModel(model, read_config(path), path.parent, origin, revision, total, problem)


def _download(model: str, name: str, revision: str | None) -> Path:
    """Returns where a file of ``model`` is in the cache; a hub that is not reached is asked once, not for 23 s."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

    if not isinstance(try_to_load_from_cache(model, name, revision=revision), str):
        get_hf_file_metadata(hf_hub_url(model, name, revision=revision))
    return Path(hf_hub_download(model, name, revision=revision))


def _beside_config(model: str, revision: str | None) -> tuple[int | None, str]:
    """Downloads what most models lack: the quantisation of older ModelOpt, and the index of several files.

    Returns:
        The bytes of the weights' files, and why they are not known.
    """
    from huggingface_hub import errors

    total, problem = None, ""
    for name in (QUANTISED_BESIDE, INDEX):
        try:
            file = _download(model, name, revision)
            total = read_total(file) if name == INDEX else None
        except errors.RemoteEntryNotFoundError:
            continue
        except (errors.HTTPError, OSError) as error:
            if name == INDEX:
                problem = f"; how large the files of its weights are is not known, because {_reason(error)}"
            elif _answer(error) is not None:
                raise UnsupportedError(
                    f"the hub gave config.json of {model}, and then {_reason(error)}: whether its experts are "
                    "quantised is not known; run the command again"
                ) from error
    return total, problem


def _copy(model: str, revision: str | None, error: Exception) -> NamedModel:
    """Returns this package's copy, with what is wrong with the hub; an ``UnsupportedError`` where there is none."""
    found = published().get(model)
    if found is not None and revision is None:
        return NamedModel(model, found, Path(model), "copy", problem=_reason(error))
    hint = "set HF_TOKEN to a token of yours, or none" if getattr(_answer(error), "status_code", 0) == 401 else ""
    where = f"{model} is not in the Hugging Face cache, and {_reason(error)}; "
    at = "" if revision is None else f" --revision {revision}"
    otherwise = f"where there is a network, run: hf download {model} config.json{at}, or name a folder"
    raise UnsupportedError(where + (hint or otherwise)) from error


def _reason(error: BaseException) -> str:
    """Returns what happened when the hub was asked: its answer, or that there was none."""
    from huggingface_hub import constants

    answer = _answer(error)
    if answer is not None:
        refused = ", as it does of a token that it does not know" if answer.status_code == 401 else ""
        return f"{constants.ENDPOINT} answered {answer.status_code} {answer.reason_phrase}{refused}"
    return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} was not reached"


def _answer(error: BaseException) -> Any:
    """Returns the answer of the hub that an error is about; None: there was none."""
    return getattr(error, "response", None)
