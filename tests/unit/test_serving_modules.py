"""What the plugin imports in the processes that serve: of other packages, only what vLLM has imported there anyway."""

from __future__ import annotations

import json
import subprocess
import sys

ALLOWED = {"prometheus_client", "sortedcontainers", "tqdm", "xxhash", "zmq"}  # not all of them imported by vLLM; small

PROGRAM = """
import json, sys
import vllm.entrypoints.openai.api_server, vllm.v1.engine.core, vllm.v1.worker.cpu_worker
before = set(sys.modules)
from vllm_spac import components
from vllm_spac.integration import plugin
plugin.install()
from vllm_spac.integration.hooks import device
from vllm_spac.integration.hooks import graphs
from vllm_spac.integration import preflight
from vllm_spac.integration.loading import managed_load
from vllm_spac.integration.loading import model_experts
from vllm_spac.integration.serving import endpoint
from vllm_spac.integration.serving import live_page
from vllm_spac.integration.serving import worker_extension
from vllm_spac.integration.stepping import tree_arguments
from vllm_spac.integration import tuned_start
for family in ("policies", "stores", "balancers", "cpu_kernels", "predictors", "executions", "rankings"):
    for name in components.names(family):
        components.find(family, name)
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_serving_imports_no_library_that_vllm_has_not() -> None:
    """Each of the three processes of a server would pay for it: matplotlib is 30 MiB, pandas 60."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    added = json.loads(done.stdout.strip().splitlines()[-1])
    packages = {name.partition(".")[0] for name in added} - sys.stdlib_module_names
    print("added:", sorted(packages))
    assert "vllm_spac" in packages, "nothing was imported"
    assert packages - {"vllm_spac", "vllm"} <= ALLOWED
