"""Forward and backward of a function as one functional graph of ATen operations.

Private torch API, tried on 2.11 and 2.13: ``aot_export_joint_simple``, for what writes; else a mode sees every
operation, and ``enable_python_dispatcher`` has composite ones come in their parts, as AOTAutograd does.
``select_decomp_table`` of ``torch._inductor`` says what inductor wants in parts; ``_inductor.lowering`` has to be
loaded before, because decompositions of pooling read it. ``aten._efficientzerotensor`` is what autograd makes of zeros
that nobody needs memory for. An operator's ``_schema`` names its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch.fx.experimental.proxy_tensor import make_fx

from reroll.errors import CaptureError
from reroll.graph.editing import primals_and_tangents
from reroll.graph.effects import spelled
from reroll.graph.layouts import inverse, is_dense, memory_order
from reroll.graph.memory import viewed
from reroll.graph.private import CHECK, Watching, is_higher_order, is_overload
from reroll.recurrence import Recurrence
from reroll.segment.joint.cells import PARTS
from reroll.segment.joint.checks import Noted
from reroll.segment.joint.functional import is_whole, made_functional, may_write, without_update

aten = torch.ops.aten
Function = Callable[..., tuple[Tensor, ...]]
_STATES = ("philox_seed", "philox_offset", "rng_state", "unused")  # of generators, as attentions name them
_SEEN_THROUGH = {"autograd_function_apply"}  # it runs its functions before modes are asked
in_parts: Callable[[], AbstractContextManager[None]] = enable_python_dispatcher
"""Inside, operations that are made of others run as those."""


def joint_graph(
    function: Function,
    copying: Function,
    own: Iterable[int],
    primals: list[Tensor],
    ends: Sequence[Tensor],
    recurrence: Recurrence,
    *,
    decompose: bool,
    look: SeenOperations,
) -> fx.GraphModule:
    """Results of a function of fake ``primals``, then the gradient of each primal, None where there is none.

    function: some steps of ``recurrence``; no result shares memory with a primal. copying: the same, whose carries are
    copies, for where it has to be made functional: AOTAutograd takes no result that is a view. own: carries, by number,
    that no copy is needed of. ends: those of its results that have gradients, of which the graph takes the tangents
    behind the primals; without any it is the forward alone. decompose: into what inductor knows. look: what was seen in
    a run of the function. Raises CaptureError.
    """
    table, noted = decompositions() if decompose else None, Noted(function) if look.checks else None
    try:
        with _values_unseen():
            graph = _traced(noted or function, primals, ends, table) if not look.hidden else None
            if graph is None:
                noted = Noted(copying) if look.checks else None
                made = aot_export_joint_simple(
                    noted or copying, tuple(primals), trace_joint=bool(ends), decompositions=table
                )
                assert isinstance(made, fx.GraphModule)
                graph = _take_contiguous(_hand_on(made, own), primals[0].fake_mode)  # type: ignore[attr-defined]
    except RuntimeError as error:
        if "input mutations" in str(error):
            raise CaptureError(
                f"The step at {recurrence.where} updates a tensor in place where nothing says so: in the forward of an "
                "autograd.Function without ctx.mark_dirty, or by an operator whose schema does not tell, as that of "
                "torch.native_batch_norm. Update it outside of the function; use the modules of torch.nn."
            ) from error
        raise CaptureError(
            f"The step at {recurrence.where} could not be traced with its gradient: {error}. Simplify the step, or "
            "leave this model to another backend."
        ) from error
    _check(graph.graph, noted, recurrence)
    _write_out_zeros(graph, primals[0].fake_mode)  # type: ignore[attr-defined]
    if not any(spelled(node) == "native_dropout" for node in recurrence.step.graph.nodes):  # which draws all the same
        _drop_all(graph.graph)
    leave_out_seeds(graph.graph)
    graph.graph.eliminate_dead_code()
    return graph


def _hand_on(module: fx.GraphModule, own: Iterable[int]) -> fx.GraphModule:
    """Have a graph give results that it copies, by number, as what they are copies of, where that is memory which no
    other result is: a tape that holds it has what is handed on."""
    output = module.graph.output_node()
    results: Any = list(output.args[0])  # type: ignore[arg-type]
    for number in own:
        made = _copied(results[number])
        if made and made not in results:
            results[number] = made
    output.args = (tuple(results),)
    return module


def _copied(value: Any) -> fx.Node | None:
    """What a value is a copy of in the same layout, if that is a result of an operation in memory of its own."""
    if not (isinstance(value, fx.Node) and value.target is aten.clone.default):
        return None
    (made,) = value.all_input_nodes
    while made.target is aten.detach.default:
        (made,) = made.all_input_nodes
    alike = made.meta["val"].stride() == value.meta["val"].stride()
    return made if alike and made.op == "call_function" and viewed(made) is None else None


def _take_contiguous(module: fx.GraphModule, mode: Any) -> fx.GraphModule:
    """Have a graph take tangents that are contiguous, as gradients arrive. AOTAutograd takes them to lie as the results
    do, which its operations may depend on: they are laid out so."""
    graph = module.graph
    for tangent in primals_and_tangents(graph)[1]:
        value, users = tangent.meta["val"], list(tangent.users)
        if value.is_contiguous() or not is_dense(value):
            continue
        order, contiguous = memory_order(value), torch.contiguous_format
        with mode:
            tangent.meta["val"], made = torch.empty_like(value, memory_format=contiguous), tangent
        laid_out: list[tuple[Any, list[Any], dict[str, Any]]] = [
            (aten.permute.default, [[*order]], {}),
            (aten.clone.default, [], {"memory_format": contiguous}),
            (aten.permute.default, [inverse(order)], {}),
        ]
        first = next(node for node in graph.nodes if node.op != "placeholder")
        with mode, graph.inserting_before(first):
            for target, args, kwargs in laid_out:
                before, made = made, graph.call_function(target, (made, *args), kwargs)
                made.meta["val"] = target(before.meta["val"], *args, **kwargs)
        for user in users:
            user.replace_input_with(tangent, made)
    return module


def _check(graph: fx.Graph, noted: Noted | None, recurrence: Recurrence) -> None:
    """Have the errors raised that torch raises for some values of a matrix. Raises CaptureError where they are lost."""
    if noted:
        noted.pass_through(graph)
    elif any("_linalg_check_errors" in str((node.target, node.args)) for node in graph.nodes):
        raise CaptureError(
            f"The step at {recurrence.where} calls a function of torch.linalg that raises an error for some values of "
            "a matrix, and runs a function by an operator (torch.utils.checkpoint, torch.cond), where that error is "
            "lost. Call the one that does not check: torch.linalg.inv_ex, solve_ex, cholesky_ex."
        )


def _write_out_zeros(graph: fx.GraphModule, mode: Any) -> None:
    """Zeros of autograd that have no memory (as of ``sgn``) become zeros that have, as tapes and inductor take."""
    for node in graph.graph.find_nodes(op="call_function", target=aten._efficientzerotensor.default):
        node.target, node.args = aten.full.default, (node.args[0], 0)
        with mode:
            node.meta["val"] = aten.full.default(*node.args, **node.kwargs)


def _drop_all(graph: fx.Graph) -> None:
    """A dropout that drops all is a product with zero, for which torch draws nothing; its parts here would draw."""
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        source, rate, *_ = node.args
        if rate != 1.0:
            continue
        value, mask = node.meta["val"]
        with graph.inserting_before(node):
            made = (
                graph.call_function(aten.mul.Scalar, (source, 0.0)),
                graph.call_function(aten.full.default, (list(mask.shape), False), _placed(mask, mask.device)),
            )
        for result, like in zip(made, (value, mask), strict=True):
            result.meta["val"] = like
        for pick in list(node.users):
            pick.replace_all_uses_with(made[pick.args[1]])
            graph.erase_node(pick)
        graph.erase_node(node)


def leave_out_seeds(graph: fx.Graph) -> None:
    """Attention without dropout draws no numbers, so its gradient needs none of the states that it is given: on a card
    these are memory that nobody wrote, some of it on the computer. They become zeros where the attention was."""
    for node in [node for node in graph.nodes if is_overload(node.target) and _is_attention_backward(node.target)]:
        named = dict(zip((each.name for each in node.target._schema.arguments), node.args, strict=False)) | node.kwargs
        if named.get("dropout_p") != 0.0:
            continue
        query = named["query"].meta["val"]
        for state in (named[name] for name in _STATES if isinstance(named.get(name), fx.Node)):
            value = state.meta["val"]
            with graph.inserting_before(node):
                zeros = graph.call_function(aten.full.default, (list(value.shape), 0), _placed(value, query.device))
            with query.fake_mode:
                zeros.meta["val"] = aten.full.default(*zeros.args, **zeros.kwargs)
            node.replace_input_with(state, zeros)


def _is_attention_backward(target: Any) -> bool:
    return target.namespace == "aten" and "attention_backward" in target.name()


def _placed(value: Tensor, device: torch.device) -> dict[str, Any]:
    return {"dtype": value.dtype, "device": device, "pin_memory": False}


@contextmanager
def _values_unseen() -> Iterator[None]:
    """Without torch's anomaly mode, which looks for NaN in gradients: these are fake, and have no values."""
    enabled, looks = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    torch.autograd.set_detect_anomaly(False)
    try:
        yield
    finally:
        torch.autograd.set_detect_anomaly(enabled, looks)


