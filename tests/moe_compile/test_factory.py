import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from moe_compile.errors import FactoryError, ModelFailed
from moe_compile.factory import load_function, load_model_call

MODULE = """
    import torch
    from torch import nn

    class Small(nn.Linear):
        @property
        def dummy_inputs(self):
            return {"input": torch.ones(2, 3), "note": "kept"}

    class NoInputs(nn.Linear):
        @property
        def dummy_inputs(self):
            raise NotImplementedError

    def alone(): return Small(3, 4)
    def with_kwargs(): return nn.Linear(3, 4), {"input": torch.ones(1, 3)}
    def with_args(): return nn.Linear(3, 4), (torch.ones(1, 3),), {}
    def with_list_of_args(): return nn.Linear(3, 4), [torch.ones(1, 3)], {}
    def without_inputs(): return nn.Linear(3, 4)
    def without_dummy_inputs(): return NoInputs(3, 4)
    def nothing(): return None
    def wrong_order(): return {}, nn.Linear(3, 4)
    def args_without_kwargs(): return nn.Linear(3, 4), (torch.ones(1, 3),)
    def bare_tensor(): return nn.Linear(3, 4), torch.ones(1, 3)
    def raises(): raise RuntimeError("no weights\\n  found")
    number = 3
"""


@pytest.fixture(autouse=True)
def restored_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loading a factory adds to sys.path and sys.modules, as running the file would."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a folder" / "my model.py"
    path.parent.mkdir()
    path.write_text(dedent(MODULE))
    return path


class TestWhatAFactoryReturns:
    def test_a_model_alone_is_called_with_its_dummy_inputs(self, file: Path) -> None:
        call = load_model_call(f"{file}:alone")
        assert type(call.model).__name__ == "Small"
        assert call.args == ()
        assert call.kwargs["note"] == "kept"
        assert torch.equal(call.kwargs["input"], torch.ones(2, 3))

    def test_model_and_kwargs(self, file: Path) -> None:
        call = load_model_call(f"{file}:with_kwargs")
        assert isinstance(call.model, torch.nn.Linear)
        assert call.args == ()
        assert list(call.kwargs) == ["input"]

    @pytest.mark.parametrize("name", ["with_args", "with_list_of_args", "args_without_kwargs"])
    def test_model_args_and_kwargs(self, file: Path, name: str) -> None:
        call = load_model_call(f"{file}:{name}")
        assert len(call.args) == 1
        assert torch.equal(call.args[0], torch.ones(1, 3))
        assert call.kwargs == {}

    @pytest.mark.parametrize(
        ("name", "returned"),
        [
            ("nothing", "None"),
            ("wrong_order", "(dict, Linear)"),
            ("bare_tensor", "(Linear, Tensor)"),
        ],
    )
    def test_anything_else_is_refused(self, file: Path, name: str, returned: str) -> None:
        with pytest.raises(FactoryError) as caught:
            load_model_call(f"{file}:{name}")
        assert str(caught.value) == (
            f"factory '{file}:{name}' returned {returned}, expected a torch.nn.Module, (model, args), (model, kwargs) "
            "or (model, args, kwargs)"
        )

    @pytest.mark.parametrize("name", ["without_inputs", "without_dummy_inputs"])
    def test_a_model_alone_without_dummy_inputs_is_refused(self, file: Path, name: str) -> None:
        with pytest.raises(FactoryError, match=r"has no dummy_inputs.*return \(model, kwargs\)"):
            load_model_call(f"{file}:{name}")

    @pytest.mark.hf
    def test_a_hugging_face_model_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "hf.py"
        path.write_text(
            dedent("""
            from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM
            def make():
                return MiniMaxM2ForCausalLM(MiniMaxM2Config(
                    vocab_size=32, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                    num_key_value_heads=1, head_dim=8, num_local_experts=2, num_experts_per_tok=1, bos_token_id=1,
                    eos_token_id=2))
            """)
        )
        call = load_model_call(f"{path}:make")
        assert call.kwargs["input_ids"].dtype == torch.int64
        assert call.model(**call.kwargs).logits.shape[-1] == 32


