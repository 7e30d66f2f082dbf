"""Compile a tiny MiniMax-M2 with backend="moe_rocm", compare its logits with the original, and see what was rewritten.

    python examples/compile_hf_model.py

Needs transformers. Runs on a GPU if there is one, and on a CPU (which needs a C++ compiler, as Inductor does).
`moe-compile explain examples/compile_hf_model.py:tiny_minimax_m2` shows the same report.
"""

import torch
from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM, PreTrainedModel

import moe_compile


def tiny_minimax_m2() -> PreTrainedModel:
    """Two MoE layers with random weights; replace this by from_pretrained(..., experts_implementation="grouped_mm")."""
    torch.manual_seed(0)
    config = MiniMaxM2Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.1,
    )
    # Not "eager": those experts loop over the experts that were hit, which breaks the graph.
    model = MiniMaxM2ForCausalLM._from_config(config, dtype=torch.bfloat16, experts_implementation="grouped_mm")
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    model = tiny_minimax_m2()
    input_ids = torch.randint(0, 256, (1, 16), device=model.device)

    # This is all it takes. The backend is found by its entry point, with no import of moe_compile.
    compiled = torch.compile(model, backend="moe_rocm")
    with torch.no_grad():  # with gradients on, expert blocks are left alone
        logits = compiled(input_ids).logits.double()
        expected = model(input_ids).logits.double()
    errors = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
    print(f"relative L2 error of a token's logits, MXFP8 against bf16: {errors.median():.1e} (median)")

    # moe_compile.reports() has what happened above, unless the graph came out of a warm compile cache. explain()
    # compiles once more without any cache, so it always has the whole answer.
    report = moe_compile.explain(model, input_ids)
    print(report)
    print(f"rewritten: {report.rewritten} of {len(report.layers)} expert blocks")
    assert (report.rewritten, report.skipped) == (2, 0)


if __name__ == "__main__":
    main()
