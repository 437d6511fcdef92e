"""The config.json of a model by its name: of a folder, of the Hugging Face hub, or of the copies in this package."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from vllm_spac.errors import UnsupportedError, brief
from vllm_spac.storage.checkpoint.described import described
from vllm_spac.storage.checkpoint.headers import Checkpoint, find_folder, is_hub_name, read_checkpoint, read_config
from vllm_spac.storage.checkpoint.quantisation import FormatKernels

_OFFLINE = "vllm_spac's own copy of its config.json, because it is not on this machine and the hub was not reached"


@dataclass(frozen=True)
class NamedModel:
    """What is known of a model before its weights are here.

    Attributes:
        config: content of its ``config.json``.
        folder: that has it; of a copy in this package, the name of the model.
        origin: ``folder`` if weights are there, too.
    """

    config: dict[str, Any]
    folder: Path
    origin: Literal["folder", "config.json", "copy"]

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
        return f"sizes are calculated from {_OFFLINE if self.origin == 'copy' else 'config.json, without a checkpoint'}"


def published() -> dict[str, dict[str, Any]]:
    """Returns the configs in this package, by the models' names on the hub."""
    found = json.loads((files(__package__) / "published.json").read_text(encoding="utf-8"))
    whole = {name: {**found.get(entry.get("like"), {}), **entry} for name, entry in found.items()}
    return {name: {key: value for key, value in entry.items() if key != "like"} for name, entry in whole.items()}


def find_model(model: str) -> NamedModel:
    """Finds ``model``: a folder, a ``config.json``, or a name on the Hugging Face hub, whose config is downloaded.

    huggingface_hub does so as for vLLM: by HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE, and only once.

    Raises:
        UnsupportedError: there is none, or it is not reached; the message says what to do.
    """
    if os.path.isfile(model):
        path = Path(model)
    elif is_hub_name(model):
        path_or_copy = _from_hub(model)
        if not isinstance(path_or_copy, Path):
            return NamedModel(path_or_copy, Path(model), "copy")
        path = path_or_copy
    else:
        path = find_folder(model) / "config.json"
    config = read_config(path)
    weights = path.name == "config.json" and any(path.parent.glob("*.safetensors"))
    return NamedModel(config, path.parent, "folder" if weights else "config.json")


def _from_hub(model: str) -> Path | dict[str, Any]:
    """Returns where ``config.json`` of ``model`` is in the cache, or this package's copy where no hub is reached."""
    import httpx
    from huggingface_hub import errors, hf_hub_download

    try:
        path = Path(hf_hub_download(model, "config.json"))
    except errors.GatedRepoError as error:
        raise UnsupportedError(
            f"the hub gives {model} only to users who asked for it; ask on its page, and set HF_TOKEN to your token"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UnsupportedError(
            f"the hub has no model {model}, or it is private; check the name, or set HF_TOKEN to one that may read it"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        return _copy(model, error)
    except errors.EntryNotFoundError as error:
        raise UnsupportedError(
            f"{model} has no config.json on the hub, as repositories of GGUF files have none; name the original model"
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, httpx.HTTPError, OSError) as error:
        return _copy(model, error)
    try:
        with contextlib.suppress(errors.EntryNotFoundError):  # of older ModelOpt; most models have none
            hf_hub_download(model, "hf_quant_config.json")
    except (errors.HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise UnsupportedError(
            f"the hub gave config.json of {model}, and then failed ({type(error).__name__}: {brief(str(error))}): "
            "whether its experts are quantised is not known; run the command again"
        ) from error
    return path


def _copy(model: str, error: Exception) -> dict[str, Any]:
    found = published().get(model)
    if found is not None:
        return found
    from huggingface_hub import constants

    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} was not reached"
    raise UnsupportedError(
        f"{model} is not in the Hugging Face cache, and {why}; where there is a network, run: "
        f"hf download {model} config.json, or name a folder"
    ) from error
