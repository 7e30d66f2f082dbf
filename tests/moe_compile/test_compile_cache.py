"""Inductor's, AOTAutograd's and the FX graph caches: what is reused holds our rewrite, and nothing else ever does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_modules import Block, relative_error, routed
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

import moe_compile
from moe_compile.kernels import ops
from moe_compile.options import CompileOptions
from moe_compile.passes import fusion_pass
from moe_compile.passes.fusion_pass import MoEFusionPass, package_digest
from moe_compile.torch_internals import GraphPassBase

SUPPORT = Path(__file__).parents[1] / "support"
PYTHONPATH = os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])

# Prints what came out, how often our kernel ran, and what the report says.
CHILD = """
import json, sys
import torch
from moe_modules import Block, routed
from torch._dynamo.utils import counters
backends = sys.argv[1:]
torch.set_num_threads(1)
found = []
for backend in backends:
    torch.compiler.reset()
    counters.clear()
    calls = 0
    model, inputs = Block(), routed()
    if backend == "moe_rocm":
        from moe_compile import reports
        from moe_compile.kernels import ops
        run = ops.reference.experts
        def counting(*args, **kwargs):
            global calls
            calls += 1
            return run(*args, **kwargs)
        ops.reference.experts = counting
    with torch.no_grad():
        out = torch.compile(model, backend=backend)(*inputs)
    last = reports()[-1] if backend == "moe_rocm" else None
    found.append({
        "backend": backend, "bits": out.view(torch.int16).tolist(), "calls": calls,
        "hits": counters["aot_autograd"]["autograd_cache_hit"],
        "rewritten": last and last.rewritten, "from_cache": last and last.from_cache,
    })
print(json.dumps(found))
"""


def child(cache: Path, *backends: str) -> list[dict[str, Any]]:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": PYTHONPATH}
    command = [sys.executable, "-P", "-c", CHILD, *backends]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_processes_that_share_one_cache(tmp_path: Path) -> None:
    (untouched,) = child(tmp_path, "inductor")
    cold, plain = child(tmp_path, "moe_rocm", "inductor")
    plain_again, warm = child(tmp_path, "inductor", "moe_rocm")
    assert (cold["rewritten"], cold["from_cache"], cold["calls"], cold["hits"]) == (1, 0, 1, 0)
    assert (warm["rewritten"], warm["from_cache"], warm["calls"], warm["hits"]) == (0, 1, 1, 1)
    assert warm["bits"] == cold["bits"]
    # Plain Inductor finds the artifact of the process that never used moe_rocm: nothing of ours is in its key.
    assert (untouched["hits"], plain["hits"], plain_again["hits"]) == (0, 1, 1)
    assert plain["bits"] == plain_again["bits"] == untouched["bits"] != cold["bits"]


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters.clear()


def run(options: dict[str, Any] | None = None, backend: str = "moe_rocm") -> Tensor:
    """Compile anew, as another process on the same caches would."""
    torch.compiler.reset()
    with torch.no_grad():
        compiled = torch.compile(Block(), backend=backend, options=options)
        out: Tensor = compiled(*routed())
    return out


def from_cache() -> int:
    return moe_compile.reports()[-1].from_cache


@pytest.mark.usefixtures("fresh_cache")
class TestKeys:
    def test_another_option_another_artifact(self) -> None:
        base = run()
        assert from_cache() == 0
        variants: list[dict[str, Any]] = [
            {"activations": "mxfp8"},
            {"max_rewrites": 0},
            {"moe_backend": "reference"},
            {"strict": True},
            {"mode": "reduce-overhead"},
        ]
        outs = []
        for options in variants:
            outs.append(run(options))
            assert from_cache() == 0, options
        mxfp8, alone, reference, strict, mode = outs
        assert relative_error(mxfp8, base) > 0.005
        assert relative_error(alone, base) > 0.02
        for same in (reference, strict, mode):
            assert torch.equal(same, base)
        assert torch.equal(run(), base)
        assert from_cache() == 1
        assert torch.equal(run({"activations": "mxfp8"}), mxfp8)
        assert from_cache() == 1

    def test_another_version_of_this_package_another_artifact(self, monkeypatch: pytest.MonkeyPatch) -> None:
        base = run()
        monkeypatch.setattr(fusion_pass, "package_digest", lambda: "another")
        assert torch.equal(run(), base)
        assert from_cache() == 0

    def test_autograds_cache_is_in_use(self) -> None:
        run()
        run()
        assert torch._functorch.config.enable_autograd_cache
        assert counters["aot_autograd"]["autograd_cache_hit"] == 1

    def test_plain_inductor_before_and_after(self) -> None:
        before = run(backend="inductor")
        ours = run()
        assert relative_error(ours, before) > 0.02
        torch.compiler.reset()
        calls = []
        original = ops.reference.experts

        def counting(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return original(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops.reference, "experts", counting)
            assert torch.equal(run(backend="inductor"), before)
            assert calls == []
            assert torch.equal(run(), ours)
            assert calls == [1]
        assert from_cache() == 1


class TestDigest:
    def test_covers_every_source_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = package_digest.__wrapped__()
        read: list[Path] = []
        original = Path.read_bytes

        def reading(path: Path) -> bytes:
            read.append(path)
            return original(path)

        monkeypatch.setattr(Path, "read_bytes", reading)
        package_digest.__wrapped__()
        names = {path.name for path in read}
        assert {"backend.py", "packed_weights.py", "find_experts.py", "ops.py", "gemm_kernels.py"} <= names
        monkeypatch.setattr(
            Path, "read_bytes", lambda path: original(path) + (b"#" if path.name == "gemm_kernels.py" else b"")
        )
        assert package_digest.__wrapped__() != before

    def test_covers_the_version(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = package_digest.__wrapped__()
        monkeypatch.setattr(fusion_pass, "__version__", "another")
        assert package_digest.__wrapped__() != before


class Recording(CustomGraphPass):
    """A user's pass; sees whether experts were rewritten before it."""

    def __init__(self, uuid: Any = "mine") -> None:
        self.seen: list[bool] = []
        self._uuid = uuid

    def __call__(self, graph: Graph) -> None:
        self.seen.append(any(ops.is_expert_operator(node.target) for node in graph.nodes))

    def uuid(self) -> Any:
        return self._uuid


