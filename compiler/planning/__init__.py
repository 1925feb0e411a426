"""From options and sizes to the one plan that is played.

In: Options, and a Demand: bytes of carries, tapes, scratch, what is around the loop
Out: a Plan: schedule, chunk, slots, tier, tree, with its predicted peak; or a BudgetError that names the least
Nouns: Options, Choice, Plan, Demand, Alternative, Offer (of one loop among several that share a budget)
Mind: Plans are made of numbers here; nothing is compiled in this room.
    Choices are ranked in steps run (`steps_run`), not in seconds: the choice is the same on every machine and every
    rank.
    `auto` with a budget is `store_all`, else `revolve` (with a tier named also `hrevolve`) with what the budget leaves.
    No segment runs more than 16 times; `hrevolve` has no such limit.
    `auto` without a budget takes `store_all` with replay only if the kept bytes are a tenth of what eager keeps
    (spiking networks; GRU would be 14 %, LSTM 16 %) and that halves the memory, weights and gradients included
    (`Replaying.pays`): it takes 1.1 to 1.3 of the time of `store_all` without. Else it is the revolve of least memory
    that runs at most 5 % longer than `store_all`, not `standard` (a third longer: nn.LSTM was slower than eager).
    Candidates that do not read ahead stand among the others, a tenth dearer (`_UNHIDDEN`); so does `remote` with one
    segment a chunk, which needs least.
    `Demand.bound` is a lower bound of a peak from the tree alone (the counts less a carry, and less a tape where the
    last segment is short), so no program is made of what cannot fit. A test compares choices with and without it.
    A named schedule takes the longest segments that fit, with tiny chunks if need be: `double` of 20,000 steps in 150
    KB is 2.5 times slower than `auto`.
    `segments.usual_segment`: 32 or 16 steps a segment where a step makes less than 4 or 8 KiB, T is at least 512, and
    no schedule is named that saves every byte. A cell of torch's counts as a dozen operations.
    `offers.Priced` is `schedules.Problem` with costs; its better local double (4 % on average) is not in the planner.
"""
