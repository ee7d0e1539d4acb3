"""A rank raises, is killed, stops or ends early: the others say so and end."""

from __future__ import annotations

from dataclasses import replace

from faults.matrix.case import STOPPED, Case, Ends, exits, killed, raised, told
from faults.matrix.cases.making import GLOO, GLOO_COMPILED, SHM, SHM_COMPILED, over

_BAD = (told("rank 1 has failed with ValueError", "bad"), raised("bad"))
_LOST = told("rank 1 has ended without a word")
_LOST_0 = told("rank 0 has ended without a word")


def _ends(what: str, how: str, ends: tuple[Ends, ...], setups, **arguments):
    rest = {"how": how, **arguments}
    return over("fault", what, "ends", ends, setups, arguments=rest)


def _killed(what: str, when: str, setups):
    return _ends(f"killed {what}", "kill", (_LOST, killed(9)), setups, when=when)


def _at_any_moment(who: int, seconds: float, setup) -> Case:
    ends = (_LOST, killed(9)) if who else (killed(9), _LOST_0)
    (case,) = over("fault", f"rank {who} killed after {seconds:g} s of steps", "ends_at_any_moment",
                   ends, [setup], arguments={"who": who, "seconds": seconds})  # fmt: skip
    return case


_MUON = {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}
_OWNERS = [replace(each, config=_MUON) for each in (GLOO, SHM)]
_SHORT = {"timeouts": {"step_s": 3.0}}

CASES = [
    *over("fault", "raises in forward", "raises", _BAD, [GLOO],
          arguments={"where": "forward"}),
    *over("fault", "wrong shape in forward", "raises",
          (told("rank 1 has failed with RuntimeError", "shapes"), raised("shapes")),
          [SHM], arguments={"where": "shape"}),
    *over("fault", "wrong shape in forward", "raises",
          (told("rank 1 has failed with RuntimeError", "reduction dim"), raised("reduction dim")),
          [GLOO_COMPILED, SHM_COMPILED], arguments={"where": "shape"}),
    *over("fault", "raises in backward", "raises", _BAD, [GLOO], arguments={"where": "backward"}),
    *over("fault", "raises in step", "raises", _BAD, [GLOO, SHM], arguments={"where": "step"}),
    *over("fault", "rank 0 raises in forward", "raises",
          (raised("bad"), told("rank 0 has failed with ValueError", "bad")), [GLOO],
          arguments={"where": "forward", "who": 0}),
    *over("fault", "raises in the loader", "raises_in_the_loader", _BAD, [GLOO],
          arguments={"workers": 0}),
    *over("fault", "raises in the loader's process", "raises_in_the_loader", _BAD, [GLOO, SHM],
          arguments={"workers": 1}),
    *_killed("before a collective", "before", [GLOO, SHM, GLOO_COMPILED]),
    *_killed("inside a collective", "inside", [GLOO, SHM, SHM_COMPILED, replace(GLOO, width=512)]),
    *_killed("after a collective", "after", [GLOO]),
    *_ends("rank 0 killed before a collective", "kill", (killed(9), _LOST_0), [GLOO, SHM], who=0),
    *_ends("rank 0 killed inside a collective", "kill", (killed(9), _LOST_0), [GLOO, SHM], who=0,
           when="inside"),
    *over("fault", "killed before gradients go to owners", "ends_among_owners", (_LOST, killed(9)),
          _OWNERS, arguments={"what": "gradients to owners", "when": "before"}),
    *over("fault", "killed while weights come from owners", "ends_among_owners", (_LOST, killed(9)),
          _OWNERS, arguments={"what": "weights from owners", "when": "inside"}),
    *_ends("1 of 3 ranks killed", "kill", (_LOST, killed(9), _LOST), [SHM]),
    _at_any_moment(1, 0.37, replace(GLOO, width=512)),
    _at_any_moment(1, 0.71, replace(SHM, width=512)),
    _at_any_moment(0, 0.53, replace(GLOO, width=512)),
    _at_any_moment(0, 0.29, replace(SHM, width=512)),
    *over("fault", "killed while others compile", "ends_while_others_compile",
          (_LOST, killed(9), _LOST), [GLOO], arguments={"who": 1}),
    *over("fault", "rank 0 killed while others compile", "ends_while_others_compile",
          (killed(9), _LOST_0), [SHM], arguments={"who": 0}),
    *_ends("crashes (SIGSEGV)", "crash", (_LOST, killed(11)), [SHM]),
    *_ends("os._exit(3)", "exit", (_LOST, exits(3)), [GLOO]),
    *_ends("sys.exit(0) early", "sys.exit", (told("rank 1 has ended its program"), exits(0)),
           [GLOO, SHM]),
    *_ends("sys.exit(5) early", "sys.exit 5", (told("rank 1"), exits(5)), [GLOO]),
    *_ends("SIGTERM", "terminate", (_LOST, killed(15)), [GLOO]),
    *_ends("rank 0 sys.exit(0) early", "sys.exit", (exits(0), told("rank 0 has ended its program")),
           [GLOO], who=0),
    *_ends("stopped", "stop", (told("rank 1 did not come within 3 s"), STOPPED),
           [replace(GLOO, config=_SHORT), replace(SHM, config=_SHORT)]),
    *_ends("rank 0 stopped", "stop", (STOPPED, told("rank 0", "3 s")),
           [replace(GLOO, config=_SHORT)], who=0),
    *over("fault", "runs out of data", "runs_out_of_data",
          (told("rank 1 has ended its program"), exits(0)), [GLOO], arguments={"saves": False}),
    *over("fault", "runs out of data and goes on to save", "runs_out_of_data",
          (told("rank 0", "rank 1"),) * 2, [GLOO, SHM], arguments={"saves": True}),
    # torchrun ends the other ranks at once, so they need not say anything.
    *over("fault", "torchrun, raises in forward", "raises", (Ends(speaks=False), raised("bad")), [GLOO],
          arguments={"where": "forward"}, launcher="torchrun", limit_s=20),
    *over("fault", "torchrun, killed before a collective", "ends",
          (Ends(speaks=False), Ends(speaks=False)), [GLOO], arguments={"how": "kill"},
          launcher="torchrun", limit_s=20),
]  # fmt: skip
