"""Names in double backticks of docstrings exist: after a rename, a reader would look for what is nowhere."""

from __future__ import annotations

import ast
import re

from floor_plan import KERNELS, PACKAGE

NAMED = re.compile(r"(see )?``((?:[A-Za-z]\w*\.)*(?:[a-z]\w+|[A-Z]+[a-z]\w*))(?:\(\))?``")
THEIRS = re.compile(  # of vLLM, Python, numpy, checkpoints and the kernel; files; placeholders
    r"vllm\.\w+|\S+\.(py|md|json|partial)|(np|sys|torch|model|concurrent)\.\S+|\w+Error|MoERunner\S*|RoutedExperts|e4m3|"
    r"EngineArgs\S+|RejectionSampler\S*|SpecDecode\w+|DraftModelSpeculator|TritonExperts|EndpointPlugin|Mamba\w+|moe_\w+|"
    r"w(13|2)_\w*|silu|gelu\w*|swiglu\w+|topk_ids\S+|cpu_triton_utils\S+|collective_rpc|routed_scaling_factor|madvise|never|"
    r"always|quantization_config|vllm_NAME|faulthandler"
)
TREES = {path: ast.parse(path.read_text("utf-8")) for folder in (PACKAGE, KERNELS) for path in folder.rglob("*.py")}


def test_names_in_docstrings_exist() -> None:
    made, ours, texts, words = {part for path in TREES for part in path.with_suffix("").parts}, set(), [], {}
    for path, tree in TREES.items():
        for node in list(ast.walk(tree)):
            match node:
                case ast.Constant(value=str(name)) | ast.Attribute(attr=name, ctx=ast.Store()):
                    ours.add(name)
                case ast.Module(body=body) | ast.ClassDef(body=body) | ast.FunctionDef(body=body):
                    if (text := ast.get_docstring(node, clean=False)) is not None:
                        texts.append((path, text))
                        del body[0]
                    made.add(getattr(node, "name", ""))
                    if not isinstance(node, ast.FunctionDef):
                        ours.update(re.findall(r"^(\w+)(?:: | = )", ast.unparse(body), re.MULTILINE))
        words[path] = set(re.findall(r"\w+", ast.unparse(tree)))
    lost = []
    for path, see, name in ((path, *found) for path, text in texts for found in NAMED.findall(text)):
        known = made if see and "." not in name else made | ours | words[path]  # what one is to see has a docstring
        lost += [(path.name, name)] * (not THEIRS.fullmatch(name) and not known.issuperset(name.split(".")))
    assert lost == []
