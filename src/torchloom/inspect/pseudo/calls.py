"""Calls, yields and awaits."""

from __future__ import annotations

import dis
import sys
from collections.abc import Sequence

from torchloom.inspect.pseudo.displays import arguments_of, keywords_of
from torchloom.inspect.pseudo.expressions import BUILD_CLASS, HOOK, NULL, compound, name, primary
from torchloom.inspect.pseudo.fstrings import Strings
from torchloom.inspect.pseudo.stack import UNKNOWN
from torchloom.inspect.pseudo.values import ClassBody, Constant, Expression, Part


class Calls(Strings):
    """Instructions that call."""

    def op_KW_NAMES(self, ins: dis.Instruction) -> None:
        found = self.consts[ins.arg or 0]  # dis of 3.11 does not resolve it
        self.kw_names = tuple(str(each) for each in found)

    def op_CALL(self, ins: dis.Instruction) -> None:
        names, self.kw_names = self.kw_names, ()
        self._call(ins.arg or 0, names)

    def op_CALL_KW(self, ins: dis.Instruction) -> None:
        self._call(ins.arg or 0, _words(self.pop()))

    def _call(self, count: int, kw_names: Sequence[str]) -> None:
        args = self.pop_many(count)
        if sys.version_info >= (3, 13):
            fn, receiver = self.pop_many(2)
        else:
            receiver, fn = self.pop_many(2)
            # An unbound method is (function, self); a plain function is (NULL, function).
            if receiver is not NULL:
                receiver, fn = fn, receiver
        if receiver is not NULL:
            args = [receiver, *args]
        self._push_call(fn, args, kw_names)

    def op_CALL_FUNCTION(self, ins: dis.Instruction) -> None:
        args = self.pop_many(ins.arg or 0)
        self._push_call(self.pop(), args, ())

    def op_CALL_FUNCTION_KW(self, ins: dis.Instruction) -> None:
        names = _words(self.pop())
        args = self.pop_many(ins.arg or 0)
        self._push_call(self.pop(), args, names)

    def op_CALL_METHOD(self, ins: dis.Instruction) -> None:
        args = self.pop_many(ins.arg or 0)
        receiver, fn = self.pop_many(2)
        if receiver is not NULL:
            receiver, fn = fn, receiver
            args = [receiver, *args]
        self._push_call(fn, args, ())

    def op_CALL_FUNCTION_EX(self, ins: dis.Instruction) -> None:
        has_kwargs = sys.version_info >= (3, 14) or (ins.arg or 0) & 1
        kwargs = self.pop() if has_kwargs else NULL
        args = self.pop()
        around = self.pop_many(2) if sys.version_info >= (3, 11) else [self.pop()]
        fn = next((value for value in around if value is not NULL), UNKNOWN)
        parts = arguments_of(args) + ([] if kwargs is NULL else keywords_of(kwargs))
        self._push_call(fn, parts, ())

    def _push_call(self, fn: Part, args: Sequence[Part], kw_names: Sequence[str]) -> None:
        if fn is HOOK:
            self.push(HOOK)
            return
        split = len(args) - len(kw_names)
        texts = [arg.text for arg in args[:split]]
        texts += [f"{key}={arg.text}" for key, arg in zip(kw_names, args[split:], strict=False)]
        if fn is BUILD_CLASS and args and isinstance(args[0], ClassBody):
            self._define_class(args[0], args[1] if len(args) > 1 else UNKNOWN, texts[2:])
            return
        self.push(primary(f"{fn.operand}({', '.join(texts)})", fn, *args))

    def _define_class(self, body: ClassBody, title: Part, around: Sequence[str]) -> None:
        """Emit a class statement under the class's own name."""
        word = title.value if isinstance(title, Constant) else ""
        word = word if isinstance(word, str) and word.isidentifier() else self.scope.fresh("class_")
        target = self.stored_next()
        self.rebinding(word, has_effects=True)
        bases = f"({', '.join(around)})" if around else ""
        self.emit(f"class {word}{bases}:")
        for line in body.lines or ("    pass",):
            self.emit(line)
        if target != word:
            self.push(self._named(name(word)))
        else:
            self.push(name(word))

    # -- generators

    def op_YIELD_VALUE(self, ins: dis.Instruction) -> None:
        value = self.pop()
        self.scope.has_yield = True
        self.push(primary(f"(yield {value.text})", value))

    def op_YIELD_FROM(self, ins: dis.Instruction) -> None:
        """Delegate to a generator, or await: one instruction in 3.10, a loop later."""
        self.pop()
        value = self.pop()
        before = [each.opname for each in self.instructions[max(self.at - 2, 0) : self.at]]
        if "GET_AWAITABLE" in before:
            self.push(compound(f"await {value.operand}", value))
            return
        self.scope.has_yield = True
        text = getattr(value, "iterable", value.text)
        self.push(primary(f"(yield from {text})", value))

    def op_RETURN_GENERATOR(self, ins: dis.Instruction) -> None:
        self.push(NULL)

    # -- what has no syntax of its own

    def op_CALL_INTRINSIC_1(self, ins: dis.Instruction) -> None:
        what = ins.argrepr
        if "LIST_TO_TUPLE" in what:
            self.op_LIST_TO_TUPLE(ins)
        elif "UNARY_POSITIVE" in what:
            value = self.pop()
            self.push(compound(f"+{value.operand}", value))
        elif "ASYNC_GEN_WRAP" not in what:
            value = self.pop()
            self.push(primary(f"<{what.lower()}>({value.text})", value))

    def op_CALL_INTRINSIC_2(self, ins: dis.Instruction) -> None:
        left, right = self.pop_many(2)
        self.push(primary(f"<{ins.argrepr.lower()}>({left.text}, {right.text})", left, right))

    def op_BEFORE_WITH(self, ins: dis.Instruction) -> None:
        """Print `with` as calls of `__enter__` and `__exit__`; the path of an exception is not shown."""
        manager = self.once(1)
        self.pop()
        self.push(Expression(f"{manager.owner}.__exit__", reads=manager.reads))
        self.push(primary(f"{manager.owner}.__enter__()", manager))


def _words(names: Part) -> tuple[str, ...]:
    """Return the names in a constant tuple of them."""
    value = names.value if isinstance(names, Constant) else ()
    return tuple(str(each) for each in value) if isinstance(value, tuple) else ()
