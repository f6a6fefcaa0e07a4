"""Who runs in a step, with which blocks, and what it computes.

sequences    the rows of requests
waiting      the order in which rows wait
beams        the rows of beam groups; beam_search lets them go on
admission    who may start, and with which blocks it finds
plan         tokens of each running row in a step, and the blocks that it needs
preemption   who gives blocks back: finished rows and victims
scheduler    a step's plan, and the rare events before it
batch        the planned tokens, flattened
"""
