"""Train without waiting for a compiler that is not used.

Optimizers and DistributedDataParallel import torch._dynamo, only to tell it what it is to leave alone, and
that import takes nearly as long as PyTorch's own. Until something is compiled a module stands in for it that
answers these few questions as they are answered where nothing is. Whatever else it is asked, it imports
torch._dynamo and gives its place up to it: a script that compiles, or another version of PyTorch, is served
as ever, and waits for the import then.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .importing import without_collector

NAME = "torch._dynamo"
ASKS_AGAIN = "torch._compile"
"""Asks what is to be left alone when that is called first, and again where its mark is gone."""
_MARK = "__dynamo_disable"
"""Where it keeps, on a function, what the compiler has made of it."""


def defer_compiler() -> None:
    """Let torch._dynamo be imported only where it has something to do. Once it is imported, no effect."""
    if NAME not in sys.modules:
        sys.modules[NAME] = _StandIn()


def import_compiler() -> None:
    """Import torch._dynamo itself, whether it was deferred or not."""
    module = importlib.import_module(NAME)
    if isinstance(module, _StandIn):
        module.give_up()


class _StandIn(ModuleType):
    """torch._dynamo, as far as it concerns code that is run as it is written."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self._left_alone: list[Callable[..., Any]] = []
        self._giving_up = threading.RLock()
        self._answers = {
            "disable": self._disable,
            "graph_break": _nothing_to_do,
            "trace_rules": _Part(lambda: self.give_up().trace_rules, clear_lru_cache=_nothing_to_do),
            # config.optimize_ddp as it is by default; DDP itself heeds another value alone.
            "utils": _Part(lambda: self.give_up().utils, get_optimize_ddp_mode=lambda: "ddp_optimizer"),
        }
        vars(self).update(self._answers)

    def _disable(self, function: Callable[..., Any] | None = None, *more: Any, **options: Any) -> Any:
        """The function itself: nothing would compile it.

        Whoever else asks, as users do by torch.compiler.disable, means to compile something.
        """
        if function is None or sys._getframe(1).f_globals.get("__name__") != ASKS_AGAIN:
            return self.give_up().disable(function, *more, **options)
        self._left_alone.append(function)
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # `inspect` looks through all modules for these
            raise AttributeError(f"{NAME}, not imported yet, has no {name}")
        return getattr(self.give_up(), name)

    def give_up(self) -> ModuleType:
        """The real one, which has this one's place from now on."""
        with self._giving_up:
            if sys.modules.get(NAME) is self:
                del sys.modules[NAME]
                for answer in self._answers:
                    delattr(self, answer)  # whoever holds this module gets the other's
                for function in self._left_alone:
                    if getattr(function, _MARK, None) is function:
                        delattr(function, _MARK)  # from now on it is to be kept from being compiled
                sys.meta_path.insert(0, _Given())
            with without_collector(at_start=False):
                return importlib.import_module(NAME)


class _Part:
    """A module of torch._dynamo, as far as it is asked for where nothing is compiled."""

    def __init__(self, whole: Callable[[], Any], **answers: Callable[..., Any]):
        """`whole` imports it."""
        self._whole = whole
        vars(self).update(answers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole(), name)


def _nothing_to_do(*_: object, **__: object) -> None:
    """There is no graph to break and no trace to forget."""


class _Given(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds submodules that came with their package while it was asked where to look for them.

    `import torch._dynamo.config` asks the stand-in for its path; by then it is imported, and would be again.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        known = sys.modules.get(fullname) if fullname.startswith(f"{NAME}.") else None
        if known is None:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=getattr(known, "__file__", None))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        known = sys.modules[spec.name]
        spec.loader_state = known.__spec__
        return known

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None and spec.loader is self:  # there are modules that refuse another one
            module.__spec__ = spec.loader_state
