"""Hugging Face generate() with a static cache, whose decode step is compiled with backend="moe_rocm".

    python examples/generate_static_cache.py

Needs transformers. Runs on a GPU if there is one, and on a CPU (which needs a C++ compiler, as Inductor does).
"""

import torch
from compile_hf_model import tiny_minimax_m2
from transformers import CompileConfig

import moe_compile


def main() -> None:
    model = tiny_minimax_m2()
    prompt = torch.randint(0, 256, (1, 16), device=model.device)

    # "reduce-overhead" replays the decode step as one CUDA or HIP graph. With options for moe_rocm, torch.compile takes
    # no mode beside them: CompileConfig(backend="moe_rocm", mode=None, options={"mode": "reduce-overhead", ...}).
    compile_config = CompileConfig(backend="moe_rocm", mode="reduce-overhead")
    # generate() compiles on GPUs alone; this makes the example show the same on a CPU.
    compile_config._compile_all_devices = True
    tokens = model.generate(
        prompt,
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        cache_implementation="static",
        compile_config=compile_config,
    )
    print("tokens:", tokens[0, prompt.shape[1] :].tolist())

    reports = moe_compile.reports()
    for report in reports:
        print(report)
    rewritten = sum(report.rewritten for report in reports)
    cached = sum(report.from_cache for report in reports)
    print(f"rewritten: {rewritten} expert blocks in {len(reports)} graphs ({cached} graphs from the compile cache)")
    assert rewritten or cached


if __name__ == "__main__":
    main()
