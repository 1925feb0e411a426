"""The faults that ``proof_mutants.py`` switches on one at a time: each is one edit of a function of reroll's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Fault(NamedTuple):
    """An edit of a function, named ``module:function`` without ``reroll.``: one text of its source by another."""

    where: str
    before: str
    after: str


_GRADIENTS, _RUN = "backends.runtime.gradients", "backends.runtime.run"
_VALUES, _RANDOM = "backends.runtime.values", "backends.runtime.randomness"
_TRACE, _PEEL, _LOOP = "segment.trace", "capture.rows.peel", "passes.loop"
_MERGE, _BATCH = "passes.segment.merge_gradients", "passes.segment.batch_products"
_MATRICES, _RNN = "segment.linear.matrices", "capture.structured_loops.rnn"

FAULTS: Mapping[str, Fault] = {
    # Playing a program: gradients.
    "a gradient is added twice": Fault(f"{_GRADIENTS}:Gradients.add", "add_(grad)", "add_(grad, alpha=2)"),
    "the last gradient replaces those before": Fault(
        f"{_GRADIENTS}:Gradients.add", "[operand].add_(", "[operand].copy_("
    ),
    "the gradient of a row goes to the row before": Fault(
        f"{_GRADIENTS}:Gradients.add_rows", "x, start, steps)", "x, max(start - 1, 0), steps)"
    ),
    "rows in falling order get each other's gradients": Fault(
        f"{_GRADIENTS}:Gradients.add_rows", ".add_(grad)", ".add_(grad if x.stride > 0 else grad.flip(x.dim))"
    ),
    "the first segment's products are left out": Fault(
        f"{_GRADIENTS}:_Taking.multiply", "self.gradients.add_product(", "self.start and self.gradients.add_product("
    ),
    "a product is added turned": Fault(
        "segment.factors:Product.add_to", "total.addmm_(left, right)\n", "total.addmm_(left, right, alpha=0.5)\n"
    ),
    "gradients of two carries are swapped": Fault(
        f"{_GRADIENTS}:Gradients.collect", "in routes.carries]", "in routes.carries[::-1]]"
    ),
    "operands behind several steps have no gradient": Fault(
        f"{_GRADIENTS}:Routes.reach", "carries = {carry", "carries = set() and {carry"
    ),
    "all operands have a gradient": Fault(
        f"{_GRADIENTS}:Routes.reach", "if not ends.isdisjoint(outputs) for each in", "for each in"
    ),
    "a weight of one step has the gradient of another": Fault(
        f"{_GRADIENTS}:_Taking.take", "[self.start + offset]", "[self.start]"
    ),
    "no gradient passes back over one step": Fault(
        "backends.runtime.executable:Executable.passed_on", "if carry in cut", "if carry in cut or start == 4"
    ),
    "the first operand has no gradient": Fault(
        "backends.runtime.node:_Reversible.backward", "and i not in dead else", "and i not in dead and i else"
    ),
    "outputs that depend on parameters need no gradient": Fault(
        "backends.runtime.node:_Reversible.forward", "if i not in next(", "if i == 0 or i not in next("
    ),
    "the gradient of a last state is left out": Fault(
        f"{_RUN}:Run._tangents",
        "carried[index] if index < width",
        "None if not start and index < width else carried[index] if index < width",
    ),
    "gradients of a segment's rows are those before": Fault(
        f"{_RUN}:_of_steps", "kept.among(start, steps)", "kept.among(max(start - steps, 0), steps)"
    ),
    "segments are reversed in the order in which they ran": Fault(
        f"{_RUN}:Run._backward", "pieces.pop()", "pieces.pop(0)"
    ),
    # Playing a program: values.
    "rows of a segment are written in falling order": Fault(f"{_RUN}:Run._emit", "row[taken]", "row[taken].flip(0)"),
    "two last states are swapped": Fault(f"{_RUN}:Run.forward", "in self.last.tensors]", "in self.last.tensors[::-1]]"),
    "kept carries come back swapped": Fault(f"{_VALUES}:Kept.carry", "in self.tensors)", "in self.tensors[::-1])"),
    "a block gives another carry": Fault(
        f"{_RUN}:Run._pick", "kept = block.carries[index]", "kept = block.carries[0] or block.carries[-1]"
    ),
    "a block is cut at the wrong places": Fault(
        f"{_VALUES}:Stored.read", "values[n * width : (n + 1) * width]", "values[n * width : (n + 1) * width][::-1]"
    ),
    "a replay runs from the first carry": Fault(
        f"{_RUN}:Run._carry",
        "kept: Kept = self.values[source]",
        "kept: Kept = next(each for each in self.values.values() if isinstance(each, Kept))",
    ),
    "a replay has the random numbers of another step": Fault(
        f"{_RUN}:Run._run", "self.own.start(carry.random)", "self.own.state(self.operands)"
    ),
    "a replay draws from torch's generator": Fault(
        f"{_RUN}:Run._run", "_UNSEEN if self.own is None else self.own.drawing()", "_UNSEEN"
    ),
    "a dropout is not scaled in a replay": Fault(f"{_RANDOM}:_dropped", "1.0 / kept if kept", "1.0 if kept"),
    "random numbers of a replay are not kept with a carry": Fault(
        f"{_RUN}:Run._save", "self._random(carry)", "self.start.random"
    ),
    "a bit of a byte is read as another": Fault(
        "backends.codecs.bits:_pack", "np.packbits(mask)", "np.packbits(mask, bitorder='little')"
    ),
    "the last byte of a packed tensor is lost": Fault(
        "backends.codecs.bits:_unpack",
        "words = torch.empty(",
        "packed = packed.clone()\n    packed[-1] = 0\n    words = torch.empty(",
    ),
    "nonzero elements come back in another order": Fault(
        "backends.codecs.sparse:encode_sparse", "= found\n", "= found[::-1]\n"
    ),
    "a kept carry is rounded": Fault(
        "passes.program.compress:compress",
        'for codec in ("auto", context.codec)',
        'for codec in ("bfloat16", "bfloat16")',
    ),
    "a thin tape is read in another order": Fault(
        "backends.inductor.lower:Segment.kept", "in self.thin.keeps]", "in self.thin.keeps[::-1]]"
    ),
    # A segment: what its steps read, and how it is traced.
    "a step reads the row before": Fault(
        f"{_TRACE}:time_slice", "x.start + start, steps)", "max(x.start + start - 1, 0), steps)"
    ),
    "a falling sequence is read in rising order": Fault(
        f"{_TRACE}:_at", "t if x.stride > 0 else slots.steps - 1 - t", "t"
    ),
    "a number is that of the segment's first step": Fault(
        f"{_TRACE}:_at", "inputs[places[0]][t]", "inputs[places[0]][0]"
    ),
    "a number is that of the first step": Fault(
        f"{_TRACE}:numbers_of", "torch.tensor(x.values,", "torch.tensor(x.values[:1] * len(x.values),"
    ),
    "carries are swapped from step to step": Fault(
        f"{_TRACE}:_one_by_one", "carries = results[: len(carries)]", "carries = results[: len(carries)][::-1]"
    ),
    "rows of a segment are stacked in falling order": Fault(f"{_TRACE}:_one_by_one", "ys.append(", "ys.insert(0, "),
    "a carry that begins without a gradient has none": Fault(
        f"{_TRACE}:_settle_gradients", "result.requires_grad and not", "False and not"
    ),
    "the first result has no gradient": Fault(
        f"{_TRACE}:trace", "if value.requires_grad)", "if i and value.requires_grad)"
    ),
    "random numbers are drawn again for a backward": Fault(
        "segment.cut.partition:may_recompute",
        "if _why_fixed(node):\n        return False",
        "if not is_overload(target) or 'convolution' in str(target):\n        return False",
    ),
    "what is drawn twice is drawn once": Fault("graph.editing:repeatable", " or _may_draw(target)", ""),
    "invariants of one operation are one": Fault(
        "segment.invariants:Once._copy", "(node.target, repr(args), repr(kwargs))", "(node.target,)"
    ),
    # Passes.
    "what is not merged is left out of a gradient": Fault(
        f"{_MERGE}:_merge", "fewer += [addend for addend in addends if addend not in merged]", "pass"
    ),
    "merged factors are those of other steps": Fault(
        f"{_MERGE}:_product", "concatenated(graph, right, 0)", "concatenated(graph, right[::-1], 0)"
    ),
    "a merged sum leaves its last step out": Fault(
        f"{_MERGE}:_row_sum", "concatenated(graph, rows, dims[0])", "concatenated(graph, rows[:-1], dims[0])"
    ),
    "embeddings of other steps get a gradient": Fault(
        f"{_MERGE}:_embedding",
        "(concatenated(graph, column, 0) for column in columns)",
        "(concatenated(graph, column[::1 - 2 * at], 0) for at, column in enumerate(columns))",
    ),
    "products of several steps all give the first": Fault(
        f"{_BATCH}:_join", "product, 0, start, stop)", "product, 0, 0, stop - start)"
    ),
    "parts of a product count as all of it": Fault(
        f"{_BATCH}:_product_of", "complete = ends[-1] == whole", "complete = True or ends[-1] == whole"
    ),
    "a decay reaches what is written in its own step": Fault(f"{_MATRICES}:Decays.of", ".tril(-1)", ".tril(0)"),
    "a state is read with the decay of the step behind": Fault(
        f"{_MATRICES}:Chunk._over_rows", "decays.since[:, :-1]", "decays.since[:, 1:]"
    ),
    "what is written in a step is not read in it": Fault(
        f"{_MATRICES}:Chunk._over_rows", "if form.write is None:", "if True:"
    ),
    # Capture: the step that repeats.
    "what began two steps ago is swapped": Fault(
        "capture.steps.operands:_operand", "leaves[:back][::-1]", "leaves[:back]"
    ),
    "the last value is given for the one before": Fault(
        "capture.steps.extract:_place_results", "starts[register] + ago", "starts[register]"
    ),
    "a list of numbers is its first": Fault(
        "capture.steps.extract:_Builder._add", "Numbers(values)", "Numbers(values[:1] * len(values))"
    ),
    "a sequence is read row by row": Fault(
        "capture.steps.extract:_Builder._add", "dim, start, stride))", "dim, start, 1 if stride > 0 else stride))"
    ),
    "functions of the user's are moved out of the step": Fault(
        "capture.steps.step:_find_invariants", "and is_torchs(node, module)", ""
    ),
    "a list of rows is taken from its second on": Fault(
        "capture.steps.outer:Outer._column",
        "last = where[group[0]], where",
        "last = (where[group[0]][0], min(where[group[0]][1] + 1, 1)), where",
    ),
    "rows that were taken in falling order rise": Fault(
        "capture.steps.outer:Outer._column", "call(torch.flip, stacked, [0])", "stacked"
    ),
    "a stale view is read": Fault(
        "capture.normal.functional:_Rewriter._current", "if self.taken[old] != self.versions[storage]:", "if False:"
    ),
    "an update in place changes the old value": Fault("graph.inplace:out_of_place", "root = old.clone()", "root = old"),
    "an update in place cuts the gradient": Fault(
        "graph.inplace:out_of_place", "root = old.clone()", "root = old.detach().clone()"
    ),
    "running variances are not written": Fault(
        "graph.inplace:_python_function_updates", "for name in names:", "for name in names[:1]:"
    ),
    "a buffer is not written back": Fault(
        "capture.normal.functional:_Rewriter._write_back", 'not in ("placeholder", "get_attr")', '!= "get_attr"'
    ),
    "a first sum begins with one": Fault(
        "capture.ends:_First.even", "_made_like(node, front, 0)", "_made_like(node, front, 1)"
    ),
    "a layer goes back in rising order": Fault(f"{_RNN}:_layers", "back=way == 1", "back=False"),
    "both directions have the weights of one": Fault(
        f"{_RNN}:_layers", "rnn.weights[at], back", "rnn.weights[layer * rnn.ways], back"
    ),
    # Passes on loops.
    "a second loop reads the step behind": Fault(
        "passes.loop.fuse_loops:_lag", "lags.add(x.start - found.shift)", "lags.add(x.start - found.shift + 1)"
    ),
    "a peeled step reads the first row": Fault(f"{_PEEL}:_x", "x.start + x.stride * t)", "x.start)"),
    "peeled rows come behind those of the loop": Fault(
        f"{_PEEL}:_joined", "for ys in head] + [stacked]", "for ys in tail] + [stacked]"
    ),
    "a mean is divided by one less": Fault(f"{_LOOP}.reductions:_divided", "(total, count)", "(total, count - 1)"),
    "all targets count in a loss": Fault(
        f"{_LOOP}.reductions:_mean",
        "graph.call_function(torch.sum, (made[-1],))",
        "graph.call_function(torch.numel, (made[-1],))",
    ),
    "a loss begins with one": Fault(
        f"{_LOOP}.fold_reductions:_zero", "(tuple(value.shape), 0)", "(tuple(value.shape), 1)"
    ),
    "a total has the row before": Fault(
        f"{_LOOP}.fold_reductions:_extended", "emitter, total.rows.shift)", "emitter, max(total.rows.shift - 1, 0))"
    ),
    "a readout's sign is wrong": Fault(
        f"{_LOOP}.fold_readouts:_extend",
        "made.append(emitter.row(end, start) if",
        "made.append(step.graph.call_function(torch.neg, (emitter.row(end, start),)) if",
    ),
    "a last row is that of the step before": Fault(
        f"{_LOOP}.take_last_rows:_taken", "emitter.row(row_read(node)[0], at)", "emitter.row(row_read(node)[0], at - 1)"
    ),
    "the last row is taken from another carry": Fault(
        f"{_LOOP}.take_last_rows:_taken", "(call, carried[int(stacked.args[1])])", "(call, 0)"
    ),
    "rows are kept from one step earlier on": Fault(
        "recurrence:RowSteps.among",
        "self.first + self.every * begin - start",
        "max(self.first + self.every * begin - start - 1, 0)",
    ),
    # A record, and what is around a loop.
    "a run that was left out reads the row before": Fault(
        "capture.recorder.repeats:Repeats._operands",
        "(x, slope, x + slope * run if slope else x)",
        "(x, slope, x + slope * max(run - 1, 0) if slope else x)",
    ),
    "results of a record are given in another order": Fault(
        "backends.front.recorded:_filled", "else results[skeleton.index]", "else results[-1 - skeleton.index]"
    ),
    "buffers are those of an earlier call": Fault(
        "backends.dynamo.entry:assemble",
        "_attribute(gm, name))",
        "torch.zeros_like(_attribute(gm, name)) if isinstance(_attribute(gm, name), Tensor) else _attribute(gm, name))",
    ),
    # More of the same.
    "the first segment is not reversed": Fault(f"{_RUN}:Run._backward", "while pieces:", "while len(pieces) > 1:"),
    "a gradient that is missing is one": Fault(
        f"{_RUN}:Run._tangents", "torch.zeros(like.shape", "torch.ones(like.shape"
    ),
    "a gradient begins with one": Fault(
        f"{_GRADIENTS}:Gradients._zeros", "else torch.zeros_like(like)", "else torch.ones_like(like)"
    ),
    "sums of gradients share memory": Fault(f"{_GRADIENTS}:Gradients.add", "grad if own else grad.clone()", "grad"),
    "weights of steps are those of the first segment": Fault(
        f"{_TRACE}:step_inputs", "x.operands[start : start + steps]", "x.operands[:steps]"
    ),
    "numbers of steps are those of the first segment": Fault(
        f"{_TRACE}:step_inputs", "narrow(0, start, steps)", "narrow(0, 0, steps)"
    ),
    "a sum of gradients leaves its last one out": Fault(
        f"{_MERGE}:_total", "left, right), nodes)", "left, right), nodes[:-1] or nodes)"
    ),
    "the gradient of a carry stays in its segment": Fault(
        f"{_RUN}:Run._backward", "carried = self.executable.passed_on(", "_ = self.executable.passed_on("
    ),
    "a carry is scaled between segments": Fault(
        f"{_RUN}:Run._run",
        "return Carry(tensors, made=True)",
        "return Carry(tuple(each * 1.01 for each in tensors), made=True)",
    ),
    "the last operand has another sign": Fault(
        "backends.runtime.node:_Reversible.forward",
        "plain = [operand.detach() for operand in operands]",
        "plain = [*(each.detach() for each in operands[:-1]), -operands[-1].detach()]",
    ),
    "operations with one first operand are one": Fault(
        "graph.editing:deduplicate", "_frozen((node.args, node.kwargs))", "_frozen((node.args[:1], {}))"
    ),
}
