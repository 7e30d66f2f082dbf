"""``moe-compile demo``: a tiny MiniMax-M3 with random weights, compiled, generating, and measured against bf16.

Nothing is downloaded and no time is claimed: the sizes are far too small for that. What it shows is that the expert
blocks of the real transformers model are found and rewritten, and how far MXFP8 moves the logits.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from moe_compile.errors import MissingPackage, ModelFailed, MoeCompileError
from moe_compile.kernels.mxfp8 import dequantize, quantize
from moe_compile.machine import cpp_compiler
from moe_compile.options import CompileOptions
from moe_compile.quiet import one_line, without_torch_noise
from moe_compile.report import CompileReport, collecting, merge
from moe_compile.torch_internals import without_caches

PROMPT_TOKENS, NEW_TOKENS = 16, 8


@dataclass(frozen=True)
class DemoResult:
    """The errors are those of the logits on the prompt, relative L2.

    ``error_to_bf16``: compiled, to the original model, so it holds what MXFP8 costs. ``error_to_yardstick``: to the
    original model with its expert weights rounded to MXFP8 and back, so it holds what compilation and kernels add.
    ``quantisation_error``: from the original model to that yardstick.
    """

    report: CompileReport
    device: str
    error_to_bf16: float
    error_to_yardstick: float
    quantisation_error: float
    tokens: tuple[int, ...]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """``||actual - expected|| / ||expected||``, in float64; NaN stays NaN."""
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).norm() / expected.norm())


def run_demo(options: CompileOptions, step: Callable[[str], None]) -> DemoResult:
    """Build, compile, generate and compare; ``step`` is told what happens next.

    Raises:
        MissingPackage: transformers is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise MissingPackage('the demo needs transformers, which is not installed: pip install "moe_compile[hf]"')
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    step("building a tiny MiniMax-M3 with random weights")
    model = tiny_minimax_m3().to(device)
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(3, model.config.vocab_size, (1, PROMPT_TOKENS), generator=generator).to(device)
    yardstick = with_mxfp8_experts(model)

    # The caches are off because a graph that comes out of one is not looked at again: the report would be empty.
    with torch.no_grad(), without_caches(), without_torch_noise(), collecting() as reports:
        step("running the original model")
        expected, rounded = model(prompt).logits, yardstick(prompt).logits
        step("compiling for the prompt: backend='moe_rocm'")
        compiled: Any = torch.compile(model, backend="moe_rocm", options=_as_dict(options))
        logits = compiled(prompt).logits
        step(f"compiling for decoding and generating {NEW_TOKENS} tokens")
        tokens = generate(model, prompt, options)
    return DemoResult(
        report=merge(reports),
        device=torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        error_to_bf16=relative_error(logits, expected),
        error_to_yardstick=relative_error(logits, rounded),
        quantisation_error=relative_error(rounded, expected),
        tokens=tuple(tokens[0, PROMPT_TOKENS:].tolist()),
    )


def tiny_minimax_m3() -> Any:
    """MiniMax-M3's text model with one dense and two MoE layers, bf16, seeded random weights."""
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

    config = MiniMaxM3VLTextConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=64,
        dense_intermediate_size=128,
        shared_intermediate_size=64,
        num_hidden_layers=3,
        mlp_layer_types=["dense", "sparse", "sparse"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rotary_dim=16,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    # The eager experts of transformers loop over the experts that were hit, which breaks the graph.
    model = MiniMaxM3VLForCausalLM._from_config(config, dtype=torch.bfloat16, experts_implementation="grouped_mm")
    separate_routing(model)
    return model.eval()


def separate_routing(model: Any) -> None:
    """Let each token choose its experts with a wide margin, and let experts matter in the logits.

    At random weights, rounding anywhere before a router sends some tokens to other experts, and no error measure tells
    that from a fault. So every token's embedding gets a code in its first E dimensions, K of them positive, which the
    routers read.
    """
    generator = torch.Generator().manual_seed(1)
    num_experts, top_k = model.config.num_local_experts, model.config.num_experts_per_tok
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        order = torch.rand(embedding.shape[0], num_experts, generator=generator).argsort(dim=-1)
        embedding.normal_(generator=generator)
        embedding[:, :num_experts] = torch.where(order < top_k, 4.0, -4.0).to(embedding.dtype)
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter[:, :num_experts] += 0.5 * torch.eye(num_experts)
            elif name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
                parameter.normal_(std=model.config.hidden_size**-0.5, generator=generator)


def with_mxfp8_experts(model: Any) -> Any:
    """A copy whose expert weights are rounded to MXFP8 and back."""
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in rounded.named_parameters():
            if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
                weight.copy_(dequantize(*quantize(weight), dtype=weight.dtype))
    return rounded


def generate(model: Any, prompt: torch.Tensor, options: CompileOptions) -> torch.Tensor:
    """Greedy ``generate`` with a static cache, whose decode step is compiled with ``backend="moe_rocm"``."""
    from transformers import CompileConfig

    compile_config = CompileConfig(backend="moe_rocm", mode=None, options=_as_dict(options))
    # transformers compiles generate's decode step on GPUs alone unless told otherwise.
    compile_config._compile_all_devices = True
    tokens: torch.Tensor = model.generate(
        prompt,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        cache_implementation="static",
        compile_config=compile_config,
    )
    return tokens


def print_demo(options: CompileOptions, console: Console, *, may_disable_inductor: bool = True) -> DemoResult:
    """Run the demo behind a progress line and print what it found.

    ``may_disable_inductor``: without a C++ compiler Inductor has no CPU code generator; go on without it.
    """
    if may_disable_inductor and options.inductor and not torch.cuda.is_available() and cpp_compiler() is None:
        console.print(
            Text("No C++ compiler found (g++, or set CXX), and Inductor needs one on the CPU: using inductor=False.")
        )
        options = replace(options, inductor=False)
    with console.status("starting") as status:

        def step(what: str) -> None:
            if console.is_terminal:
                status.update(Text(what))
            else:
                console.print(Text(f"... {what}"))

        try:
            result = run_demo(options, step)
        except MoeCompileError:
            raise
        except Exception as error:
            raise ModelFailed(f"the demo's model raised {one_line(error)}") from error
    console.print()
    console.print(result.report)
    console.print()
    for line in _summary(result):
        console.print(Text(line))
    return result


def _summary(result: DemoResult) -> list[str]:
    return [
        f"device: {result.device}; tokens generated: {' '.join(map(str, result.tokens))} (random weights: no meaning)",
        "",
        "relative L2 error of the logits:",
        f"  {result.error_to_bf16:.1e}   compiled, against the original bf16 model",
        f"  {result.error_to_yardstick:.1e}   compiled, against the original with expert weights rounded to MXFP8",
        f"  {result.quantisation_error:.1e}   that rounding alone",
        "",
        "Where to go next:",
        "  moe-compile backends                      which kernels can run on this machine, and why not the others",
        "  moe-compile explain model.py:make_model   the same report for your model; make_model() returns it",
        '  compiled = torch.compile(model, backend="moe_rocm")',
    ]


def _as_dict(options: CompileOptions) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if value is not None}
