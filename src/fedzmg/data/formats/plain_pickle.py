"""Read a pickle of plain containers and matrices of bytes, without unpickling anything.

A pickle is a program for a small machine with a stack. The few instructions that dictionaries,
lists, tuples, text, numbers and NumPy's arrays of bytes need are followed here on plain values;
what such a file calls by name is acted out, not imported. Any other instruction or name is
refused. Python 2 and 3, protocols 2 to 5.
"""

from __future__ import annotations

import mmap
import pickletools
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from fedzmg.data.formats.rows import file_size, reading
from fedzmg.errors import InputError

_NAMES = {
    "numpy.core.multiarray _reconstruct": "empty",
    "numpy._core.multiarray _reconstruct": "empty",
    "numpy.core.numeric _frombuffer": "filled",
    "numpy._core.numeric _frombuffer": "filled",
    "numpy ndarray": "array",
    "numpy dtype": "type",
    "_codecs encode": "encode",
}
"""All that a file may name, and the part it plays here."""


class ByteMatrix:
    """An array of bytes with two axes; a pickle makes it empty and fills it later."""

    def __init__(self) -> None:
        self.shape = (0, 0)
        self.values: bytes | bytearray = b""

    def fill(self, shape: Any, kind: Any, order: Any, values: Any) -> None:
        """Take the four parts of an array, if it is one of bytes."""
        sizes = shape if isinstance(shape, tuple) else ()
        if len(sizes) != 2 or not all(type(size) is int and size >= 0 for size in sizes):
            raise ValueError("an array whose axes are not two")
        if not isinstance(kind, _ByteType) or order not in (False, "C"):
            raise ValueError("an array that is not of bytes, row by row")
        if not isinstance(values, bytes | bytearray) or len(values) != sizes[0] * sizes[1]:
            raise ValueError("an array that does not fill its shape")
        self.shape, self.values = (sizes[0], sizes[1]), values


class _ByteType:
    """NumPy's type of bytes."""


class _Named(NamedTuple):
    """A function or class that a pickle names."""

    part: str


class _Mark:
    """Where a run of values begins on the stack."""


def read(path: Path) -> Any:
    """The value of a pickle; strings of Python 2 come as bytes, arrays as :class:`ByteMatrix`.

    Raises:
        InputError: for a damaged pickle, and for one of anything else. Nothing was run then.
    """
    file_size(path)
    with (
        reading(str(path), "give the official file"),
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        machine = _Machine()
        # A mapped file is never asked for more than it has, whatever length it claims.
        for opcode, argument, place in pickletools.genops(cast(IO[bytes], data)):
            if opcode.name == "STOP":
                break
            try:
                machine.follow(opcode.name, argument)
            except ValueError as error:
                raise InputError(
                    f"{path}: refused at byte {place}: {error}; nothing in it was run: give the "
                    "official file"
                ) from None
        if data.tell() != len(data):
            raise InputError(f"{path}: goes on after its end, at byte {data.tell()}: get it again")
        return machine.pop()


class _Machine:
    """The stack and the memory of a pickle."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memory: dict[int, Any] = {}

    def follow(self, instruction: str, argument: Any) -> None:
        """Do what one instruction says.

        Raises:
            ValueError: for an instruction, a name or a call that is not of this small language.
        """
        match instruction:
            case "PROTO" | "FRAME":
                pass
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINUNICODE" | "SHORT_BINUNICODE":
                self.stack.append(argument)
            case "BINBYTES" | "SHORT_BINBYTES" | "BINBYTES8" | "BYTEARRAY8":
                self.stack.append(argument)
            case "BINSTRING" | "SHORT_BINSTRING":
                self.stack.append(argument.encode("latin-1"))
            case "NONE":
                self.stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                self.stack.append(instruction == "NEWTRUE")
            case "EMPTY_DICT":
                self.stack.append({})
            case "EMPTY_LIST":
                self.stack.append([])
            case "EMPTY_TUPLE":
                self.stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                values = [self.pop() for _ in range(int(instruction[-1]))]
                self.stack.append(tuple(reversed(values)))
            case "MARK":
                self.stack.append(_Mark())
            case "TUPLE":
                self.stack.append(tuple(self.pop_to_mark()))
            case "APPEND":
                value = self.pop()
                self.top(list).append(value)
            case "APPENDS":
                values = self.pop_to_mark()
                self.top(list).extend(values)
            case "SETITEM":
                value, key = self.pop(), self.pop()
                self.set_items([key, value])
            case "SETITEMS":
                self.set_items(self.pop_to_mark())
            case "BINPUT" | "LONG_BINPUT":
                self.memory[argument] = self.top(object)
            case "MEMOIZE":
                self.memory[len(self.memory)] = self.top(object)
            case "BINGET" | "LONG_BINGET":
                if argument not in self.memory:
                    raise ValueError("it recalls a value that it has not kept")
                self.stack.append(self.memory[argument])
            case "GLOBAL":
                self.stack.append(_named(argument))
            case "STACK_GLOBAL":
                name, module = self.pop(), self.pop()
                if not isinstance(name, str) or not isinstance(module, str):
                    raise ValueError("a name that is no text")
                self.stack.append(_named(f"{module} {name}"))
            case "REDUCE":
                arguments, function = self.pop(), self.pop()
                self.stack.append(_act(function, arguments))
            case "BUILD":
                self.build(self.pop())
            case _:
                raise ValueError(f"the instruction {instruction} does not belong to such a file")

    def pop(self) -> Any:
        """Take the last value."""
        self.top(object)
        return self.stack.pop()

    def top(self, kind: type) -> Any:
        """The last value, which must be of a kind."""
        if not self.stack or isinstance(self.stack[-1], _Mark):
            raise ValueError("a value is missing")
        if not isinstance(self.stack[-1], kind):
            raise ValueError("a value is of the wrong kind")
        return self.stack[-1]

    def pop_to_mark(self) -> list[Any]:
        """Take all values down to the last mark, and the mark."""
        values: list[Any] = []
        while self.stack:
            value = self.stack.pop()
            if isinstance(value, _Mark):
                return values[::-1]
            values.append(value)
        raise ValueError("a run of values is missing")

    def set_items(self, items: list[Any]) -> None:
        """Add keys and values, in turn, to the dictionary on top."""
        content = self.top(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Other keys may take forever to hash.
            if not isinstance(key, str | bytes):
                raise ValueError("a key is no text")
            content[key] = value

    def build(self, state: Any) -> None:
        """Fill an array that was made empty; a type is complete without."""
        if isinstance(self.top(object), _ByteType):
            return
        matrix = self.top(ByteMatrix)
        if not isinstance(state, tuple) or len(state) != 5:
            raise ValueError("an array of an unusual form")
        matrix.fill(*state[1:])


def _named(name: str) -> _Named:
    if name not in _NAMES:
        raise ValueError(f"it names {name[:80]!r}, which does not belong to such a file")
    return _Named(_NAMES[name])


def _act(function: Any, arguments: Any) -> Any:
    """What one of the named functions makes."""
    part = function.part if isinstance(function, _Named) else ""
    given = arguments if isinstance(arguments, tuple) else ()
    match part, given:
        case "empty", (_Named("array"), (0,), b"b" | "b"):
            return ByteMatrix()
        case "type", (b"u1" | "u1", 0, 1):
            return _ByteType()
        case "encode", (str(text), b"latin1" | "latin1"):
            return text.encode("latin-1")
        case "filled", (values, kind, shape, order):
            matrix = ByteMatrix()
            matrix.fill(shape, kind, order, values)
            return matrix
    raise ValueError("a call that does not belong to such a file")
