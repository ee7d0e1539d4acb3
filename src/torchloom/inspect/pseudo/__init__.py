"""Prints bytecode as readable Python, such as the code that Dynamo wrote.

The text is for display only. Printing never fails: an instruction that is not known becomes a comment. Pure
Python, without torch, for CPython 3.10 to 3.14. From the top down:

    printer       pseudo_source and bytecode_listing
    constants     removes values of the program from a code object
    flow          follows the paths of a function: branches and loops; jumps says where they lead
    machine       runs one instruction on the symbolic stack; its handlers are in the base classes
                  functions, calls, fstrings, displays, operators, loads and stack
    expressions   makes what lies on the stack; values are the classes, names and literals their text
"""

from __future__ import annotations

from torchloom.inspect.pseudo.printer import bytecode_listing, pseudo_source

__all__ = ["bytecode_listing", "pseudo_source"]
