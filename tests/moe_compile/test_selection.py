"""Selection as a table: (choice, what each backend says) -> what is taken, or the whole refusal."""

from dataclasses import dataclass

import pytest

from moe_compile.errors import BackendRefused
from moe_compile.options import MOE_BACKENDS, CompileOptions
from moe_compile.selection import AUTO_ORDER, Backend, Caution, Rejection, Selection, select_backend
from moe_compile.spec import ExpertSpec, GateFunction
from moe_compile.target import Capabilities, Target

SPEC = ExpertSpec(num_experts=8, hidden_size=64, intermediate_size=96, top_k=2, gate=GateFunction(limit=7.0))
H200 = Target("cuda", "sm_90")


@dataclass(frozen=True)
class Stub:
    """A backend that answers with fixed reasons, and refuses to be asked about anything but SPEC on H200."""

    name: str
    reasons: tuple[str, ...] = ()
    careful: tuple[str, ...] = ("flydsl",)

    def rejections(
        self, spec: ExpertSpec | None, target: Target, capabilities: Capabilities, options: CompileOptions
    ) -> list[Rejection]:
        assert (spec, target) == (SPEC, H200)
        return [Rejection(self.name, reason, "do this" if "missing" in reason else None) for reason in self.reasons]

    def cautions(
        self, spec: ExpertSpec | None, target: Target, capabilities: Capabilities, options: CompileOptions
    ) -> list[Caution]:
        assert (spec, target) == (SPEC, H200)
        return [Caution(self.name, "take care", "or not")] if self.name in self.careful else []


FLYDSL_CAUTION = (Caution("flydsl", "take care", "or not"),)


def backends(**reasons: tuple[str, ...]) -> dict[str, Backend]:
    return {name: Stub(name, reasons.get(name, ())) for name in AUTO_ORDER}


def select(choice: str, **reasons: tuple[str, ...]) -> Selection:
    return select_backend(CompileOptions(moe_backend=choice), SPEC, H200, Capabilities(), backends(**reasons))


def test_auto_order_is_every_backend_from_fastest_to_slowest() -> None:
    assert AUTO_ORDER == ("aiter", "flydsl", "triton_native", "triton", "reference")
    assert {"auto", *AUTO_ORDER} == set(MOE_BACKENDS)


@pytest.mark.parametrize("first_usable", range(len(AUTO_ORDER)))
def test_auto_takes_the_first_usable(first_usable: int) -> None:
    refused = {name: (f"no {name}",) for name in AUTO_ORDER[:first_usable]}
    assert select("auto", **refused).backend == AUTO_ORDER[first_usable]


def test_auto_keeps_every_reason_of_every_backend_it_passed_over_in_order() -> None:
    selection = select("auto", aiter=("package missing", "wrong GPU"), flydsl=("too old",), triton_native=("sm_90",))
    assert selection == Selection(
        "triton",
        (
            Rejection("aiter", "package missing", "do this"),
            Rejection("aiter", "wrong GPU"),
            Rejection("flydsl", "too old"),
            Rejection("triton_native", "sm_90"),
        ),
    )


def test_auto_with_no_usable_backend_lists_everything() -> None:
    with pytest.raises(BackendRefused) as caught:
        select("auto", **{name: (f"no {name}", f"missing {name}") for name in AUTO_ORDER})
    message = str(caught.value)
    assert "H64 I96 E8 k2" in message
    assert "sm_90" in message
    for name in AUTO_ORDER:
        assert f"  - {name}: no {name}" in message
        assert f"  - {name}: missing {name} (do this)" in message


@pytest.mark.parametrize("name", AUTO_ORDER)
def test_an_explicit_choice_is_taken_even_if_a_faster_one_is_usable(name: str) -> None:
    assert select(name) == Selection(name, cautions=FLYDSL_CAUTION if name == "flydsl" else ())


def test_an_explicit_choice_is_refused_with_every_reason_and_never_replaced() -> None:
    with pytest.raises(BackendRefused) as caught:
        select("aiter", aiter=("package missing", "wrong GPU"))
    assert isinstance(caught.value, ValueError)
    assert str(caught.value) == (
        "moe_rocm: moe_backend='aiter' cannot run this expert block (H64 I96 E8 k2, silu(limit=7), bf16 weights) on "
        "sm_90:\n  - package missing (do this)\n  - wrong GPU\n"
        "Choose another moe_backend, or 'auto' for the first that can."
    )


def test_a_rejection_reads_as_one_line() -> None:
    assert str(Rejection("aiter", "not installed", "build it")) == "aiter: not installed (build it)"
    assert str(Rejection("aiter", "not installed")) == "aiter: not installed"
    assert str(Caution("aiter", "take care", "or not")) == "aiter: take care (or not)"


def test_only_the_cautions_of_what_is_taken_are_kept() -> None:
    assert select("auto", aiter=("no",)).cautions == FLYDSL_CAUTION
    assert select("auto").cautions == ()
    assert select("auto", aiter=("no",), flydsl=("no",)).cautions == ()
