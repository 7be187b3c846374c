"""Imports run one way, files stay small, and what is promised by name is there."""

import ast
from pathlib import Path

import pytest

import hf_granikv
from hf_granikv.backends import BACKENDS
from hf_granikv.config import DISPATCH_CHOICES

PACKAGE = Path(hf_granikv.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
SHARED = {"views", "config", "errors", "journal", "compat", "processor", "wording"}

# room -> the rooms it may import besides SHARED and itself
ARROWS: dict[str, set[str]] = {
    "views": set(),
    "config": set(),
    "errors": set(),
    "journal": set(),
    "compat": set(),
    "processor": set(),
    "wording": set(),
    "kernels": set(),
    "pools": set(),
    "dispatch": set(),
    "backends": {"kernels", "dispatch"},
    "tokenwise": set(),
    "lazy": {"tokenwise"},
    "graphs": {"lazy"},
    "graph_cache": {"graphs", "in_process", "layer_kinds", "packable", "state"},
    "compiling": {"announce", "inputs"},
    "forwards": set(),
    "row_processors": set(),
    "announce": {"row_processors"},
    "engine_use": set(),
    "masks": set(),
    "windows": set(),
    "recording": {"announce", "layer", "pools", "recurrent"},
    "row_prefixes": {"pools"},
    "lookup": {"pools"},
    "held_prefixes": {"pools", "row_prefixes"},
    "prompt_checks": {"pools", "row_prefixes"},
    "layouts": {"prompt_checks", "row_prefixes"},
    "inputs": {"layouts", "pools", "prompt_checks", "row_prefixes"},
    "hybrids": set(),
    "config_layers": {"hybrids"},
    "layer_kinds": {"config_layers", "pools", "row_prefixes"},
    "visibility": {"prompt_checks"},
    "batch_rows": {"layouts", "pools", "prompt_checks", "row_prefixes"},
    "step": {"pools"},
    "state": {
        *(
            "batch_rows",
            "forwards",
            "packed_tensors",
            "held_prefixes",
            "pools",
            "layouts",
            "row_prefixes",
            "step",
            "visibility",
        ),
    },
    "accounting": {"pools", "state"},
    "recurrent": {"layer", "pools", "state"},
    "gradients": set(),
    "ready_layers": {"lazy", "pools", "state", "step"},
    "layer": {"gradients", "lazy", "ready_layers", "state", "step"},
    "identity": set(),
    "known_models": {"identity", "model_digest"},
    "cut_prompts": {"inputs", "layouts", "row_prefixes"},
    "prefix_inputs": {"pools"},
    "rows_owner": set(),
    "forward_reader": {
        *("announce", "cut_prompts", "inputs", "known_models", "layer_kinds", "layouts", "pools"),
        *("prefix_inputs", "prompt_checks", "row_prefixes", "rows_owner", "state"),
    },
    "tensor_hash": set(),
    "model_digest": {"identity", "tensor_hash"},
    "tensor_file": {"tensor_hash"},
    "prefix_file": {"model_digest", "pools", "tensor_file"},
    "loaded_levels": {"held_prefixes", "lookup", "pools", "prefix_file"},
    "models_cache": {"announce", "engine_use", "known_models", "layer_kinds", "rows_cache"},
    "saved_prefixes": {
        *("announce", "engine_use", "known_models", "layer_kinds", "loaded_levels", "models_cache"),
        *("pools", "prefix_file"),
    },
    "in_process": set(),
    "rows_cache": {"graph_cache", "layer_kinds", "state"},
    "prefix_making": {
        *("backends", "batch_rows", "dispatch", "layer", "pools", "recording", "state"),
    },
    "cache": {
        *("accounting", "announce", "batch_rows", "cut_prompts", "engine_use", "forward_reader"),
        *("known_models", "layer_kinds", "lookup", "pools", "prefix_inputs", "prefix_making"),
        *("recording", "recurrent", "row_prefixes", "saved_prefixes", "state"),
    },
    "part_work": {"backends", "dispatch", "kernels", "windows"},
    "step_work": {"kernels", "part_work", "windows"},
    "step_attention": {"backends", "kernels", "part_work", "step_work"},
    "packed_tensors": {"lazy"},
    "attention": {
        *("gradients", "graphs", "kernels", "lazy", "masks", "packed_tensors", "part_work"),
        "step_attention",
    },
    "packable": {"announce", "layer_kinds"},
    "packed": {"cache", "packed_tensors"},
    "level_cuts": {"held_prefixes", "pools"},
    "level_merges": {"held_prefixes", "level_cuts", "pools"},
    "live_levels": {
        *("batch_rows", "cache", "held_prefixes", "level_cuts", "level_merges", "pools"),
    },
    "segment_runs": {"announce", "layer_kinds", "packable", "packed"},
    "row_budget": {"pools"},
    "row_places": {"batch_rows", "cache", "pools", "state"},
    "live_rows": {
        *("announce", "batch_rows", "cache", "layer_kinds", "live_levels", "packed", "pools"),
        *("row_budget", "row_places", "segment_runs"),
    },
    "worth": {"announce", "attention", "backends", "dispatch"},
    "shared_prefix": set(),
    "generation": {
        *("announce", "backends", "cache", "dispatch", "layer_kinds", "pools", "prompt_checks"),
        *("shared_prefix", "worth"),
    },
    "prompts": set(),
    "settings": set(),
    "timing": set(),
    "report": {"timing"},
    "agent": {"pools", "prompts"},
    "batches": {"announce", "layer_kinds"},
    "engine": {
        *(
            "agent",
            "announce",
            "batch_rows",
            "cache",
            "engine_use",
            "in_process",
            "level_cuts",
            "live_levels",
        ),
        *("live_rows", "pools", "row_budget", "settings", "shared_prefix", "worth"),
    },
    "shares": {"cache", "level_cuts", "lookup", "pools", "prompts", "shared_prefix", "timing"},
    "generate_runs": {
        "agent",
        "announce",
        "batches",
        "prompts",
        "report",
        "settings",
        "shares",
        "timing",
    },
    "engine_runs": {"accounting", "agent", "engine", "report", "shares"},
    "questions": {"agent", "engine", "prompts", "settings"},
    "roster": {"agent"},
    "conversations": {"engine", "pools"},
    "answering": {
        *("agent", "conversations", "engine", "engine_runs", "generate_runs", "pools", "prompts"),
        *("questions", "report", "settings", "shares", "worth"),
    },
    "multi_agent": {
        *("agent", "answering", "engine", "engine_runs", "in_process", "pools", "prompts"),
        *("questions", "report", "roster"),
    },
    "demo_model": set(),
    "demo": {"cache", "demo_model", "multi_agent", "prompts", "settings", "timing"},
    "disturbance": set(),
    "bench": {"demo_model", "disturbance", "live_rows"},
    "calibrating": {"backends", "dispatch", "disturbance", "kernels"},
    "explaining": {"backends", "calibrating", "dispatch", "layer_kinds"},
    "cli": {"bench", "calibrating", "demo", "demo_model", "dispatch", "explaining"},
}
WITHOUT_TRANSFORMERS = {
    *(
        "views",
        "config",
        "errors",
        "journal",
        "processor",
        "kernels",
        "pools",
        "dispatch",
        "backends",
    ),
    *(
        "lazy",
        "tokenwise",
        "inputs",
        "layouts",
        "prompt_checks",
        "shared_prefix",
        "state",
        "accounting",
    ),
    *(
        "batch_rows",
        "forwards",
        "graphs",
        "packed_tensors",
        "held_prefixes",
        "level_cuts",
        "level_merges",
        "lookup",
        "row_prefixes",
    ),
    *("part_work", "step_attention", "step_work", "gradients"),
    *("cut_prompts", "identity", "known_models", "visibility", "windows"),
    *("tensor_hash", "model_digest", "tensor_file", "prefix_file", "loaded_levels", "calibrating"),
    *("engine_use", "row_budget", "disturbance", "wording"),
}


def imported_modules(file: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            modules.add(node.module or "")
    return modules


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def rooms_in(modules: set[str]) -> set[str]:
    return {name.split(".")[1] for name in modules if name.startswith("hf_granikv.")}


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_follow_the_arrows(file: Path) -> None:
    room = room_of(file)
    if room == "__init__":
        return
    allowed = ARROWS[room] | SHARED | {room}
    assert rooms_in(imported_modules(file)) <= allowed


# within the room of the engine: the schedule knows counts alone, the batch no thread
ENGINE_ARROWS: dict[str, set[str]] = {
    "schedule": set(),
    "preemption": set(),
    "text": set(),
    "figures": set(),
    "memory": set(),
    "offload": set(),
    "sampler": set(),
    "options": set(),
    "turn": {"text"},
    "streams": {"turn"},
    "requests": {"sampler"},
    "job": {"memory", "offload", "sampler", "schedule", "turn"},
    "memories": {"job", "memory", "schedule"},
    "claims": {"job", "memories", "memory"},
    "readers": {"job", "memories"},
    "sharing": {"claims", "job", "memories", "readers", "schedule"},
    "sampling": {"job", "sampler"},
    "batch": {
        *("figures", "job", "memories", "memory", "offload", "preemption"),
        *("sampling", "schedule", "sharing"),
    },
    "worker": {"batch", "job"},
}


@pytest.mark.parametrize("name", ENGINE_ARROWS)
def test_imports_inside_the_engine_follow_the_arrows(name: str) -> None:
    modules = imported_modules(PACKAGE / "engine" / f"{name}.py")
    inside = {m.split(".")[2] for m in modules if m.startswith("hf_granikv.engine.")}
    assert inside <= ENGINE_ARROWS[name]
    if name in ("schedule", "preemption", "figures"):
        assert "torch" not in modules


@pytest.mark.parametrize("name", ["roofline", "known_devices", "calibration_file", "fit"])
def test_what_is_predicted_from_numbers_needs_no_torch(name: str) -> None:
    modules = imported_modules(PACKAGE / "dispatch" / f"{name}.py")
    assert "torch" not in modules
    inside = {m.split(".")[2] for m in modules if m.startswith("hf_granikv.dispatch.")}
    assert inside <= {"roofline"}


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_transformers_stays_above_the_pools(file: Path) -> None:
    uses = any(name.split(".")[0] == "transformers" for name in imported_modules(file))
    assert not (uses and room_of(file) in WITHOUT_TRANSFORMERS)


def test_every_room_is_in_the_arrows() -> None:
    assert {room_of(file) for file in FILES} - {"__init__"} == set(ARROWS)


def test_nothing_is_found_by_pythons_hash() -> None:
    """Two lists of ids may share it; prefixes are found by SHA-256, which nobody can make collide."""
    nodes = [node for file in FILES for node in ast.walk(ast.parse(file.read_text()))]
    assert "hash" not in {node.id for node in nodes if isinstance(node, ast.Name)}
    assert "__hash__" not in {node.attr for node in nodes if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_modules_stay_small(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 320


def test_all_names_what_is_there() -> None:
    assert all(hasattr(hf_granikv, name) for name in hf_granikv.__all__)


def test_dispatch_choices_are_the_backends() -> None:
    assert {"auto", *BACKENDS} == set(DISPATCH_CHOICES)


@pytest.mark.parametrize("op", sorted(p.parent.name for p in PACKAGE.glob("kernels/*/__init__.py")))
def test_every_op_has_a_reference_and_a_test(op: str) -> None:
    assert (PACKAGE / "kernels" / op / "reference.py").exists()
    assert (Path(__file__).parent / "kernels" / f"test_{op}.py").exists()
