"""Each place that can run what it was given, with why it may: a new one has to be looked at."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "torchloom"
DANGEROUS = {
    *("eval", "exec", "__import__", "import_module", "find_spec", "spec_from_file_location"),
    *("loads", "load", "Unpickler", "AOTCompileUnpickler", "deserialize"),
    *("CDLL", "PyDLL", "LoadLibrary", "load_library", "ExtensionFileLoader", "_load_library"),
    *("system", "popen", "Popen", "run", "check_output", "check_call", "call", "execv"),
    *("all_gather_object", "broadcast_object_list", "gather_object", "from_pretrained"),
}
OWNERS = {
    **{name: {"pickle", "marshal", "torch", "yaml", "GraphPickler"} for name in ("loads", "load")},
    **{name: {"subprocess"} for name in ("run", "Popen", "check_output", "check_call", "call")},
    **{name: {"os"} for name in ("system", "popen", "execv")},
}
"""Names that are too common: those of these modules alone."""

CONSTANT = "names that this source spells"
TRUSTED = "bytes of a store whose owner, mode, signature and digests hold, or made by this process"
GENERATED = "text that this process wrote, from names that it checked"
USERS = "a name or file that the user gave on purpose: a config or command line is like a script"
RANKS = "from other ranks: whoever can join the process group is trusted (docs, doctor)"
LOOKED_UP = "finds a module without running it"
COMMAND = "a list of arguments, no shell"

KNOWN = {
    ("__init__.py", "import_module"): CONSTANT,
    (
        "_torch/dispatch.py",
        "eval",
    ): "what torch wrote to show a guard of this process, over the values that it guards",
    ("_torch/distributed.py", "CDLL"): "a library of torch's that is loaded already",
    ("serve/model/expressions.py", "eval"): TRUSTED,
    ("serve/store/entries.py", "pickle.loads"): TRUSTED,
    ("serve/model/expressions.py", "import_module"): TRUSTED,
    ("_torch/no_driver.py", "CDLL"): "this process itself",
    ("_torch/no_driver.py", "find_spec"): LOOKED_UP,
    ("_torch/no_driver.py", "import_module"): CONSTANT,
    ("_torch/no_driver.py", "subprocess.run"): COMMAND,
    ("pieces/plain.py", "ExtensionFileLoader"): TRUSTED,
    ("pieces/plain.py", "exec"): TRUSTED,
    ("pieces/plain.py", "spec_from_file_location"): TRUSTED,
    ("serve/model/fingerprint.py", "find_spec"): TRUSTED,
    ("pieces/shell.py", "import_module"): TRUSTED,
    ("pieces/shell.py", "marshal.loads"): TRUSTED,
    ("pieces/shell.py", "pickle.loads"): TRUSTED,
    ("pieces/symbols.py", "eval"): GENERATED,
    ("pieces/wrapper.py", "exec"): GENERATED,
    ("_torch/standalone.py", "_load_library"): TRUSTED,
    ("_torch/resolve.py", "find_spec"): LOOKED_UP,
    ("_torch/resolve.py", "import_module"): CONSTANT,
    ("_torch/standalone.py", "deserialize"): TRUSTED,
    ("_torch/stored.py", "GraphPickler.loads"): TRUSTED,
    ("backends/registry.py", "import_module"): CONSTANT,
    ("backends/claims.py", "find_spec"): LOOKED_UP,
    ("cli/__init__.py", "import_module"): CONSTANT,
    ("cli/doctor.py", "find_spec"): LOOKED_UP,
    ("config/source.py", "import_module"): CONSTANT,
    ("config/monitors.py", "find_spec"): LOOKED_UP,
    ("last_words.py", "find_spec"): LOOKED_UP,
    ("serve/call/live_model.py", "eval"): GENERATED,
    ("serve/call/live_model.py", "exec"): GENERATED,
    ("loop/trackers.py", "import_module"): CONSTANT,
    ("integrations/transformers/trainer.py", "from_pretrained"): USERS,
    ("cli/doctor.py", "subprocess.run"): COMMAND,
    ("cli/processes.py", "spec_from_file_location"): USERS,
    ("cli/serve.py", "subprocess.run"): COMMAND,
    ("simulation/lower.py", "subprocess.run"): COMMAND,
    ("simulation/models.py", "from_pretrained"): "a config alone: no weights, no remote code",
    ("recipes/train/task.py", "from_pretrained"): "data alone: no remote code, weights_only",
    ("cli/processes.py", "CDLL"): "the C library that is loaded already",
    ("recipes/train/options.py", "find_spec"): LOOKED_UP,
    ("recipes/train/loop.py", "broadcast_object_list"): RANKS,
    ("compiler/backend_fn.py", "import_module"): USERS,
    ("files.py", "CDLL"): "the C library that is loaded already",
    ("runtime/transports/shm/link.py", "CDLL"): "the C library that is loaded already",
    ("runtime/transports/shm/link.py", "PyDLL"): "the C library that is loaded already",
    (
        "serve/call/entry.py",
        "exec",
    ): "text that this process wrote, and conditions of an entry whose signature holds",
    ("serve/builder/pieces/inductor_options.py", "import_module"): USERS,
    (
        "serve/call/program.py",
        "eval",
    ): "conditions on sizes that the build wrote: of this process, or of a signed entry",
    ("serve/contract/contract.py", "pickle.loads"): TRUSTED,
    ("serve/contract/conditions.py", "eval"): GENERATED,
    ("serve/call/conditions.py", "eval"): TRUSTED,
    ("serve/call/stitching.py", "exec"): TRUSTED,
}


def found_in(path: Path) -> set[tuple[str, str]]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name, owner = getattr(node.func, "attr", getattr(node.func, "id", "")), ""
        if isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
        if name not in DANGEROUS or (name in OWNERS and owner not in OWNERS[name]):
            continue
        if name in ("eval", "exec") and owner:  # model.eval()
            continue
        given = {each.arg: each.value for each in node.keywords}
        if (
            owner == "torch"
            and ast.unparse(given.get("weights_only", ast.Constant(None))) == "True"
        ):
            continue
        shown = f"{owner}.{name}" if name in OWNERS else name
        found.add((str(path.relative_to(SOURCE)), shown))
        assert "shell" not in given, f"{path} runs a shell"
    return found


def test_every_place_is_known():
    found = {each for path in SOURCE.rglob("*.py") for each in found_in(path)}
    assert found - KNOWN.keys() == set(), "look at what it is given, then say here why it may"
    assert KNOWN.keys() - found == set(), "these are gone"


def test_a_dangerous_call_is_found(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    path = tmp_path / "new.py"
    path.write_text("import torch\nmodel.eval()\ntorch.load(p, weights_only=True)\ntorch.load(p)\n")
    assert found_in(path) == {("new.py", "torch.load")}
