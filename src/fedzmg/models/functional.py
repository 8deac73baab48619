"""A module as a pure function of its parameters, and reasons to train it client by client."""

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fedzmg.contract import Layout, ParamInfo
from fedzmg.errors import InputError
from fedzmg.models import behaviour
from fedzmg.models.batch_norm import BatchNormPolicy, NormLayers, norms_of, with_statistics
from fedzmg.models.call import FUNCTIONS_KEY, Call, keyed_layers
from fedzmg.models.copies import PARAMETER_HOOKS, copy_module, module_to
from fedzmg.models.gradients import gradients_differ, real_view
from fedzmg.models.keyed import KeyedFunctions
from fedzmg.models.layers import swap_layers
from fedzmg.models.layout import Known, layout_of
from fedzmg.parts import BUFFER
from fedzmg.tree import Inputs, Tree, leaves, row

SOMETIMES = 16  # trial passes in which a model with changing buffers shows which
Maybe: TypeAlias = Tensor | tuple[()]  # (): not given
Moved: TypeAlias = dict[str, Tensor] | None  # receives the running statistics after a batch


class FunctionalModel:
    """A module as a pure function ``model(params, x)``.

    The module is copied and never changed. Trainable parameters enter as a tree, parameters with
    ``requires_grad=False`` and buffers stay constant, random numbers depend on the step's key.
    Running statistics are in the tree, too, unless ``batch_norm`` is ``frozen`` or ``batch``, and
    so are buffers that :meth:`try_out` has seen change in training.
    """

    def __init__(
        self, module: nn.Module, axes: Known | None = None, batch_norm: BatchNormPolicy = "average"
    ) -> None:
        if isinstance(module, type):
            kind = module.__name__
            raise InputError(f"the model is the class {kind}: give {kind}(...)")
        if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
            raise InputError(f"the model is a {type(module).__name__}: give a plain nn.Module")
        trained = layout_of(module, axes)
        if not trained:
            raise InputError("the model has no trainable parameter: set requires_grad on some")
        self.axes, self.batch_norm = axes, batch_norm
        self.layout: Layout = with_statistics(module, trained, batch_norm)
        self.statistics = tuple(name for name in self.layout if name not in trained)
        """Names of running statistics and other changing buffers in the tree."""
        self._changing: dict[str, torch.dtype] = {}  # types of buffers that training changes
        self._complex = [name for name, p in module.named_parameters() if p.is_complex()]
        self._last = list(trained)[-1].rpartition(".")[0]  # name of the last layer with parameters
        self.source, self.module = copy_module(module), copy_module(module)
        self.layer_keys = swap_layers(self.module)
        self.norms = NormLayers(self.module, batch_norm)
        # Passes use the module's own parameters, with values put there: see :meth:`holding`.
        self.direct = any(getattr(p, t) for p in module.parameters() for t in PARAMETER_HOOKS)
        # cuDNN moves the parameters of recurrent layers to other memory, unless they stay there.
        self.relocates = any(isinstance(m, nn.RNNBase) for m in module.modules())
        self._replaced: dict[str, Any] | None = None  # options of KeyedFunctions, if needed
        self.loop_reason = ""  # to train client by client; empty: clients can be mapped
        self.tried: tuple[Any, ...] = ()  # examples and functions that a task has tried it with
        self._repeats = True  # a pass on the same examples gives the same outputs
        self._squeezed: torch.Size | None = None  # an example's outputs, if a lone one loses axes
        self._halves: tuple[Call, dict[bool, Call]] | None = None  # last layer; the others by mode
        self._prepare_calls()

    def _prepare_calls(self) -> None:
        self._training = self._call(self._copy(training=True))
        self._evaluating = self._call(self._copy(training=False))
        if self._halves is not None:
            self.split_head()

    def twin(self) -> "FunctionalModel":
        """Make a model for another thread, which computes the same."""
        made = copy.copy(self)
        if self.direct:
            made.module = copy_module(self.module)
        made._prepare_calls()
        return made

    def _copy(self, *, training: bool) -> nn.Module:
        # Constants are in memory once: a base model may be much larger than what is trained.
        own: nn.Module = copy_module(self.module, self.module.parameters())
        return self.norms.set_mode(own, training=training)

    def _call(self, module: nn.Module) -> Call:
        functions = None if self._replaced is None else KeyedFunctions(**self._replaced)
        return Call(module, functions, *self._changing)

    def split_head(self) -> None:
        """Prepare to compute the inputs of the last layer apart from its outputs."""
        name, bodies = self._last, {}
        for training in (True, False):
            body = self._copy(training=training)
            if name:
                body.set_submodule(name, nn.Identity())
            bodies[training] = self._call(body if name else nn.Identity())
        self._halves = Call(copy_module(self.module.get_submodule(name))), bodies

    @property
    def running(self) -> list[str]:
        """Return the names of running statistics, which layers change in place."""
        return [name for name in self.statistics if name not in self._changing]

    @property
    def needs_key(self) -> bool:
        """Training needs a key for every step: for dropout or any other keyed layer."""
        return bool(self.layer_keys)

    @property
    def thread_safe(self) -> bool:
        """Copies of the model can be used by several threads: they share nothing that changes."""
        seeds = self._replaced is not None and self._replaced["seeds"]
        return self._repeats and not (seeds or behaviour.shares_hooks(self.module))

    def params(self) -> Tree:
        """Copy the module's own trainable parameters."""
        named = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        params = {name: real_view(named[name].detach()).clone() for name in self.layout}
        # A count of batches is a whole number in torch.
        counts = [n for n in self.statistics if not params[n].is_floating_point()]
        return Tree(params | {name: params[name].float() for name in counts})

    def frozen(self) -> list[Tensor]:
        """Return the parameters and buffers that are not trained."""
        return [t.detach() for _, t in self._kept(self.module)] + self.norms.constants

    def train(
        self, params: Tree, x: Inputs, key: Maybe = (), real: Maybe = (), moved: Moved = None
    ) -> Tensor:
        """Compute outputs with dropout on; ``real`` has flags of examples that are not padding."""
        return self._pass(self._training, params, x, key, real, {} if moved is None else moved)

    @contextlib.contextmanager
    def holding(self, params: Any) -> Iterator[Tree]:
        """Put values into the module's own parameters for a while, and return these.

        A pass with them is that of a plain loop, whatever the model does with its parameters. What
        it changes in place is changed in ``params``.
        """
        named = self.module.named_parameters()
        own = {name: p for name, p in named if name in params and p.requires_grad}
        before = {name: p.data for name, p in own.items()}
        for name, p in own.items():
            p.data = torch.view_as_complex(params[name]) if p.is_complex() else params[name].data
        held = {name: p.data for name, p in own.items()}
        try:
            yield Tree({name: own.get(name, leaf) for name, leaf in params.items()})
        finally:
            for name, p in own.items():
                if p.data_ptr() != held[name].data_ptr():
                    held[name].copy_(p.data)
                p.data = before[name]

    def _pass(
        self, call: Call, params: Any, x: Inputs, key: Maybe, real: Maybe, moved: Moved
    ) -> Tensor:
        """Compute outputs; in training with copies of statistics, for ``moved``."""
        inputs = dict(params.items())
        trained = next((inputs[name] for name in inputs if name not in self.statistics), None)
        if self.direct and trained is not None and not isinstance(trained, nn.Parameter):
            with self.holding({name: leaf.clone() for name, leaf in inputs.items()}) as own:
                return self._pass(call, own, x, key, real, moved)
        inputs |= {name: inputs[name].detach() for name in self.statistics if name in inputs}
        apart = (n for n in self._complex if n in inputs and not inputs[n].is_complex())
        inputs |= {n: torch.complex(*inputs[n].unbind(-1)) for n in apart}
        for name, kind in self._changing.items():
            if (leaf := inputs.get(name)) is not None:
                inputs[name] = leaf.to(leaf.dtype if kind.is_floating_point else kind, copy=True)
        if moved is not None and self.statistics:
            here = (name for name in self.statistics if name in inputs and name not in moved)
            moved |= {name: inputs[name].clone() for name in here}
            inputs |= moved
        if isinstance(key, Tensor):
            inputs |= dict.fromkeys(self.layer_keys, key)
        if isinstance(real, Tensor):
            inputs |= dict.fromkeys(self.norms.flags, real)
        outputs = call(inputs, x)
        if self._squeezed is not None:
            outputs = outputs.reshape(-1, *self._squeezed)
        if moved is not None and self._changing:
            moved |= {n: inputs[n].detach().to(params[n]) for n in self._changing if n in params}
        return outputs

    def evaluate(self, params: Tree, x: Inputs, real: Maybe = ()) -> Tensor:
        """Compute outputs with dropout off."""
        return self._pass(self._evaluating, params, x, (), real, None)

    def features(
        self, params: Tree, x: Inputs, key: Maybe = (), real: Maybe = (), moved: Moved = None
    ) -> Tensor:
        """Compute the inputs of the last layer; in training if ``moved`` is given."""
        assert self._halves is not None, "split_head comes first"
        body = {n: leaf for n, leaf in params.items() if n.rpartition(".")[0] != self._last}
        return self._pass(self._halves[1][moved is not None], body, x, key, real, moved)

    def head(self, params: Tree, features: Tensor) -> Tensor:
        """Compute outputs from the inputs of the last layer."""
        assert self._halves is not None, "split_head comes first"
        split = {n.rpartition("."): leaf for n, leaf in params.items()}
        own = {name: leaf for (layer, _, name), leaf in split.items() if layer == self._last}
        return self._halves[0](own, features)

    def check_features(self, params: Tree, x: Inputs) -> None:
        """Prepare to compute features; reject a model whose outputs are not its last layer's."""
        if any(name.rpartition(".")[0] == self._last for name in self.statistics):
            raise InputError(f"features end at {self._last!r}, a BatchNorm: put a dense layer last")
        self.split_head()
        with torch.no_grad():
            outputs = self.evaluate(params, x)
            with contextlib.suppress(RuntimeError):  # of other shapes
                split = self.head(params, self.features(params, x))
                if torch.allclose(split, outputs, equal_nan=True):
                    return
        problem = f"features are inputs of {self._last!r}, whose outputs are not the model's"
        raise InputError(f"{problem}: put it last")

    def try_out(self, params: Tree, x: Inputs, others: Inputs | None = None) -> Tensor:
        """Compute outputs with dropout off; learn, on ``others``, too, how to train the model."""
        if others is not None:
            with contextlib.suppress(Exception):  # one of them cannot be read: training says where
                return self._learn(params, x, others)
        return self._learn(params, x, x)

    def _learn(self, params: Tree, x: Inputs, many: Inputs) -> Tensor:
        self.layer_keys = tuple(name for name in self.layer_keys if name != FUNCTIONS_KEY)
        counts = any(getattr(m, "scale_grad_by_freq", False) for m in self.module.modules())
        self.loop_reason = "scale_grad_by_freq counts the padding of a batch" if counts else ""
        first = len(self.layer_keys)
        seeded = (KeyedFunctions(first, seeds=True, learns=True) for _ in range(2))
        self._training.functions, self._evaluating.functions = modes = tuple(seeded)
        sources = [*self._training.keyed, modes[0]]
        self._squeezed, examples = None, len(leaves(many)[0])
        one = row(many, slice(1))
        before = behaviour.values_of(self._kept(self._training.module))
        tried = behaviour.opened(params).map(Tensor.requires_grad_)
        with torch.enable_grad():
            for source in sources:
                source.axes, source.shapes = (), []
            trained = self.train(tried, many)
            shapes = [list(source.shapes or ()) for source in sources]
            for source in sources:
                source.shapes = []
            try:
                alone = self.train(tried, one)
            except Exception:  # of the model: several examples have passed
                one, alone = many, trained
                self.loop_reason = "the model cannot read a single example"
            for source, drawn in zip(sources, shapes, strict=True):
                source.learn_axes(drawn)
            if any(any(source.axes) for source in sources):
                trained, alone = self.train(tried, many), self.train(tried, one)
            # Random numbers depend on the place.
            turned = trained if any(shapes) else behaviour.in_reverse(self.train, tried, many)
        with torch.no_grad():
            outputs = self.evaluate(params, x)
            among, lone = self.evaluate(tried, many), self.evaluate(tried, one)
            turned_too = behaviour.in_reverse(self.evaluate, tried, many)
        # Batch statistics may depend on other examples: they leave out padding.
        pairs = [] if self.norms.dependent else [(trained, alone), (trained, turned)]
        pairs += [] if self.norms.always_dependent else [(among, lone), (among, turned_too)]
        if any(behaviour.depends_on_batch(*pair, examples) for pair in pairs):
            self.loop_reason = "outputs for an example depend on the other examples of its batch"
        size = len(leaves(x)[0])
        rows = isinstance(outputs, Tensor) and outputs.shape[:1] == (size,) and one is not many
        if rows and lone.shape != outputs[:1].shape and lone.numel() == outputs[0].numel():
            self._squeezed = outputs[0].shape
        with torch.no_grad():
            self._repeats = behaviour.are_equal(trained, self.train(tried, many))
            if changed := self._changed(before):  # others may change only sometimes
                for _ in range(SOMETIMES):
                    self.train(tried, x)
                    changed |= self._changed(before)
        self._add_buffers(n for n in before if n in changed)
        for layer, source in zip(keyed_layers(self.module), self._training.keyed, strict=True):
            layer.axes = source.axes
        # The mode that replaces functions stays only if it has found some.
        found: set[str] = modes[0].found | modes[1].found
        if again := "again" in found:
            self.direct, self.loop_reason = True, "the backward pass computes parts of it again"
        if "hook" in found or any(
            m._backward_hooks or m._backward_pre_hooks for m in self.module.modules()
        ):
            self.loop_reason = "the model changes gradients by hooks"
        seeds, draws = "unkeyed" in found, not found.isdisjoint(("random", "unkeyed"))
        # A checkpoint sets torch's own generator back for the parts that it computes again.
        plain = again and (draws or self.needs_key or "attention" in found)
        own: dict[str, Any] = {"layer": first, "always": draws, "seeds": seeds or plain}
        own |= {"axes": modes[0].axes, "plain": plain}
        self._replaced = own if plain or found - {"hook", "again"} else None
        for layer in keyed_layers(self.module):
            layer.plain = plain
        if seeds:
            self.loop_reason = "the model draws random numbers by functions that take no key"
        if draws or plain:
            self.layer_keys += (FUNCTIONS_KEY,)
        self._prepare_calls()
        key, reason = torch.tensor(0) if self.needs_key else (), ""
        twin = self.twin()
        if behaviour.changes_in_place(lambda large: twin.train(large, x, key), params):
            reason, self.direct = "a pass changes parameters in place", True
        elif self.direct or gradients_differ(twin, params, x, key):
            reason, self.direct = "a map does not give the model's gradients", True
        self.loop_reason = self.loop_reason or reason
        self.loop_reason = self.norms.unmapped or self.loop_reason
        return outputs

    def _add_buffers(self, names: Iterable[str]) -> None:
        """Put buffers that change in training into the tree, beside their module's parameters."""
        kept = dict(self.source.named_parameters()) | dict(self.source.named_buffers())
        self._changing |= {name: kept[name].dtype for name in names}
        for name, p in self.module.named_parameters():
            if name in self._changing:  # changed by the trial
                p.data.copy_(kept[name])
        if not self._changing:
            return
        self.loop_reason = f"buffer {next(iter(self._changing))!r} changes in training"
        self.direct = True  # a first pass may set parameters from its data
        layout: dict[str, ParamInfo] = {}
        for prefix, child in self.module.named_modules():
            for own in (*child._parameters, *child._buffers):
                name = f"{prefix}.{own}".lstrip(".")
                if name in self._changing:
                    real = self._changing[name].is_floating_point
                    layout[name] = ParamInfo("statistics" if real else "counts", (), BUFFER)
                elif name in self.layout:
                    layout[name] = self.layout[name]
        self.layout = layout
        self.statistics = tuple(name for name, info in layout.items() if info.is_buffer)

    def _kept(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        """List what is not trained: frozen parameters, and buffers but for keys and statistics."""
        own = (*keyed_layers(module), *norms_of(module).values())
        known = {id(b) for layer in own for b in layer.buffers()}
        frozen = [pair for pair in module.named_parameters() if pair[0] not in self.layout]
        return frozen + [pair for pair in module.named_buffers() if id(pair[1]) not in known]

    def _changed(self, before: Mapping[str, Tensor]) -> set[str]:
        after = behaviour.values_of(self._kept(self._training.module))
        # A buffer whose shape changes is a cache.
        same = (n for n, b in before.items() if n in after and after[n].shape == b.shape)
        return {n for n in same if not torch.equal(before[n], after[n])}

    def to(self, device: torch.device, dtype: torch.dtype) -> "FunctionalModel":
        """Copy the model to a device; constants become ``dtype``."""
        moved = copy.copy(self)
        moved.module = module_to(self.module, device, dtype)
        moved._prepare_calls()
        return moved