class SeenOperations(Watching):
    """Sees whether an operation inside updates a part of some memory, or raises an error for some values of a matrix.
    ``hidden``: no graph of what is inside is made functional by itself."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.hidden = self.checks = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.hidden and may_write(func):
            target, places = without_update(func)
            self.hidden = target is None or not all(is_whole(args[place]) for place in places)
        self.checks = self.checks or func is CHECK
        return func(*args, **(kwargs or {}))


@contextmanager
def operations_seen(step: fx.GraphModule) -> Iterator[SeenOperations]:
    """Look at runs of a step inside. What a step does that calls functions which no mode sees through is hidden; such
    runs are not looked at."""
    look = SeenOperations()
    called = {target.name() for target in _targets(step) if is_higher_order(target)}
    look.hidden = not called <= _SEEN_THROUGH
    with in_parts(), look if called <= _SEEN_THROUGH else nullcontext():
        yield look


def _traced(function: Function, primals: list[Tensor], ends: Sequence[Tensor], table: Any) -> fx.GraphModule | None:
    """What ``aot_export_joint_simple`` makes, in less than half its time; None where something is updated that only
    that makes functional."""
    mode: Any = primals[0].fake_mode  # type: ignore[attr-defined]

    def run(primals: list[Tensor], tangents: list[Tensor]) -> tuple[Tensor | None, ...]:
        results = function(*primals)
        if not tangents:
            return tuple(results)
        inputs = [primal for primal in primals if primal.requires_grad]
        reached = [result for result in results if result.requires_grad]
        gradients = iter(torch.autograd.grad(reached, inputs, tangents, allow_unused=True))
        return (*results, *(next(gradients) if primal.requires_grad else None for primal in primals))

    with mode, in_parts(), torch.set_grad_enabled(torch.is_grad_enabled() and bool(ends)):
        tangents = [torch.empty_like(end, memory_format=torch.contiguous_format) for end in ends]
        graph = make_fx(run, decomposition_table=table, _allow_non_fake_inputs=True)(primals, tangents)
    return graph if made_functional(graph.graph, mode) else None


def _targets(step: fx.GraphModule) -> set[Any]:
    """What a step calls, and what the functions in it call."""
    graphs = [module.graph for module in step.modules() if isinstance(module, fx.GraphModule)]
    return {node.target for graph in graphs for node in graph.nodes if node.op == "call_function"}


def _has_out(target: Any) -> bool:
    return any(each.is_out for each in target._schema.arguments)


def decompositions() -> Any:
    """Inductor's, but for those of operators that write their result into an operand (``mm(..., out=...)``): some take
    no such operand. A graph that has one is made functional.
    """
    import torch._inductor.lowering  # noqa: F401  # those of pooling read it, and nothing else may have loaded it yet
    from torch._inductor.decomposition import select_decomp_table

    table = select_decomp_table()
    kept = {target: rule for target, rule in table.items() if not (is_overload(target) and _has_out(target))}
    return {**kept, **PARTS}
