"""A format that is none of ours: E5M2 in under 60 lines, handed in as an argument, and trained end to end."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers import e5m2_format
from helpers.e5m2_format import E5M2
from helpers.micro import micro_document, write_corpus

import quaver
from quaver.backends import CONTRACTED, QuantizationRole, ScalingSpec
from quaver.config import load_config, low_precision_class
from quaver.errors import CapabilityError, ConfigError, PlanError
from quaver.low_precision import FormatExtension, RecipeSpec
from quaver.training import train

CHOSEN = {"enabled": True, "format": "e5m2", "scaling": "tensor"}


@pytest.fixture(scope="module")
def document(tmp_path_factory) -> dict:
    corpus = write_corpus(tmp_path_factory.mktemp("corpus"))
    return micro_document("bf16", str(corpus), str(tmp_path_factory.mktemp("cache"))) | {
        "low_precision": CHOSEN
    }


def test_it_takes_less_than_sixty_lines_and_is_what_the_docs_show() -> None:
    source = Path(e5m2_format.__file__).read_text()
    assert len(source.splitlines()) < 60
    assert source in (Path(__file__).parents[2] / "docs" / "extending.md").read_text()


@pytest.mark.parametrize("ranks_of_tensor", [2, 3])
def test_codes_are_those_of_ml_dtypes(ranks_of_tensor: int) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn((4, 8, 16)[3 - ranks_of_tensor :], generator=generator) * 1e-3
    codes, scale = E5M2.codec.quantize(x, e5m2_format.SPEC, "row", None, None)
    wide = scale.numpy().reshape(-1, 1, 1) if ranks_of_tensor == 3 else scale.numpy()
    wanted = (x.numpy() / wide).astype(ml_dtypes.float8_e5m2).view(np.uint8)
    assert np.array_equal(codes.numpy(), wanted)
    assert scale.numel() == (4 if ranks_of_tensor == 3 else 1)


def test_a_run_trains_with_it_and_the_ledger_says_so(document, tmp_path) -> None:
    run = train(document, ["training.steps=3"], out=tmp_path / "run", formats=[E5M2])
    ledger = json.loads((run.dir / "ledger.json").read_text())
    assert ledger["recipe"] == "e5m2/tensor@1"
    assert ledger["ok"] is True
    assert {entry["format"] for entry in ledger["entries"]} == {"e5m2"}
    assert {entry["gemm"] for entry in ledger["entries"]} == {"fprop", "dgrad", "wgrad"}
    assert {entry["kind"] for entry in ledger["entries"]} == {"dense", "grouped"}
    again = load_config(run.dir / "config.yaml", formats=[E5M2.name])
    assert again.low_precision.recipe_id == "e5m2/tensor@1"


def test_a_linear_layer_computes_what_its_codes_say() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 48, bias=False))
    weight = model[0].weight.detach().clone()
    config = low_precision_class([E5M2.name])(**CHOSEN)
    rule = quaver.ReplacementRule("0", torch.nn.Linear, "low_precision_linear")
    quaver.quantize_modules(model, config, plan=rule, formats=[E5M2])
    x = torch.randn(16, 32)

    def exact(t: torch.Tensor) -> torch.Tensor:
        scale = t.abs().max() / 57344
        return (t / scale).to(torch.float8_e5m2).double() * scale.double()

    wanted = exact(x) @ exact(weight).t()
    torch.testing.assert_close(model(x).double(), wanted, rtol=1e-5, atol=1e-6)
    assert not torch.allclose((x @ weight.t()).double(), wanted, rtol=1e-3)


def test_the_config_checks_it_as_its_own(document) -> None:
    with pytest.raises(ConfigError, match="not supported: format 'e5m2'"):
        load_config(document)  # nothing has registered it
    for wrong, said in (
        ({"scaling": "mx_block"}, "format 'e5m2' does not go with scaling 'mx_block'"),
        ({"format": "hif8"}, "format 'hif8' does not go with scaling 'tensor'"),
        ({"format": "e5m3"}, "did you mean e5m2"),
        ({"scale_rule": "floor"}, "scale_rule belongs to MXFP8"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config(document | {"low_precision": {**CHOSEN, **wrong}}, formats=[E5M2.name])


def test_names_that_are_taken_are_refused(document) -> None:
    for names in (
        [E5M2.name, E5M2.name],
        [dataclasses.replace(E5M2.name, format="hif8")],
        [dataclasses.replace(E5M2.name, recipe_id="hif8/current@1")],
    ):
        with pytest.raises(ConfigError, match="is there already"):
            load_config(document, formats=names)


@pytest.mark.parametrize(("fmt", "recipe"), [("hif8", "hif8/mine@1"), ("e5m2", "hif8/current@1")])
def test_a_built_in_format_cannot_be_replaced(fmt: str, recipe: str) -> None:
    roles = dict.fromkeys(QuantizationRole, ScalingSpec(fmt, format_max=448.0))
    other = FormatExtension(RecipeSpec(recipe, fmt, roles), "tensor", E5M2.codec, E5M2.weight_class)
    model = torch.nn.Sequential(torch.nn.Linear(32, 48, bias=False))
    rule = quaver.ReplacementRule("0", torch.nn.Linear, "low_precision_linear")
    with pytest.raises(PlanError, match="is there already"):
        quaver.quantize_modules(
            model, quaver.LowPrecisionConfig(True, "hif8", "current"), plan=rule, formats=[other]
        )


def test_recipe_ids_of_the_config_are_those_of_the_recipes() -> None:
    from quaver.config.names import RECIPE_IDS
    from quaver.low_precision import RECIPES

    assert set(RECIPE_IDS) == set(RECIPES)


def test_nothing_that_is_not_finite_is_hidden() -> None:
    codes, scale = E5M2.codec.quantize(
        torch.tensor([[1.0, torch.inf, torch.nan, -torch.inf]]), e5m2_format.SPEC, "row", None, None
    )
    values = codes.view(torch.float8_e5m2).float() * scale
    assert values[0, 0] == 1
    assert torch.isinf(values[0, [1, 3]]).all()
    assert torch.isnan(values[0, 2])


def test_a_recipe_that_leaves_a_role_out_is_refused() -> None:
    roles = {QuantizationRole.INPUT_FWD: ScalingSpec("e5m2", format_max=1.0)}
    with pytest.raises(PlanError, match="no e5m2 scaling for weight_fwd, grad_output"):
        FormatExtension(RecipeSpec("e5m2/x@1", "e5m2", roles), "tensor", E5M2.codec, E5M2.weight_class)


def test_a_backend_that_does_not_know_it_refuses(document, tmp_path) -> None:
    with pytest.raises(CapabilityError):
        train(document, ["low_precision.backend=npu"], out=tmp_path / "run", formats=[E5M2])
    assert not (tmp_path / "run").exists()


def test_nothing_registers_itself() -> None:
    """After the extension was imported and used, a fresh table still has the built-in formats alone."""
    script = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "import helpers.e5m2_format as f\n"
        "from quaver.backends import BUILTIN_CODECS\n"
        "from quaver.low_precision import RECIPES, WEIGHT_CLASSES\n"
        "from quaver.config.names import LEGAL_PAIRS\n"
        "f.E5M2.name\n"
        "print('e5m2' in str((sorted(BUILTIN_CODECS), sorted(RECIPES), sorted(WEIGHT_CLASSES), LEGAL_PAIRS)))\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.strip() == "False"
    assert set(CONTRACTED) == {"NN", "NT", "TN"}
