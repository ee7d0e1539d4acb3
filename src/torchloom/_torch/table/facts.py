"""What differs between versions of torch though no name does."""

from __future__ import annotations

from torchloom._torch.table.records import Fact

FACTS = (
    Fact(
        name="torchloom._torch.facts.keeps_tangents",
        differs="`backward(ctx, *flat_args)` of AOTAutograd holds the gradients of results through the"
        " whole of backward; later it hands them on in a list that it empties",
        detected="by the version",
        until="2.12",
    ),
    Fact(
        name="torchloom._torch.facts.guards_requires_grad",
        differs="Dynamo puts guards on `requires_grad` of a module's parameters; before, a model is"
        " compiled anew where one changes",
        detected="by the version",
        since="2.12",
    ),
    Fact(
        name="torchloom._torch.facts.lowers_calls",
        differs="Inductor is known to generate one function for several calls of a subgraph with operands of its"
        " own layout; before, graphs that go to Inductor stay whole (`compile.regions`)",
        detected="by the version",
        since="2.13",
    ),
    Fact(
        name="torchloom._torch.shapes.takes_bounds",
        differs="`mark_unbacked` takes bounds of a size; before, less can be proven of sizes that"
        " nothing may branch on",
        detected="by its signature",
        since="2.12",
    ),
    Fact(
        name="torchloom._torch.full_capture.keeps_floats_by_closure",
        differs="Dynamo keeps what it knows of floats by code and closure; before, by code alone",
        detected="by the signature of `CodeId.make`",
        since="2.12",
    ),
    Fact(
        name="torchloom._torch.fallback.counts_whole_graphs",
        differs="a whole graph (`fullgraph=True`) in whose call nothing compiled runs raises"
        " (pytorch/pytorch#177809)",
        detected="by the counter `set_fullgraph_compiled_frame_count`",
        since="2.12",
    ),
    Fact(
        name="torchloom._torch.registry.keeps_tags_by_name",
        differs="tags of backends are kept by name; before, as an attribute of the function",
        detected="by the table `_BACKEND_TAGS`",
        since="2.14",
    ),
    Fact(
        name="torchloom._torch.coalesced.has_single_names",
        differs="collectives on single tensors have names of their own (`all_gather_single`), and the"
        " older ones warn",
        detected="by the names",
        since="2.13",
    ),
)
