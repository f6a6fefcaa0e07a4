"""Who runs in a step, with which blocks, and what it computes.

sequences    the rows of requests
waiting      the order in which rows wait
beams        the rows of beam groups; beam_search lets them go on
admission    who may start, and with which blocks it finds
scheduler    a step's plan: tokens of each running row, and the rare events before them
batch        the planned tokens, flattened
"""