@pytest.mark.usefixtures("fresh_cache")
class TestUsersPass:
    @pytest.mark.parametrize("where", ["global", "options"])
    def test_runs_first_and_its_uuid_is_part_of_the_key(self, where: str) -> None:
        def compile_with(user_pass: Any) -> None:
            if where == "options":
                run({"inductor": {"post_grad_custom_pre_pass": user_pass}})
            else:
                with config.patch(post_grad_custom_pre_pass=user_pass):
                    run()
                    assert config.post_grad_custom_pre_pass is user_pass

        first, again, other = Recording(), Recording(), Recording("other")
        compile_with(first)
        assert first.seen == [False]
        assert (moe_compile.reports()[-1].rewritten, from_cache()) == (1, 0)
        compile_with(again)
        assert from_cache() == 1
        compile_with(other)
        assert other.seen == [False]
        assert from_cache() == 0

    @pytest.mark.parametrize("kind", ["callable", "no uuid"])
    def test_without_a_uuid_nothing_is_cached(self, kind: str) -> None:
        recording = Recording(None)
        user_pass: Callable[[Graph], None] = recording if kind == "no uuid" else lambda graph: recording(graph)
        for runs in (1, 2):
            run({"inductor": {"post_grad_custom_pre_pass": user_pass}})
            assert recording.seen == [False] * runs
            assert from_cache() == 0

    @pytest.mark.skipif(GraphPassBase is CustomGraphPass, reason="needs torch >= 2.12")
    def test_inference_aware_passes_and_lists_of_passes(self) -> None:
        told = []

        class Aware(GraphPassBase):
            def __call__(self, graph: Graph, is_inference: bool) -> None:  # type: ignore[override]
                told.append(is_inference)

            def uuid(self) -> Any:
                return "aware"

        recording = Recording()
        run({"inductor": {"post_grad_custom_pre_pass": [Aware(), recording]}})
        assert (told, recording.seen) == ([True], [False])
        assert moe_compile.reports()[-1].rewritten == 1


def test_the_uuid() -> None:
    def uuid(*passes: Any, **options: Any) -> Any:
        return MoEFusionPass(CompileOptions(**options), passes).uuid()

    uuids = [
        uuid(),
        uuid(moe_backend="reference"),
        uuid(activations="bf16"),
        uuid(strict=True),
        uuid(max_rewrites=1),
        uuid(mode="reduce-overhead"),
        uuid(inductor=False),
        uuid(Recording("a")),
        uuid(Recording("b")),
        uuid(Recording("a"), Recording("b")),
    ]
    assert len(set(uuids)) == len(uuids)
    assert uuid(inductor={"x": object()}) == uuid(inductor={"x": object()}), "an address must not be part of the key"
    assert uuid(lambda graph: None) is None


def test_inductors_config_is_as_before() -> None:
    before = config.save_config_portable(ignore_private_configs=False)
    run({"inductor": {"epilogue_fusion": False}, "mode": "max-autotune-no-cudagraphs"})
    assert config.save_config_portable(ignore_private_configs=False) == before


def test_config_patches_reach_inductor() -> None:
    with pytest.raises(Exception, match="no_such_setting"):
        run({"inductor": {"no_such_setting": 1}})


def test_torch_logs_takes_the_packages_name() -> None:
    code = (
        "import torch, sys; from moe_modules import *\n"
        "with torch.no_grad(): torch.compile(Block(), backend='moe_rocm', options={'inductor': False})(*routed())"
    )
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "TORCH_LOGS": "+moe_compile"}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1/1 expert blocks -> reference" in done.stderr
    assert "1 blocks and near misses, 1 rewritten" in done.stderr


def test_one_model_compiled_by_both_backends_in_one_process() -> None:
    model, inputs = Block(), routed()
    with torch.no_grad():
        eager = model(*inputs)
        plain = torch.compile(model, backend="inductor")(*inputs)
        ours = torch.compile(model, backend="moe_rocm")(*inputs)
        assert torch.equal(torch.compile(model, backend="inductor")(*inputs), plain)
        assert torch.equal(torch.compile(model, backend="moe_rocm")(*inputs), ours)
    assert relative_error(plain, eager) < 8e-3 < 0.02 < relative_error(ours, eager)