class TestErrorsOfTheUsersCode:
    def test_a_factory_that_raises(self, file: Path) -> None:
        with pytest.raises(ModelFailed) as caught:
            load_model_call(f"{file}:raises")
        assert str(caught.value) == f"factory '{file}:raises' raised RuntimeError: no weights found"
        assert isinstance(caught.value.__cause__, RuntimeError)

    def test_a_file_that_raises_on_import(self, tmp_path: Path) -> None:
        path = tmp_path / "broken.py"
        path.write_text("1 / 0")
        with pytest.raises(ModelFailed, match=r"importing '.*broken.py' raised ZeroDivisionError: division by zero"):
            load_function(f"{path}:make")

    def test_a_file_with_a_syntax_error(self, tmp_path: Path) -> None:
        path = tmp_path / "broken.py"
        path.write_text("def make(:")
        with pytest.raises(ModelFailed, match="raised SyntaxError: "):
            load_function(f"{path}:make")

    def test_a_file_that_imports_something_missing(self, tmp_path: Path) -> None:
        path = tmp_path / "broken.py"
        path.write_text("import no_such_module_here")
        with pytest.raises(ModelFailed, match="raised ModuleNotFoundError: No module named 'no_such_module_here'"):
            load_function(f"{path}:make")

    def test_a_module_that_imports_something_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "broken_module.py").write_text("import no_such_module_here")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ModelFailed, match="importing 'broken_module' raised ModuleNotFoundError"):
            load_function("broken_module:make")


class TestFinding:
    @pytest.mark.parametrize("factory", ["model.py", "model", ":make", "model.py:", "", ":"])
    def test_a_reference_that_is_not_one(self, factory: str) -> None:
        with pytest.raises(FactoryError, match="is not of the form file.py:function or package.module:function"):
            load_function(factory)

    def test_a_file_without_a_function_says_what_to_add(self, file: Path) -> None:
        with pytest.raises(FactoryError, match="add ':' and the function's name to"):
            load_function(str(file))

    def test_a_missing_function_lists_those_there_are(self, file: Path) -> None:
        with pytest.raises(FactoryError) as caught:
            load_function(f"{file}:with_kwarg")
        message = str(caught.value)
        assert "my model.py has no function 'with_kwarg'." in message
        assert " Functions in it are alone, args_without_kwargs, bare_tensor, nothing, raises, with_args, " in message
        assert message.endswith("Did you mean 'with_kwargs'?")

    def test_a_file_without_functions(self, tmp_path: Path) -> None:
        path = tmp_path / "empty.py"
        path.write_text("from os.path import join\n")
        with pytest.raises(FactoryError, match="It defines no function."):
            load_function(f"{path}:make")

    def test_something_that_cannot_be_called(self, file: Path) -> None:
        with pytest.raises(FactoryError, match="number is not a function but int"):
            load_function(f"{file}:number")

    def test_a_missing_file_names_the_nearest(self, file: Path) -> None:
        with pytest.raises(FactoryError) as caught:
            load_function(f"{file.parent / 'mymodel.py'}:alone")
        assert str(caught.value) == f"FACTORY: there is no file '{file.parent}/mymodel.py'. Did you mean 'my model.py'?"

    def test_a_missing_folder(self, tmp_path: Path) -> None:
        with pytest.raises(FactoryError, match=r"there is no file '.*nowhere/model.py'\.$"):
            load_function(f"{tmp_path}/nowhere/model.py:make")

    def test_a_file_that_is_not_python(self, tmp_path: Path) -> None:
        path = tmp_path / "model.txt"
        path.write_text("")
        with pytest.raises(FactoryError, match="does not end in .py"):
            load_function(f"{path}:make")

    def test_a_relative_path(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(file.parent)
        assert load_function("my model.py:alone").__name__ == "alone"

    def test_a_file_may_import_its_neighbours(self, tmp_path: Path) -> None:
        (tmp_path / "neighbour_module.py").write_text("def make(): return 'neighbour'")
        (tmp_path / "main_module.py").write_text("from neighbour_module import make")
        assert load_function(f"{tmp_path}/main_module.py:make")() == "neighbour"

    def test_a_file_named_like_an_imported_module(self, tmp_path: Path) -> None:
        (tmp_path / "json.py").write_text("def make(): return __name__")
        assert load_function(f"{tmp_path}/json.py:make")() == "factory_json"
        assert sys.modules["json"].__file__ != str(tmp_path / "json.py")

    def test_a_dataclass_in_the_file(self, tmp_path: Path) -> None:
        """dataclasses looks its module up in sys.modules to read string annotations."""
        path = tmp_path / "annotated.py"
        path.write_text(
            "from __future__ import annotations\nfrom dataclasses import dataclass\n"
            "@dataclass\nclass Config:\n    size: int = 3\ndef make(): return Config()"
        )
        assert load_function(f"{path}:make")().size == 3

    def test_a_module_in_the_current_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "some_package").mkdir()
        (tmp_path / "some_package" / "models.py").write_text("def make(): return 7")
        monkeypatch.chdir(tmp_path)
        assert load_function("some_package.models:make")() == 7

    @pytest.mark.parametrize("name", ["no_such_package", "no_such_package.models", "json.no_such_module"])
    def test_a_missing_module(self, name: str) -> None:
        with pytest.raises(FactoryError, match=f"FACTORY '{name}': there is no module 'no_such_package'|'json.no_such"):
            load_function(f"{name}:make")
