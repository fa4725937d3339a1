"""The errors of the package: the argument, its value and the rule that it breaks."""

from __future__ import annotations

from collections.abc import Mapping


class Error(RuntimeError):
    """Base of all errors of the library; a RuntimeError, like the errors of PyTorch's functions.

    Attributes: argument ("k"), value ("f32 [2, 4, 10, 64]"); the text holds both and the reason.
    """

    def __init__(self, text: str, argument: str = "", value: str = "") -> None:
        self.args = (text,)  # super().__init__ stops torch.compile, which would not show the text
        self.argument = argument
        self.value = value

    def named(self, names: Mapping[str, str]) -> Error:
        """The same error by the caller's name of the argument, where that is another one."""
        name, text = names.get(self.argument), self.args[0]
        if name is None or not text.startswith(f"{self.argument} = "):
            return self
        return type(self)(name + text[len(self.argument):], name, self.value)

    def __reduce__(self) -> tuple[type[Error], tuple[str, str, str]]:
        return type(self), (str(self), self.argument, self.value)


class InvalidArgument(Error, ValueError):
    """An argument breaks a rule of docs/semantics.md."""


class WrongType(InvalidArgument, TypeError):
    """An argument has the wrong type, or is an array of an unknown framework or element type."""


class Unsupported(Error, NotImplementedError):
    """The call is valid, but the backend cannot do it."""


class Unavailable(Error):
    """The backend, device or compiler is not on this machine."""


class OutOfMemory(Error, MemoryError):
    """Memory could not be allocated."""


class DeviceFailure(Error):
    """The GPU's driver reported a failure; the text quotes the driver."""


class InternalError(Error):
    """A bug of the library."""


def refuse(argument: str, value: object, reason: str,
           kind: type[Error] = InvalidArgument) -> Error:
    """The error to raise, in the library's own form "argument = value: reason"."""
    return kind(f"{argument} = {value}: {reason}", argument, str(value))
