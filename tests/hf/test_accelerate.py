"""``accelerate`` on classes and models: right tokens, and nothing left behind in files, copies and other models."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import json
import logging
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import tiny_hf_models as tiny
import torch

import moe_compile
from moe_compile import hf, report
from moe_compile.errors import BackendRefused, OptionError, UnsupportedExperts
from moe_compile.hf_accelerate import AcceleratedForward

transformers = pytest.importorskip("transformers", reason="needs transformers (pip install moe_compile[hf])")
pytestmark = pytest.mark.hf

# These have no static cache in transformers, so their generate() is not compiled.
NO_STATIC_CACHE = {"minimax", "deepseek_v4"}


# At the top of the module, where pickle finds them by name.
@moe_compile.accelerate(inductor=False)
class FastMixtral(transformers.MixtralForCausalLM):  # type: ignore[misc,name-defined]
    pass


class ScaledMixtral(FastMixtral):
    """A subclass with modules, an argument and a forward of its own; super() by name, as older code writes it."""

    def __init__(self, config: Any, scale: float = 2.0) -> None:
        super(ScaledMixtral, self).__init__(config)  # noqa: UP008
        self.scale = torch.nn.Parameter(torch.tensor(scale))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * self.scale
        return out


class PlainMixtral(transformers.MixtralForCausalLM):  # type: ignore[misc,name-defined]
    """A user's subclass in a file without transformers' experts decorator, where set_experts_implementation fails."""


def logits(model: Any, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(ids, **{"use_cache": False, **kwargs}).logits
    return found


def made(kind: Any, *args: Any, family: str = "mixtral") -> Any:
    model = kind(tiny.config(family), *args).eval()
    tiny.randomise(model)
    return model


def generated(model: Any, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    found: torch.Tensor = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, **kwargs)
    return found


@pytest.fixture
def expected() -> torch.Tensor:
    return logits(tiny.yardstick(tiny.build("mixtral")), tiny.tokens(7))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_generate_gives_the_tokens_of_the_quantised_model(family: str) -> None:
    model = tiny.build(family, "eager")
    yardstick = tiny.yardstick(tiny.build(family))
    ids = tiny.tokens(7)
    assert moe_compile.accelerate(model, inductor=False) is model
    assert tiny.relative_error(logits(model, ids), logits(yardstick, ids)) < 2e-6
    merged = report.merge(report.reports())
    assert (merged.graphs, merged.skipped, merged.rewritten) == (1, 0, len(hf.live_experts(model)))
    cache = {} if family in NO_STATIC_CACHE else {"cache_implementation": "static"}
    assert torch.equal(generated(model, ids, **cache), generated(yardstick, ids))
    if cache:
        assert len(report.reports()) > 1, "with a static cache the forward is compiled"


def test_a_growing_cache_is_not_compiled_again_for_each_token() -> None:
    model = moe_compile.accelerate(tiny.build("mixtral", "eager"), inductor=False)
    ids = tiny.tokens(7)
    assert torch.equal(generated(model, ids), generated(tiny.yardstick(tiny.build("mixtral")), ids))
    assert report.reports() == []


def test_the_whole_vision_language_model() -> None:
    model = tiny.minimax_m3_vlm("eager")
    yardstick = tiny.yardstick(model)
    moe_compile.accelerate(model, inductor=False)
    ids = tiny.tokens(9)
    ids[:, 2:6] = 150
    image = {
        "pixel_values": torch.randn(16, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(5)),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }
    assert tiny.relative_error(logits(model, ids, **image), logits(yardstick, ids, **image)) < 2e-6
    assert tiny.relative_error(logits(model, ids, **image), logits(model, tiny.tokens(9))) > 1e-2, "no image was seen"
    assert torch.equal(generated(model, ids, **image), generated(yardstick, ids, **image))
    assert list(hf.live_experts(model)) == ["model.language_model.layers.1.mlp.experts"]


def test_eager_experts_no_longer_break_the_graph() -> None:
    model, ids = tiny.build("minimax_m2", "eager"), tiny.tokens(7)
    before = moe_compile.explain(model, ids, use_cache=False)
    assert (before.rewritten, before.graphs > 1) == (0, True)
    after = moe_compile.explain(moe_compile.accelerate(model), ids, use_cache=False)
    assert (after.rewritten, after.graphs, after.notes) == (2, 1, ())
    assert [layer.name for layer in after.layers] == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    location = after.layers[0].location
    assert location is not None
    assert location.startswith("modeling_minimax_m2.py:")
    assert isinstance(model.forward, AcceleratedForward), "explain leaves the model as it was"


def test_a_decorated_class(expected: torch.Tensor) -> None:
    model = made(FastMixtral)
    assert type(model) is FastMixtral
    assert tiny.relative_error(logits(model, tiny.tokens(7)), expected) < 2e-6
    assert report.reports()[0].rewritten == 2


def test_a_subclass_of_a_decorated_class(expected: torch.Tensor) -> None:
    model = made(ScaledMixtral, 3.0)
    assert tiny.relative_error(logits(model, tiny.tokens(7)), 3.0 * expected) < 2e-6
    assert report.reports()[0].rewritten == 2


def test_a_class_in_a_file_that_transformers_takes_for_one_without_experts(expected: torch.Tensor) -> None:
    model = moe_compile.accelerate(made(PlainMixtral), inductor=False)
    assert len(hf.live_experts(model)) == 2
    assert tiny.relative_error(logits(model, tiny.tokens(7)), expected) < 2e-6


def test_save_and_load(tmp_path: Path, expected: torch.Tensor) -> None:
    model = made(FastMixtral)
    ids = tiny.tokens(7)
    logits(model, ids)
    model.save_pretrained(tmp_path / "fast")
    plain = made(transformers.MixtralForCausalLM)
    plain.save_pretrained(tmp_path / "plain")
    files = {path.name for path in (tmp_path / "fast").iterdir()}
    assert files == {path.name for path in (tmp_path / "plain").iterdir()}
    for name in files - {"config.json"}:
        assert (tmp_path / "fast" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes(), name
    configs = [json.loads((tmp_path / which / "config.json").read_text()) for which in ("fast", "plain")]
    assert configs[0].pop("architectures") == ["FastMixtral"]
    assert configs[1].pop("architectures") == ["MixtralForCausalLM"]
    assert configs[0] == configs[1]

    again = FastMixtral.from_pretrained(tmp_path / "fast", dtype=torch.float32)
    assert tiny.relative_error(logits(again, ids), expected) < 2e-6
    without = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "fast", dtype=torch.float32)
    assert without.config._experts_implementation == "grouped_mm"
    assert torch.equal(logits(without, ids), logits(plain, ids))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("kind", ["class", "instance"])
def test_copies_are_accelerated_on_their_own(how: str, kind: str, expected: torch.Tensor) -> None:
    model = made(FastMixtral) if kind == "class" else moe_compile.accelerate(tiny.build("mixtral"), inductor=False)
    ids = tiny.tokens(7)
    logits(model, ids)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    assert twin.forward.model is twin
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert tiny.relative_error(logits(twin, ids), expected) < 2e-6
    assert twin.config is not model.config
    moe_compile.accelerate(twin, enable=False)
    assert twin.config._experts_implementation == "grouped_mm"
    assert model.config._experts_implementation == "moe_rocm"


def test_twice_is_once_and_other_options_hold_from_then_on() -> None:
    model = moe_compile.accelerate(tiny.build("mixtral", "eager"), inductor=False)
    first = model.forward
    logits(model, tiny.tokens(7))
    moe_compile.accelerate(model, inductor=False)
    assert model.forward is first
    plain = logits(model, tiny.tokens(7))
    assert len(report.reports()) == 1
    moe_compile.accelerate(model, inductor=False, activations="mxfp8")
    assert model.forward is first
    assert tiny.relative_error(logits(model, tiny.tokens(7)), plain) > 1e-3
    moe_compile.accelerate(model, enable=False)
    assert model.config._experts_implementation == "eager"


def test_undoing_a_model_gives_everything_back() -> None:
    model, ids = tiny.build("gpt_oss", "eager"), tiny.tokens(7)
    before, state = logits(model, ids), dict(vars(model))
    moe_compile.accelerate(model, inductor=False)
    assert tiny.relative_error(logits(model, ids), before) > 1e-3
    assert moe_compile.accelerate(model, enable=False) is model
    moe_compile.accelerate(model, enable=False)
    assert vars(model).keys() == state.keys()
    assert model.config._experts_implementation == "eager"
    assert torch.equal(logits(model, ids), before)
    for module in hf.dispatched_experts(model).values():
        assert not [name for name in vars(module) if "moe_compile" in name]


def test_undoing_a_class() -> None:
    kind = type("AnotherMixtral", (transformers.MixtralForCausalLM,), {})
    before = dict(vars(kind))
    assert moe_compile.accelerate(kind) is kind
    moe_compile.accelerate(kind)
    assert isinstance(vars(made(kind)).get("forward"), AcceleratedForward)
    moe_compile.accelerate(kind, enable=False)
    moe_compile.accelerate(kind, enable=False)
    assert "__init__" not in vars(kind)
    assert {name for name in vars(kind).keys() - before.keys() if "cached_value" not in name} == set()
    assert "forward" not in vars(made(kind))
    assert "forward" not in vars(tiny.build("mixtral")), "the parent class was not touched"


def test_a_user_of_the_name_is_not_overruled() -> None:
    model = moe_compile.accelerate(tiny.build("mixtral", "eager"), inductor=False)
    logits(model, tiny.tokens(7))
    model.set_experts_implementation("grouped_mm")
    logits(model, tiny.tokens(7))
    assert model.config._experts_implementation == "grouped_mm"


def test_transformers_can_read_the_signature() -> None:
    model = tiny.build("mixtral")
    before = inspect.signature(model.forward)
    assert inspect.signature(moe_compile.accelerate(model).forward) == before


def test_inside_of_another_compile(expected: torch.Tensor) -> None:
    model = moe_compile.accelerate(tiny.build("mixtral", "eager"))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert tiny.relative_error(logits(compiled, tiny.tokens(7)), expected) < 2e-6
    assert report.reports() == [], "the outer backend compiles everything"


def test_under_inductor(expected: torch.Tensor) -> None:
    model = moe_compile.accelerate(tiny.build("mixtral", "eager"), inductor={"force_disable_caches": True})
    assert tiny.relative_error(logits(model, tiny.tokens(7)), expected) < 2e-6
    assert report.reports()[0].rewritten == 2


def test_training_goes_through_the_original_weights(caplog: pytest.LogCaptureFixture) -> None:
    model, original, ids = tiny.build("mixtral"), tiny.build("mixtral"), tiny.tokens(7)
    moe_compile.accelerate(model, inductor=False)
    for one in (model, original):
        one(ids, labels=ids, use_cache=False).loss.backward()
    for (name, mine), theirs in zip(model.named_parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_fp8_experts(expected: torch.Tensor) -> None:
    model = moe_compile.accelerate(tiny.with_fp8_experts("mixtral", "grouped_mm"), inductor=False)
    assert tiny.relative_error(logits(model, tiny.tokens(7)), expected) < 2e-6


def test_a_deleted_model_is_freed_at_once() -> None:
    model = moe_compile.accelerate(tiny.build("mixtral", "eager"), inductor=False)
    died = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert died() is None
    finally:
        gc.enable()


def test_a_model_without_dispatched_experts_is_compiled_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    config = transformers.JetMoeConfig(
        vocab_size=160, hidden_size=32, num_hidden_layers=1, num_key_value_heads=2, kv_channels=8, intermediate_size=32
    )
    with caplog.at_level(logging.WARNING, "moe_compile.hf"):
        moe_compile.accelerate(transformers.JetMoeForCausalLM(config).eval(), inductor=False)
    assert "0 of its modules run moe_rocm" in caplog.text
    assert "JetMoeForCausalLM" in caplog.text


def test_refusals() -> None:
    with pytest.raises(OptionError, match="moe_backendd"):
        moe_compile.accelerate(moe_backendd="triton")
    with pytest.raises(UnsupportedExperts, match=r"PreTrainedModel.*got torch.nn.modules.linear.Linear"):
        moe_compile.accelerate(torch.nn.Linear(2, 2))
    with pytest.raises(UnsupportedExperts, match="got builtins.dict"):
        moe_compile.accelerate(dict)
    model = tiny.build("mixtral")
    for module in hf.dispatched_experts(model).values():
        module.act_fn = torch.nn.Softsign()
    with pytest.raises(UnsupportedExperts, match="MixtralExperts: its gate function could not be proven"):
        moe_compile.accelerate(model)


def test_an_explicit_backend_is_taken_or_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    model = moe_compile.accelerate(tiny.build("mixtral"), moe_backend="triton")
    with pytest.raises(BackendRefused, match="needs a CUDA or ROCm GPU"):
        logits(model, tiny.tokens(3))
